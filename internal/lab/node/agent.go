// SPDX-License-Identifier: Apache-2.0

// Package node runs the agent of a lab's node and asks it things.
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/lab/process"
	"github.com/weft-mesh/weft/internal/lab/shim"
)

const (
	stopTime   = 10 * time.Second // between SIGTERM and SIGKILL
	callTime   = 2 * time.Second  // of one call; then the agent's state is looked at again
	backoffMin = 200 * time.Millisecond
	backoffMax = 10 * time.Second
	// goodRun is how long an agent must run for its next restart to be at once.
	goodRun = 30 * time.Second
	// tries is how often an agent may end before whoever waits for it gives up.
	tries = 3
)

// ErrStopped says that the agent was stopped by its user.
var ErrStopped = errors.New("the agent was stopped; start it with `weft lab agent start`")

// Config of an agent's process; every field is required.
type Config struct {
	Name       string
	Weft       string // executable
	ConfigFile string
	Socket     string
	NetNS      string // file
	Cgroup     string
	Log        io.Writer
	Env        []string
	// Changed is called after each change of State, without locks held.
	Changed func()
}

// Agent is the process of one node's agent. One that ends by itself is started
// again, ever more slowly; one that was stopped stays so.
type Agent struct {
	cfg Config

	mu       sync.Mutex
	proc     *process.Process // protected by mu; nil while there is none
	started  time.Time        // protected by mu; of proc
	wanted   bool             // protected by mu; false once stopped
	restarts int              // protected by mu; not asked for
	delay    time.Duration    // protected by mu; before the next restart
	lastExit string           // protected by mu
}

// New returns an agent that is not started.
func New(cfg Config) *Agent { return &Agent{cfg: cfg} }

// State is what an agent's process does.
type State struct {
	// Process is "running", "stopped" (by the user) or "restarting" (it ended by itself).
	Process  string `json:"process"`
	Pid      int    `json:"pid,omitempty"`
	Restarts int    `json:"restarts"`
	LastExit string `json:"lastExit,omitempty"`
}

// State of the process now.
func (a *Agent) State() State {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := State{Process: "stopped", Restarts: a.restarts, LastExit: a.lastExit}
	switch {
	case a.proc != nil:
		s.Process, s.Pid = "running", a.proc.Pid
	case a.wanted:
		s.Process = "restarting"
	}
	return s
}

// Start starts the process unless it runs.
func (a *Agent) Start() error {
	a.mu.Lock()
	a.wanted, a.delay = true, 0
	err := a.startLocked()
	if err != nil {
		a.wanted = false
	}
	a.mu.Unlock()
	a.cfg.Changed()
	return err
}

func (a *Agent) startLocked() error {
	if a.proc != nil {
		return nil
	}
	p, err := process.Start(process.Config{
		Weft:   a.cfg.Weft,
		Cgroup: a.cfg.Cgroup,
		Log:    a.cfg.Log,
		Spec: shim.Spec{
			NetNS: a.cfg.NetNS,
			Env:   a.cfg.Env,
			Argv:  []string{a.cfg.Weft, "agent", "--config", a.cfg.ConfigFile},
		},
	})
	if err != nil {
		return fmt.Errorf("start the agent of %s: %w", a.cfg.Name, err)
	}
	a.proc, a.started = p, time.Now()
	go a.watch(p)
	return nil
}

// watch waits for the end of p and has it started again if it was wanted.
func (a *Agent) watch(p *process.Process) {
	code := p.ExitCode()
	a.mu.Lock()
	a.lastExit = fmt.Sprintf("exit code %d", code)
	again := a.proc == p && a.wanted // else somebody stopped it, or has started the next one
	if a.proc == p {
		a.proc = nil
	}
	if again {
		a.restarts++
		a.delay = nextDelay(a.delay, time.Since(a.started))
		time.AfterFunc(a.delay, a.again)
	}
	a.mu.Unlock()
	a.cfg.Changed()
}

func nextDelay(last, ran time.Duration) time.Duration {
	if last == 0 || ran > goodRun {
		return backoffMin
	}
	return min(2*last, backoffMax)
}

func (a *Agent) again() {
	a.mu.Lock()
	if a.wanted {
		if err := a.startLocked(); err != nil {
			a.lastExit = err.Error()
			a.delay = nextDelay(a.delay, 0)
			time.AfterFunc(a.delay, a.again)
		}
	}
	a.mu.Unlock()
	a.cfg.Changed()
}

