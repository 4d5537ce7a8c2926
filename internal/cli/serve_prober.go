// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/serve/prober"
)

func newServeProberCommand(s IO) *cobra.Command {
	var cfg prober.Config
	cmd := &cobra.Command{
		Use:   "prober --control PATH",
		Short: "Answer with a name by TCP, UDP and SCTP, and probe others on orders from a unix socket",
		Long: `Answer with a name by TCP, UDP and SCTP, and probe others on orders from a unix
socket: JSON, one line for each batch and one for its verdicts. Tests of policies run
one in every pod. SCTP is spoken over raw sockets, also where the kernel has none.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Name == "" {
				host, err := os.Hostname()
				if err != nil {
					return fmt.Errorf("find the host name: %w", err)
				}
				cfg.Name = host
			}
			return prober.Run(cmd.Context(), cfg, s.Out)
		},
	}
	cmd.Flags().StringVar(&cfg.Name, "name", "", "what to answer (default the host name)")
	cmd.Flags().StringVar(&cfg.Control, "control", "", "unix socket for orders")
	cmd.Flags().IntSliceVar(&cfg.TCP, "tcp", nil, "TCP ports to answer on")
	cmd.Flags().IntSliceVar(&cfg.UDP, "udp", nil, "UDP ports to answer on")
	cmd.Flags().IntSliceVar(&cfg.SCTP, "sctp", nil, "SCTP ports to answer on")
	if err := cmd.MarkFlagRequired("control"); err != nil {
		panic(err) // the flag is not there: a mistake in this function
	}
	return cmd
}
