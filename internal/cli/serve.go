// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/serve"
)

// newServeCommand holds small servers for pods of examples.
func newServeCommand(s IO) *cobra.Command {
	cmd := &cobra.Command{Use: "serve", Short: "Run a small server, for examples and tests", Args: cobra.NoArgs}
	cmd.AddCommand(newServeHTTPCommand(s), newServeEchoCommand(s), newServeTalkCommand(s), newServeDNSCommand(s), newServeProberCommand(s))
	return cmd
}

func newServeHTTPCommand(s IO) *cobra.Command {
	var port int
	var name string
	cmd := &cobra.Command{
		Use:   "http",
		Short: "Answer HTTP requests with who asked whom, as JSON",
		Long: `Answer HTTP requests with who asked whom, as JSON. ?bytes=N answers with N bytes,
?delay=DURATION after a while, ?status=CODE with that code; /healthz with "ok".`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if name, err = nameOr(name); err != nil {
				return err
			}
			return serve.HTTP(cmd.Context(), port, name, s.Out)
		},
	}
	cmd.Flags().IntVar(&port, "port", 8080, "port to listen on, all addresses")
	cmd.Flags().StringVar(&name, "name", "", "name of the server in its answers (default the host name)")
	return cmd
}

func newServeEchoCommand(s IO) *cobra.Command {
	var port int
	cmd := &cobra.Command{
		Use:   "echo",
		Short: "Send back whatever comes, by TCP and UDP",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return serve.Echo(cmd.Context(), port, s.Out) },
	}
	cmd.Flags().IntVar(&port, "port", 7, "port to listen on, all addresses")
	return cmd
}

func newGetCommand(s IO) *cobra.Command {
	var cfg serve.GetConfig
	var quiet, byServer bool
	cmd := &cobra.Command{
		Use:   "get URL",
		Short: "Ask a URL, once or often; any failed request gives exit code 1",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.URL = args[0]
			if !strings.Contains(cfg.URL, "://") {
				cfg.URL = "http://" + cfg.URL
			}
			if err := cfg.Validate(); err != nil {
				return err
			}
			sum := serve.Get(cmd.Context(), cfg, func(status string, body []byte) {
				if !quiet {
					fmt.Fprintf(s.Out, "%s %s\n", status, strings.TrimSpace(string(body)))
				}
			})
			if cfg.Count != 1 {
				fmt.Fprintln(s.Out, sum)
			}
			if byServer {
				fmt.Fprintf(s.Out, "answered by %s\n", servers(sum.Servers))
			}
			if sum.Failed > 0 {
				return fmt.Errorf("%d of %d requests failed, the first with: %w", sum.Failed, sum.Requests, sum.First)
			}
			return nil
		},
	}
	cmd.Flags().IntVar(&cfg.Count, "count", 1, "number of requests; 0 goes on until interrupted")
	cmd.Flags().DurationVar(&cfg.Interval, "interval", 0, "pause after each request")
	cmd.Flags().DurationVar(&cfg.Timeout, "timeout", 5*time.Second, "time for one request")
	cmd.Flags().IntVar(&cfg.Concurrency, "concurrency", 1, "requests at the same time")
	cmd.Flags().BoolVar(&cfg.KeepAlive, "keepalive", false, "each of the concurrent requests keeps its connection")
	cmd.Flags().Int64Var(&cfg.Upload, "upload", 0, "bytes to send with each request, by POST")
	cmd.Flags().Float64Var(&cfg.Rate, "rate", 0, "begin so many requests each second, whatever becomes of earlier ones")
	cmd.Flags().DurationVar(&cfg.Duration, "duration", 0, "begin no request after this time (default none)")
	cmd.Flags().IntVar(&cfg.SourcePort, "source-port", 0, "port of the client; its connections end by a reset (default any)")
	cmd.Flags().BoolVar(&byServer, "servers", false, "print how many answers each server gave")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print only the summary and what failed")
	return cmd
}

func newProbeCommand(s IO) *cobra.Command {
	var timeout time.Duration
	var size int
	cmd := &cobra.Command{
		Use:   "probe HOST:PORT[/udp]...",
		Short: "Try to reach ports: a TCP handshake, or by UDP an echo",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, target := range args {
				took, err := serve.Probe(cmd.Context(), target, size, timeout)
				if err != nil {
					return err
				}
				fmt.Fprintf(s.Out, "%s reached in %s\n", target, took.Round(time.Microsecond))
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Second, "time for one target")
	cmd.Flags().IntVar(&size, "size", 32, "bytes in a datagram")
	return cmd
}

func newSendSpoofedCommand(s IO) *cobra.Command {
	var source, to string
	var cfg serve.SpoofConfig
	cmd := &cobra.Command{
		Use:   "send-spoofed --source IP --to HOST:PORT",
		Short: "Send UDP datagrams with a forged source address, to see them dropped",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if cfg.Source, err = netip.ParseAddr(source); err != nil {
				return fmt.Errorf("source %q: want an IP address", source)
			}
			if cfg.To, err = netip.ParseAddrPort(to); err != nil {
				return fmt.Errorf("to %q: want IP:PORT", to)
			}
			if cfg.Count < 1 || cfg.Interval < 0 {
				return fmt.Errorf("count %d, interval %s: want at least 1 and 0s", cfg.Count, cfg.Interval)
			}
			sent, err := serve.SendSpoofed(cmd.Context(), cfg)
			fmt.Fprintf(s.Out, "sent %d datagrams from %s to %s\n", sent, cfg.Source, cfg.To)
			return err
		},
	}
	cmd.Flags().StringVar(&source, "source", "", "address to write in the packets")
	cmd.Flags().StringVar(&to, "to", "", "where to send them")
	cmd.Flags().IntVar(&cfg.Count, "count", 1, "number of datagrams")
	cmd.Flags().DurationVar(&cfg.Interval, "interval", 0, "pause after each")
	for _, flag := range []string{"source", "to"} {
		if err := cmd.MarkFlagRequired(flag); err != nil {
			panic(err) // the flag is not there: a mistake in this function
		}
	}
	return cmd
}
