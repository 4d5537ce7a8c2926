// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/cli"
	"github.com/weft-mesh/weft/internal/lab"
	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/source/cni/plugin"
)

// The scripts run the test binary as weft and weft-cni: real agents, real pods.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"weft": weftMain, "weft-cni": pluginMain})
}

func weftMain() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Run(ctx, os.Args[1:], cli.IO{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	stop()
	os.Exit(code)
}

func pluginMain() {
	p := &plugin.Plugin{Stdout: os.Stdout, Timeouts: plugin.DefaultTimeouts}
	skel.PluginMainFuncs(p.Funcs(), plugin.Versions(), "weft-cni of a test")
}

var labs atomic.Int32

func TestScript(t *testing.T) {
	nstest.Need(t)
	examples, err := filepath.Abs("../../examples")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			name := fmt.Sprintf("t%dx%d", os.Getpid(), labs.Add(2))
			env.Setenv("EXAMPLES", examples)
			env.Setenv(layout.EnvDir, filepath.Join(env.WorkDir, "labs"))
			env.Setenv(layout.EnvLab, name)
			env.Setenv("OTHER_LAB", name+"b")
			env.Defer(func() {
				for _, n := range []string{name, name + "b"} {
					if err := down(n, filepath.Join(env.WorkDir, "labs")); err != nil {
						t.Errorf("remove lab %s: %v", n, err)
					}
				}
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"nothing-left": nothingLeft,
			"kill-daemon":  killDaemon,
		},
	})
}

// down removes a lab of a script that ended early.
func down(name, root string) error {
	lay, err := layout.New(name)
	if err != nil {
		return err
	}
	lay.Root = root
	return lab.ClientOf(lay).Down(context.Background())
}

func labOf(ts *testscript.TestScript) layout.Layout {
	lay, err := layout.New(ts.Getenv(layout.EnvLab))
	ts.Check(err)
	lay.Root = ts.Getenv(layout.EnvDir)
	return lay
}

// nothingLeft fails where there is anything of the lab after down.
func nothingLeft(ts *testscript.TestScript, _ bool, _ []string) {
	lay := labOf(ts)
	for _, path := range []string{lay.Dir(), lay.Root, lay.Cgroup, lay.PinDir()} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			ts.Fatalf("%s is still there (%v)", path, err)
		}
	}
	names, err := netdev.ListNetNS()
	ts.Check(err)
	for _, n := range names {
		if strings.HasPrefix(n, lay.NetNSPrefix()) {
			ts.Fatalf("network namespace %s is still there", n)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	ts.Check(err)
	if strings.Contains(string(mounts), lay.Root) || strings.Contains(string(mounts), lay.NetNSPrefix()) {
		ts.Fatalf("a mount is still there:\n%s", mounts)
	}
}

// killDaemon kills the lab's daemon with SIGKILL.
func killDaemon(ts *testscript.TestScript, _ bool, _ []string) {
	pids, err := cgroup.Pids(labOf(ts).DaemonCgroup())
	ts.Check(err)
	if len(pids) != 1 {
		ts.Fatalf("the lab has the daemons %v", pids)
	}
	ts.Check(syscall.Kill(pids[0], syscall.SIGKILL))
	deadline := time.Now().Add(10 * time.Second)
	for len(pids) > 0 && time.Now().Before(deadline) {
		pids, err = cgroup.Pids(labOf(ts).DaemonCgroup())
		ts.Check(err)
	}
}