// Kill ends the process with SIGKILL, with no chance to tidy up.
func (a *Agent) Kill() error {
	p := a.unwanted()
	if p == nil {
		return nil
	}
	if err := p.Kill(); err != nil {
		return fmt.Errorf("kill the agent of %s: %w", a.cfg.Name, err)
	}
	return a.ended(p)
}

// Stop ends the process with SIGTERM, and SIGKILL if that takes long.
func (a *Agent) Stop(ctx context.Context) error {
	p := a.unwanted()
	if p == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	if err := p.Stop(ctx); err != nil {
		return fmt.Errorf("stop the agent of %s: %w", a.cfg.Name, err)
	}
	return a.ended(p)
}

func (a *Agent) unwanted() *process.Process {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wanted = false
	return a.proc
}

// ended waits until watch has taken notice of the end of p.
func (a *Agent) ended(p *process.Process) error {
	<-p.Done()
	a.mu.Lock()
	if a.proc == p {
		a.proc = nil
	}
	a.mu.Unlock()
	a.cfg.Changed()
	return nil
}

// call makes one gRPC call after the other until one succeeds, the agent is
// found stopped, or ctx ends; then the error says what was wrong last.
func (a *Agent) call(ctx context.Context, f func(context.Context, weftv1.NodeClient) error) error {
	conn, err := grpc.NewClient("unix:"+a.cfg.Socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, MaxDelay: backoffMin},
			MinConnectTimeout: callTime,
		}))
	if err != nil {
		return fmt.Errorf("reach the agent of %s: %w", a.cfg.Name, err)
	}
	defer conn.Close()
	client := weftv1.NewNodeClient(conn)
	var last error
	for {
		if a.State().Process == "stopped" {
			return ErrStopped
		}
		once, cancel := context.WithTimeout(ctx, callTime)
		err := f(once, client)
		timedOut := once.Err() != nil
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return a.explain(last, err)
		case !timedOut:
			last = err
			if !sleep(ctx, 50*time.Millisecond) {
				return a.explain(last, err)
			}
		default:
			last = err
		}
	}
}

func (a *Agent) explain(last, err error) error {
	if last == nil {
		last = err
	}
	s := a.State()
	if s.Process != "running" {
		return fmt.Errorf("the agent is %s after %s", s.Process, s.LastExit)
	}
	return fmt.Errorf("the agent does not answer: %w", last)
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// WaitApplied returns when the agent has everything up to the generation in
// force, and what it refused.
func (a *Agent) WaitApplied(ctx context.Context, generation uint64) (refused []string, err error) {
	err = a.call(ctx, func(ctx context.Context, c weftv1.NodeClient) error {
		r, err := c.WaitApplied(ctx, &weftv1.WaitAppliedRequest{Generation: generation}, grpc.WaitForReady(true))
		if err != nil {
			return err
		}
		refused = r.SourceErrors
		return nil
	})
	return refused, err
}

// WaitReady returns when the agent says that it is ready, or has ended several
// times.
func (a *Agent) WaitReady(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go a.giveUp(ctx, cancel)
	return a.call(ctx, func(ctx context.Context, c weftv1.NodeClient) error {
		r, err := c.Status(ctx, &weftv1.StatusRequest{}, grpc.WaitForReady(true))
		if err != nil {
			return err
		}
		if !r.Ready {
			return notReady(r)
		}
		return nil
	})
}

// giveUp calls cancel once the agent has ended tries times.
func (a *Agent) giveUp(ctx context.Context, cancel func()) {
	limit := a.State().Restarts + tries
	for a.State().Restarts < limit {
		if !sleep(ctx, 50*time.Millisecond) {
			return
		}
	}
	cancel()
}

// Ready asks once.
func (a *Agent) Ready(ctx context.Context) error {
	conn, err := grpc.NewClient("unix:"+a.cfg.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("reach the agent of %s: %w", a.cfg.Name, err)
	}
	defer conn.Close()
	r, err := weftv1.NewNodeClient(conn).Status(ctx, &weftv1.StatusRequest{})
	if err != nil {
		return err
	}
	if !r.Ready {
		return notReady(r)
	}
	return nil
}

func notReady(r *weftv1.StatusResponse) error {
	for _, c := range r.Components {
		if !c.Ready {
			return fmt.Errorf("%s is not ready: %s", c.Name, c.Message)
		}
	}
	return errors.New("not ready")
}
