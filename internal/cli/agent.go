// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"
)

// runAgent is agent.Run: it returns when ctx is done, or with why it could not
// go on.
type runAgent func(ctx context.Context, configPath string, stderr io.Writer) error

func newAgentCommand(s IO, run runAgent) *cobra.Command {
	var config string
	cmd := &cobra.Command{
		Use:   "agent --config FILE",
		Short: "Run the agent of this node",
		Long: `Run the agent of this node: it wires pods for the CNI plugin, keeps the kernel
in line with the manifest folder, and answers the other commands on the socket
weft.sock in its runDir. Its log goes to standard error.

It ends in order at SIGTERM or SIGINT. What it has put into the kernel stays
and keeps pods connected; the next agent takes it over.`,
		Example: `  weft agent --config /etc/weft/agent.yaml`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), config, s.Err)
		},
	}
	cmd.Flags().StringVar(&config, "config", "", "the agent's config, a YAML file")
	if err := cmd.MarkFlagRequired("config"); err != nil {
		panic(err) // the flag is defined in the line above
	}
	return cmd
}
