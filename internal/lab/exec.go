// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/lab/process"
	"github.com/weft-mesh/weft/internal/lab/shim"
	"github.com/weft-mesh/weft/internal/netdev"
)

// killTime is how long a command that was told to end has before it is killed.
const killTime = 5 * time.Second

// Streams are those of a command.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// Exec runs argv beside the container of t, as a child of this process, and
// returns its exit code.
func (c *Client) Exec(ctx context.Context, weft string, t *api.Target, argv []string, s Streams) (int, error) {
	if !t.Running {
		return 0, fmt.Errorf("container %s of pod %s does not run", t.Container, t.Pod)
	}
	spec := t.Spec
	spec.Argv = argv
	spec.Env = c.environment(spec.Env, t.Node)
	if term := os.Getenv("TERM"); term != "" {
		spec.Env = append(spec.Env, "TERM="+term)
	}
	return run(ctx, weft, spec, s)
}

// NodeExec runs argv on a node, or in the outside world, and returns its exit
// code.
func (c *Client) NodeExec(ctx context.Context, weft, node string, argv []string, s Streams) (int, error) {
	netns := c.layout.NodeNetNS(node)
	if node == layout.Outside {
		netns = c.layout.UnderlayNetNS()
	}
	if _, err := os.Stat(netdev.NetNSPath(netns)); err != nil || strings.Contains(node, "-") {
		return 0, c.noNode(ctx, node)
	}
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PATH=") || strings.HasPrefix(kv, layout.EnvLab+"=") || strings.HasPrefix(kv, "WEFT_SOCKET=")
	})
	env = append(env, "PATH="+filepath.Dir(weft)+":"+os.Getenv("PATH"))
	dir, err := os.Getwd()
	if err != nil {
		return 0, fmt.Errorf("find the working directory: %w", err)
	}
	spec := shim.Spec{
		Cgroup: c.layout.HostCgroup(node), NetNS: netdev.NetNSPath(netns),
		Dir: dir, Env: c.environment(env, node), Argv: argv,
	}
	return run(ctx, weft, spec, s)
}

// noNode says which nodes there are.
func (c *Client) noNode(ctx context.Context, node string) error {
	st, err := c.Status(ctx)
	if err != nil {
		return err
	}
	names := []string{layout.Outside}
	for _, n := range st.Nodes {
		names = append(names, n.Name)
	}
	return fmt.Errorf("there is no node %q: want one of %s", node, strings.Join(names, ", "))
}

// environment adds what makes weft's own commands mean this lab and node.
func (c *Client) environment(env []string, node string) []string {
	env = append(slices.Clone(env), layout.EnvLab+"="+c.layout.Name)
	if node != layout.Outside {
		env = append(env, "WEFT_SOCKET="+c.layout.NodeSocket(node))
	}
	return env
}

// run runs a command through the shim. The end of ctx asks the command to end.
func run(ctx context.Context, weft string, spec shim.Spec, s Streams) (int, error) {
	args, err := shim.Command(spec)
	if err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(ctx, weft, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.In, s.Out, s.Err
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = killTime
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && cmd.ProcessState == nil {
		return 0, fmt.Errorf("run %s: %w", spec.Argv[0], err)
	}
	return process.ExitCode(cmd.ProcessState), nil
}
