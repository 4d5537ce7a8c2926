// SPDX-License-Identifier: Apache-2.0

// Package lab is a Kubernetes-like cluster on one machine, as its user sees it:
// nodes and pods are network namespaces, agents and containers real processes.
// The lab itself is a daemon (package daemon); this package starts it, talks to
// it, and removes whatever is left of a lab, also without its help.
package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/daemon"
	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/lab/logfile"
	"github.com/weft-mesh/weft/internal/lab/shim"
	"github.com/weft-mesh/weft/internal/state"
)

// startTime is how long the daemon has to answer its first request.
const startTime = 10 * time.Second

// ErrDown says that a lab does not run.
var ErrDown = errors.New("the lab is not up; start it with `weft lab up -f DIR`")

// Refused is an input that was not taken in, with all that is wrong with it.
type Refused struct{ Errors []state.SourceError }

func (r *Refused) Error() string {
	if len(r.Errors) == 1 {
		return "the input has an error; nothing was changed"
	}
	return fmt.Sprintf("the input has %d errors; nothing was changed", len(r.Errors))
}

// NotInForce is what was done but does not hold, and why.
type NotInForce struct {
	Failures []string
	broken   bool
}

func (n *NotInForce) Error() string { return "not in force:\n  " + strings.Join(n.Failures, "\n  ") }

// Client talks to the daemon of one lab.
type Client struct {
	layout layout.Layout
	http   *http.Client
}

// NewClient returns a client of the lab called name, which need not run.
func NewClient(name string) (*Client, error) {
	lay, err := layout.New(name)
	if err != nil {
		return nil, err
	}
	return ClientOf(lay), nil
}

// ClientOf returns a client of the lab with that layout, which need not run.
func ClientOf(lay layout.Layout) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", lay.Socket())
	}
	return &Client{layout: lay, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// Layout says where everything of the lab is.
func (c *Client) Layout() layout.Layout { return c.layout }

// Up starts a lab and applies the files; it returns when all of it is in force.
// Input that is wrong starts nothing. A lab that crashed is removed first.
func (c *Client) Up(ctx context.Context, cfg daemon.Config, files []api.File, timeout time.Duration, progress func(string)) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	objects, errs := daemon.Decode(files)
	if len(errs) == 0 {
		_, errs = daemon.NewCluster(cfg.Nodes).Apply(objects)
	}
	if len(errs) > 0 {
		return &Refused{errs}
	}
	if _, err := c.Status(ctx); err == nil {
		return fmt.Errorf("lab %s is up: change it with `weft lab apply -f`, or remove it with `weft lab down`", cfg.Name)
	}
	if err := c.remove(ctx); err != nil {
		return fmt.Errorf("remove what an earlier lab left: %w", err)
	}
	if err := c.start(ctx, cfg); err != nil {
		return errors.Join(err, c.remove(context.WithoutCancel(ctx)))
	}
	err := c.stream(ctx, api.PathUp, api.Files{Files: files, Timeout: timeout}, progress)
	var not *NotInForce
	if errors.As(err, &not) && not.broken {
		return errors.Join(err, c.Down(context.WithoutCancel(ctx)))
	}
	return err
}

