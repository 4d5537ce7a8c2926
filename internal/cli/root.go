// SPDX-License-Identifier: Apache-2.0

// Package cli holds weft's commands: each is a function with its effects
// injected, prints its result to Out and everything else to Err.
package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/agent"
	"github.com/weft-mesh/weft/internal/datapath/probe"
)

// IO are the streams of one invocation.
type IO struct {
	In       io.Reader
	Out, Err io.Writer
}

// New returns the weft command with all its sub-commands.
func New(s IO) *cobra.Command {
	root := &cobra.Command{
		Use:           "weft",
		Short:         "Connect, balance, protect and explain the traffic of pods",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	root.AddCommand(newAgentCommand(s, agent.Run))
	root.AddCommand(newStatusCommand(s))
	root.AddCommand(newTableCommand(s))
	root.AddCommand(newObserveCommand(s))
	root.AddCommand(newPolicyCommand(s))
	root.AddCommand(newServiceCommand(s), newDenyCommand(s))
	root.AddCommand(newCheckCommand(s, probe.Run))
	root.AddCommand(newVersionCommand(s))
	root.AddCommand(newBenchCommand(s))
	root.AddCommand(newLabCommand(s))
	root.AddCommand(newServeCommand(s), newGetCommand(s), newTalkCommand(s), newResolveCommand(s), newProbeCommand(s), newSendSpoofedCommand(s))
	return root
}

// Run runs the command line args and returns the exit code: 0, or 1 with the
// error on Err. An error that carries its own code (ExitError) gives that.
func Run(ctx context.Context, args []string, s IO) int {
	root := New(s)
	root.SetArgs(args)
	if err := root.ExecuteContext(ctx); err != nil {
		var exit *ExitError
		if asExit(err, &exit) {
			return exit.Code
		}
		fmt.Fprintln(s.Err, "weft:", err)
		return 1
	}
	return 0
}
