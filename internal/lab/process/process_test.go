// SPDX-License-Identifier: Apache-2.0

package process_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/lab/process"
	"github.com/weft-mesh/weft/internal/lab/shim"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// The test binary is its own shim.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "lab" && os.Args[2] == "shim" {
		err := shim.Run(os.Args[3])
		fmt.Fprintln(os.Stderr, err)
		var failed *shim.Error
		errors.As(err, &failed)
		os.Exit(failed.Code)
	}
	os.Exit(m.Run())
}

// buffer is a log in memory.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer // protected by mu
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// newCgroup returns the folder of a cgroup that goes with the test.
func newCgroup(t *testing.T) string {
	t.Helper()
	nstest.Need(t)
	mount, err := cgroup.Mount()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(mount, fmt.Sprintf("weft-test-%d-%s", os.Getpid(), t.Name()))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := cgroup.Remove(ctx, path); err != nil {
			t.Error(err)
		}
	})
	return path
}

func start(t *testing.T, cg string, spec shim.Spec) (*process.Process, *buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	log := &buffer{}
	p, err := process.Start(process.Config{Weft: self, Spec: spec, Cgroup: cg, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return p, log
}

func sh(script string) shim.Spec { return shim.Spec{Argv: []string{"sh", "-c", script}} }

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("never happened: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestOutputAndExitCode(t *testing.T) {
	p, log := start(t, newCgroup(t), sh("echo out; echo err >&2; exit 3"))
	if code := p.ExitCode(); code != 3 {
		t.Errorf("exit code %d: want 3", code)
	}
	if got := log.String(); got != "out\nerr\n" {
		t.Errorf("log %q", got)
	}
}

func TestExitCodesOfTheShim(t *testing.T) {
	cg := newCgroup(t)
	for _, c := range []struct {
		name string
		spec shim.Spec
		code int
		says string
	}{
		{"unknown command", shim.Spec{Argv: []string{"no-such-command"}}, shim.ExitNotFound, "no such command in PATH"},
		{"a folder", shim.Spec{Argv: []string{"/"}}, shim.ExitNotRunnable, "run /: permission denied"},
		{"no such folder to be in", shim.Spec{Dir: "/no/such", Argv: []string{"true"}}, shim.ExitSetup, "change to the working directory"},
		{"no such namespace", shim.Spec{NetNS: "/no/such", Argv: []string{"true"}}, shim.ExitSetup, "open network namespace"},
		{"no such file to mount", shim.Spec{Binds: []shim.Bind{{From: "/no/such", To: "/etc/hosts"}}, Argv: []string{"true"}}, shim.ExitSetup, "mount /no/such at /etc/hosts"},
	} {
		p, log := start(t, cg, c.spec)
		if code := p.ExitCode(); code != c.code || !strings.Contains(log.String(), c.says) {
			t.Errorf("%s: exit code %d, log %q: want %d, %q", c.name, code, log, c.code, c.says)
		}
	}
}

// What a process has started ends with it, even what left its session and its
// output.
func TestDescendantsEnd(t *testing.T) {
	cg := newCgroup(t)
	p, log := start(t, cg, sh("setsid sleep 1000 >/dev/null 2>&1 & echo started; exit 0"))
	p.ExitCode()
	if log.String() != "started\n" {
		t.Errorf("log %q", log)
	}
	until(t, "the cgroup is empty", func() bool {
		pids, err := cgroup.Pids(cg)
		return err == nil && len(pids) == 0
	})
}

func TestStop(t *testing.T) {
	cg := newCgroup(t)
	p, log := start(t, cg, sh(`trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.01; done`))
	until(t, "the trap is set", func() bool { return log.String() == "ready\n" })
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := p.Stop(ctx); err != nil || p.ExitCode() != 0 || log.String() != "ready\nbye\n" {
		t.Errorf("error %v, exit code %d, log %q", err, p.ExitCode(), log)
	}

	p, log = start(t, cg, sh(`trap '' TERM; echo ready; while :; do sleep 0.01; done`))
	until(t, "the trap is set", func() bool { return log.String() == "ready\n" })
	ctx, cancel = context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := p.Stop(ctx); err != nil || p.ExitCode() != 128+int(syscall.SIGKILL) {
		t.Errorf("error %v, exit code %d: want to be killed", err, p.ExitCode())
	}
}

// A cgroup whose processes were killed can be used again.
func TestStartAfterKill(t *testing.T) {
	cg := newCgroup(t)
	for range 3 {
		p, log := start(t, cg, sh("echo ready; exec sleep 1000"))
		until(t, "it runs", func() bool { return log.String() == "ready\n" })
		if !p.Running() {
			t.Fatal("it does not run")
		}
		if pids, err := cgroup.Pids(cg); err != nil || len(pids) != 1 || pids[0] != p.Pid {
			t.Errorf("processes %v (%v): want %d", pids, err, p.Pid)
		}
		if err := p.Kill(); err != nil || p.ExitCode() != 128+int(syscall.SIGKILL) {
			t.Errorf("error %v, exit code %d", err, p.ExitCode())
		}
	}
}

// A mount of the process is not seen outside, and it is in its namespace.
func TestNamespaces(t *testing.T) {
	ns := nstest.New(t)
	file := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(file, []byte("mine\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	want := ""
	if err := ns.Do(func() (err error) {
		want, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	spec := sh("cat /etc/hosts; readlink /proc/self/ns/net; echo $A")
	spec.NetNS, spec.Binds = ns.Path(), []shim.Bind{{From: file, To: "/etc/hosts"}}
	spec.Env = []string{"A=b", "PATH=" + os.Getenv("PATH")}
	p, log := start(t, newCgroup(t), spec)
	if code := p.ExitCode(); code != 0 || log.String() != "mine\n"+want+"\nb\n" {
		t.Errorf("exit code %d, log %q: want %s", code, log, want)
	}
	if b, err := os.ReadFile("/etc/hosts"); err != nil || string(b) == "mine\n" {
		t.Errorf("the mount is seen outside (%v)", err)
	}
}

func TestRemoveTree(t *testing.T) {
	cg := newCgroup(t)
	below := filepath.Join(cg, "a", "b")
	start(t, below, sh("sleep 1000"))
	start(t, filepath.Join(cg, "c"), sh("sleep 1000"))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for range 2 { // the second time there is nothing
		if err := cgroup.Remove(ctx, cg); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(cg); !os.IsNotExist(err) {
			t.Errorf("%s is still there", cg)
		}
	}
}
