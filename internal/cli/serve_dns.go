// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/serve/names"
)

func newServeDNSCommand(s IO) *cobra.Command {
	var cfg names.Config
	cmd := &cobra.Command{
		Use:   "dns",
		Short: "Answer for the names of a cluster, by UDP and TCP",
		Long: `Answer for the names of a cluster, by UDP and TCP, as Kubernetes specifies them:
Services (A, AAAA, SRV), the endpoints of headless ones, external names, pods, and
the names of addresses. It reads the cluster from a folder of manifests, as an
agent does, and refuses all other names.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Folder == "" {
				cfg.Folder = os.Getenv(layout.EnvCluster)
			}
			if cfg.Folder == "" {
				return fmt.Errorf("no folder of manifests: want --folder, or %s, which a lab sets in its containers", layout.EnvCluster)
			}
			return names.Serve(cmd.Context(), cfg, slog.New(slog.NewTextHandler(s.Err, nil)), s.Out)
		},
	}
	cmd.Flags().StringVar(&cfg.Folder, "folder", "", "manifests of the cluster (default $"+layout.EnvCluster+")")
	cmd.Flags().StringVar(&cfg.Domain, "domain", "cluster.local", "domain of the cluster")
	cmd.Flags().IntVar(&cfg.Port, "port", 53, "port to listen on, all addresses")
	cmd.Flags().BoolVarP(&cfg.Verbose, "verbose", "v", false, "print each query")
	return cmd
}

func newResolveCommand(s IO) *cobra.Command {
	cfg := names.AskConfig{ResolvConf: "/etc/resolv.conf"}
	cmd := &cobra.Command{
		Use:   "resolve NAME",
		Short: "Ask for a name, by the servers and search list of resolv.conf",
		Long: `Ask for a name, by the servers and search list of resolv.conf, and print the records
of the answer. An address as NAME asks for its names. No record gives exit code 1.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Name, cfg.Type = args[0], strings.ToUpper(cfg.Type)
			records, err := names.Ask(cmd.Context(), cfg)
			for _, r := range records {
				fmt.Fprintln(s.Out, r)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&cfg.Type, "type", "A", "type of the records: A, AAAA, SRV, CNAME, PTR, ...")
	cmd.Flags().StringVar(&cfg.Server, "server", "", "address, or IP:PORT, to ask instead of the servers of resolv.conf")
	cmd.Flags().BoolVar(&cfg.TCP, "tcp", false, "ask by TCP; otherwise by UDP, and by TCP for what does not fit")
	cmd.Flags().DurationVar(&cfg.Timeout, "timeout", 2*time.Second, "time for each server")
	return cmd
}
