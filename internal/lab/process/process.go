// SPDX-License-Identifier: Apache-2.0

// Package process runs one long-lived command of a lab, an agent or a container,
// in a cgroup of its own, with its output in a log.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/lab/shim"
)

// drainTime is how long the output of a process is awaited after its end.
const drainTime = 2 * time.Second

// Config says what to run; every field is required.
type Config struct {
	Weft   string // executable
	Spec   shim.Spec
	Cgroup string // made if it is not there; the process is in it before it becomes its command
	Log    io.Writer
}

// Process is a running or ended process and all its descendants.
type Process struct {
	Pid    int
	cgroup string
	cmd    *exec.Cmd
	done   chan struct{}
	state  *os.ProcessState // valid after done
}

// Start starts a process, a leader of its own session.
func Start(c Config) (*Process, error) {
	if err := cgroup.Create(c.Cgroup); err != nil {
		return nil, err
	}
	// Not CLONE_INTO_CGROUP: kernels with cgroup.kill counted by sequence compare
	// the parent's count with the new cgroup's (seen with 6.18), and so kill
	// whatever is cloned into a cgroup that was killed once.
	c.Spec.Cgroup = c.Cgroup
	args, err := shim.Command(c.Spec)
	if err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe for the output: %w", err)
	}
	defer write.Close()
	cmd := exec.Command(c.Weft, args...)
	cmd.Stdout, cmd.Stderr = write, write
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		read.Close()
		return nil, fmt.Errorf("start %s: %w", c.Spec.Argv[0], err)
	}
	p := &Process{Pid: cmd.Process.Pid, cgroup: c.Cgroup, cmd: cmd, done: make(chan struct{})}
	go p.wait(read, c.Log)
	return p, nil
}

// wait ends the descendants with their leader, as a PID namespace would, and
// takes all output in before it calls the process done.
func (p *Process) wait(read *os.File, log io.Writer) {
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		defer read.Close()
		// A log that cannot be written, such as on a full disk, must not stop
		// the process with a full pipe.
		if _, err := io.Copy(log, read); err != nil {
			io.Copy(io.Discard, read)
		}
	}()
	var exit *exec.ExitError
	if err := p.cmd.Wait(); err != nil && !errors.As(err, &exit) {
		fmt.Fprintf(log, "wait for the process: %v\n", err)
	}
	p.state = p.cmd.ProcessState
	if err := cgroup.Kill(p.cgroup); err != nil {
		fmt.Fprintln(log, err)
	}
	select {
	case <-drained:
	case <-time.After(drainTime):
	}
	close(p.done)
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running tells whether the process has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// ExitCode is 128 and the number of the signal for a killed process. It waits
// for the end.
func (p *Process) ExitCode() int {
	<-p.done
	return ExitCode(p.state)
}

// ExitCode of a process that has ended, as shells have it: 128 and the number
// of the signal for one that was killed.
func ExitCode(state *os.ProcessState) int {
	if state == nil {
		return shim.ExitSetup
	}
	if s, ok := state.Sys().(syscall.WaitStatus); ok && s.Signaled() {
		return 128 + int(s.Signal())
	}
	return state.ExitCode()
}

// Kill ends the process and all its descendants at once.
func (p *Process) Kill() error {
	// By its number too: it may not be in its cgroup yet.
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", p.Pid, err)
	}
	return cgroup.Kill(p.cgroup)
}

// Stop sends SIGTERM to the process, waits until ctx ends, then kills it and its
// descendants. It returns when they have ended.
func (p *Process) Stop(ctx context.Context) error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("terminate process %d: %w", p.Pid, err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
	}
	if err := p.Kill(); err != nil {
		return err
	}
	<-p.done
	return nil
}
