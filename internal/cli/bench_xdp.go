// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/bench"
)

func newBenchXDPCommand(s IO) *cobra.Command {
	var (
		plan   bench.ForwardPlan
		output string
	)
	cmd := &cobra.Command{
		Use:   "xdp",
		Short: "Datagrams that a node sends on: by XDP, by tcx, by iptables",
		Long: `Measure how many datagrams a second one node sends on from a client outside to a
backend on another node, over a veth pair: by weft's XDP program, by its tcx
program, and by iptables (legacy) with conntrack. They take turns within each
round. The source makes frames in the kernel (BPF_PROG_RUN on live frames).`,
		Args:    cobra.NoArgs,
		Example: `  weft bench xdp --rounds 10 --services 50000`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return fmt.Errorf("output %q: table or json", output)
			}
			plan.Progress = func(step string) { fmt.Fprintln(s.Err, step) }
			result, err := plan.Run(cmd.Context())
			if err != nil {
				return fmt.Errorf("measure forwarding: %w", err)
			}
			if output != "json" {
				return result.Print(s.Out)
			}
			e := json.NewEncoder(s.Out)
			e.SetIndent("", "  ")
			return e.Encode(result)
		},
	}
	flags := cmd.Flags()
	flags.IntVar(&plan.Rounds, "rounds", 5, "rounds that count, after one of warming up")
	flags.DurationVar(&plan.Duration, "duration", time.Second, "how long each way is measured in a round")
	flags.IntVar(&plan.Clients, "clients", 64, "source ports that take turns")
	flags.IntVar(&plan.Services, "services", 0, "services beside the one that is asked")
	flags.StringVarP(&output, "output", "o", "table", "table, or json with every raw number")
	return cmd
}
