// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/netdev"
)

// Task is what a process of a measurement is told: its whole command line, as JSON.
type Task struct {
	Load    Load           `json:"load"`
	Address netip.AddrPort `json:"address"`
	// Services are what a client connects to instead of Address.
	Services *Services `json:"services,omitempty"`
	// CPU is the processor to stay on; negative is any.
	CPU int `json:"cpu"`
}

// Process is the main function of a generator ("client") or server process; its
// argument is a Task. The server's first line of output is its address, its
// second, once its input ends or its load is over, its report; the client
// prints its report.
func Process(role string, args []string, in io.Reader, out, errs io.Writer) int {
	if err := process(role, args, in, out, errs); err != nil {
		fmt.Fprintf(errs, "bench %s: %v\n", role, err)
		return 1
	}
	return 0
}

func process(role string, args []string, in io.Reader, out, errs io.Writer) error {
	var task Task
	if len(args) != 1 {
		return fmt.Errorf("%d arguments: one task", len(args))
	}
	if role == "node" {
		return processNode(args[0], in, out, errs)
	}
	if err := json.Unmarshal([]byte(args[0]), &task); err != nil {
		return fmt.Errorf("task: %w", err)
	}
	if err := stayOn(task.CPU); err != nil {
		return err
	}
	switch role {
	case "client":
		report, err := RunClient(task.Load, task.Address, task.Services)
		return errors.Join(err, json.NewEncoder(out).Encode(report))
	case "server":
		return processServer(task, in, out)
	case "probe":
		return processProbe(in, out)
	}
	return fmt.Errorf("role %q: client, server, probe or node", role)
}

func processServer(task Task, in io.Reader, out io.Writer) error {
	s, err := NewServer(task.Load, task.Address)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, s.Addr()); err != nil {
		return errors.Join(err, s.Close())
	}
	go func() {
		_, _ = io.Copy(io.Discard, in)
		s.Stop()
	}()
	report, err := s.Run()
	return errors.Join(err, json.NewEncoder(out).Encode(report))
}

// stayOn keeps this process, with threads that are yet to come, on one processor.
func stayOn(cpu int) error {
	if cpu < 0 {
		return nil
	}
	var set unix.CPUSet
	set.Set(cpu)
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		if err := unix.SchedSetaffinity(tid, &set); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("stay on processor %d: %w", cpu, err)
		}
	}
	return nil
}

// environment keeps the Go runtime out of the way: no collector, no signals to
// preempt the loop, and a processor left for the rest while a call blocks.
func environment() []string {
	return append(os.Environ(), "GOGC=off", "GODEBUG=asyncpreemptoff=1", "GOMAXPROCS=4")
}

// child is a running process of a measurement.
type child struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
}

// start runs self with a role and a task in a network namespace.
func start(ctx context.Context, self []string, role, netns string, task any) (*child, error) {
	return startIn(ctx, self, role, netns, "", task)
}

// startIn starts it also in a cgroup; "" is the one of this process.
func startIn(ctx context.Context, self []string, role, netns, cgroup string, task any) (*child, error) {
	arg, err := json.Marshal(task)
	if err != nil {
		return nil, err
	}
	argv := append(slices.Clone(self), role, string(arg))
	c := &child{cmd: exec.CommandContext(ctx, argv[0], argv[1:]...)}
	c.cmd.Env = environment()
	c.cmd.Stderr = &c.stderr
	c.cmd.WaitDelay = 5 * time.Second
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	if cgroup != "" {
		folder, err := os.Open(cgroup)
		if err != nil {
			return nil, fmt.Errorf("start %s in a cgroup: %w", role, err)
		}
		defer folder.Close()
		c.cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(folder.Fd())}
	}
	if err := inNetNS(netns, c.cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s in %s: %w", role, netns, err)
	}
	return c, nil
}

// inNetNS calls f in the named namespace; "" is the one of this process.
func inNetNS(name string, f func() error) error {
	if name == "" {
		return f()
	}
	return netdev.InNetNS(NetnsPath(name), f)
}

// finish ends the child's input, waits for its end and reads its report. The
// error holds what the child said.
func (c *child) finish(report any) error {
	c.in.Close()
	line, readErr := c.out.ReadBytes('\n')
	if err := c.cmd.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(c.stderr.Bytes()))
	}
	if readErr != nil {
		return fmt.Errorf("read its report: %w", readErr)
	}
	return json.Unmarshal(line, report)
}

// kill is for a child that is not needed any more, whatever it does.
func (c *child) kill() {
	c.in.Close()
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}