// start starts the daemon in its own session and cgroup and waits until it
// answers.
func (c *Client) start(ctx context.Context, cfg daemon.Config) error {
	if err := os.MkdirAll(c.layout.Root, 0o755); err != nil {
		return fmt.Errorf("make the folder of labs: %w", err)
	}
	if err := os.Mkdir(c.layout.Dir(), 0o755); err != nil {
		return fmt.Errorf("make the folder of the lab (is it being started twice?): %w", err)
	}
	if err := cgroup.Create(c.layout.DaemonCgroup()); err != nil {
		return err
	}
	log, err := os.OpenFile(c.layout.DaemonLog(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("open the log of the lab: %w", err)
	}
	defer log.Close()
	arg, err := json.Marshal(cfg)
	if err != nil {
		return fmt.Errorf("encode the configuration of the lab: %w", err)
	}
	args, err := shim.Command(shim.Spec{Cgroup: c.layout.DaemonCgroup(), Argv: []string{cfg.Weft, "lab", "daemon", string(arg)}})
	if err != nil {
		return err
	}
	cmd := exec.Command(cfg.Weft, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the lab: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return c.awaitStart(ctx, ended)
}

func (c *Client) awaitStart(ctx context.Context, ended <-chan error) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := net.Dial("unix", c.layout.Socket())
		if err == nil {
			return conn.Close()
		}
		select {
		case <-tick.C:
		case err := <-ended:
			return fmt.Errorf("start the lab: its daemon ended: %v\n%s", err, strings.Join(logfile.Tail(c.layout.DaemonLog(), 10), "\n"))
		case <-ctx.Done():
			return fmt.Errorf("start the lab: its daemon does not answer: %w", err)
		}
	}
}

// Apply changes a lab; it returns when the objects of the files are in force.
func (c *Client) Apply(ctx context.Context, files []api.File, timeout time.Duration, progress func(string)) error {
	return c.stream(ctx, api.PathApply, api.Files{Files: files, Timeout: timeout}, progress)
}

// Delete takes the objects of the files away; it returns when they are gone.
func (c *Client) Delete(ctx context.Context, files []api.File, timeout time.Duration, progress func(string)) error {
	return c.stream(ctx, api.PathDelete, api.Files{Files: files, Timeout: timeout}, progress)
}

// Agent kills, starts or restarts the agent of a node.
func (c *Client) Agent(ctx context.Context, verb api.AgentVerb, progress func(string)) error {
	return c.stream(ctx, api.PathAgent, verb, progress)
}

// Status of the lab.
func (c *Client) Status(ctx context.Context) (*api.Status, error) {
	var st api.Status
	return &st, c.get(ctx, api.PathStatus, &st)
}

// Target finds the container of a pod, "NS/POD" or "NS/deploy/NAME"; an empty
// container is the first.
func (c *Client) Target(ctx context.Context, pod, container string) (*api.Target, error) {
	var t api.Target
	q := url.Values{"pod": {pod}, "container": {container}}
	return &t, c.get(ctx, api.PathTarget+"?"+q.Encode(), &t)
}

func (c *Client) get(ctx context.Context, path string, v any) error {
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(v); err != nil {
		return fmt.Errorf("read the lab's answer: %w", err)
	}
	return nil
}

func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var send io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		send = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://lab"+path, send)
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	resp, err := c.http.Do(req)
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, fmt.Errorf("lab %s: %w", c.layout.Name, ErrDown)
	}
	if err != nil {
		return nil, fmt.Errorf("ask the lab: %w", err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	var refused api.Error
	if err := json.NewDecoder(resp.Body).Decode(&refused); err != nil || refused.Error == "" {
		return nil, fmt.Errorf("ask the lab: %s", resp.Status)
	}
	return nil, errors.New(refused.Error)
}

func (c *Client) stream(ctx context.Context, path string, body any, progress func(string)) error {
	resp, err := c.do(ctx, http.MethodPost, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	for {
		b, err := lines.ReadBytes('\n')
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted; the lab goes on with it: %w", ctx.Err())
		}
		if err != nil {
			return fmt.Errorf("the lab's daemon ended in the middle (see %s): %w", c.layout.DaemonLog(), err)
		}
		var line api.Line
		if err := json.Unmarshal(b, &line); err != nil {
			return fmt.Errorf("read the lab's answer: %w", err)
		}
		switch r := line.Result; {
		case r == nil:
			progress(line.Progress)
		case len(r.Refused) > 0:
			return &Refused{r.Refused}
		case len(r.Failures) > 0:
			return &NotInForce{r.Failures, r.Broken}
		default:
			return nil
		}
	}
}
