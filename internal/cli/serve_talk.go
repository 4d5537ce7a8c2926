// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/serve"
)

// nameOr returns the host name where there is no other.
func nameOr(name string) (string, error) {
	if name != "" {
		return name, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("find the host name: %w", err)
	}
	return host, nil
}

func newServeTalkCommand(s IO) *cobra.Command {
	srv := &serve.TalkServer{}
	cmd := &cobra.Command{
		Use:   "talk",
		Short: "Answer each line by TCP, and each datagram by UDP, with who heard it from whom",
		Long: `Answer each line by TCP, and each datagram by UDP, with who heard it from whom:
"NAME heard 1400 bytes from 10.244.1.2:4000: #1". The answer to a datagram is as
long as the datagram. weft talk is the client.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if srv.Name, err = nameOr(srv.Name); err != nil {
				return err
			}
			return srv.Run(cmd.Context(), s.Out)
		},
	}
	cmd.Flags().IntVar(&srv.Port, "port", 7, "port to listen on, all addresses")
	cmd.Flags().StringVar(&srv.Name, "name", "", "name of the server in its answers (default the host name)")
	cmd.Flags().DurationVar(&srv.Drain, "drain", 5*time.Second, "how long open connections go on after SIGTERM")
	return cmd
}

func newTalkCommand(s IO) *cobra.Command {
	var cfg serve.TalkConfig
	var quiet bool
	cmd := &cobra.Command{
		Use:   "talk HOST:PORT[/udp]",
		Short: "Talk to weft serve talk and say who answers; any failure gives exit code 1",
		Long: `Talk to weft serve talk and say who answers. All messages go through one socket: a
TCP connection, or a UDP socket that is connected. A TCP connection that is cut is
the end, unless --reopen makes another one.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Target = args[0]
			t := tally{servers: map[string]int{}}
			err := serve.Talk(cmd.Context(), cfg, func(r serve.Reply) {
				t.count(r)
				if !quiet {
					printReply(s.Out, r)
				}
			})
			if err != nil {
				return err
			}
			if cfg.Count != 1 {
				fmt.Fprintf(s.Out, "%d messages, %d failed, answered by %s\n", t.sent, t.failed, servers(t.servers))
			}
			if t.failed > 0 {
				return fmt.Errorf("%d of %d messages failed, the first with: %w", t.failed, t.sent, t.first)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.Count, "count", 1, "number of messages; 0 goes on until interrupted")
	f.DurationVar(&cfg.Interval, "interval", 0, "from one message to the next")
	f.DurationVar(&cfg.Timeout, "timeout", 2*time.Second, "time to connect, and for each answer")
	f.IntVar(&cfg.Size, "size", 32, "bytes in a message")
	f.IntVar(&cfg.SourcePort, "source-port", 0, "port of the client (default any)")
	f.BoolVar(&cfg.Each, "each", false, "make a new socket for each message")
	f.BoolVar(&cfg.Reopen, "reopen", false, "make a new socket after an error")
	f.BoolVar(&cfg.Unconnected, "unconnected", false, "send datagrams from a socket that is not connected")
	f.BoolVar(&cfg.Reset, "reset", false, "end TCP connections by a reset, so that their port is free at once")
	f.BoolVarP(&quiet, "quiet", "q", false, "print only the summary and what failed")
	return cmd
}

// tally is how it went so far.
type tally struct {
	sent, failed int
	first        error
	servers      map[string]int
}

func (t *tally) count(r serve.Reply) {
	t.sent++
	if r.Err == nil {
		t.servers[r.Server]++
		return
	}
	t.failed++
	if t.first == nil {
		t.first = r.Err
	}
}

func printReply(w io.Writer, r serve.Reply) {
	if r.Err != nil {
		fmt.Fprintf(w, "%d error after %.3f ms: %v\n", r.Number, float64(r.Took.Microseconds())/1000, r.Err)
		return
	}
	fmt.Fprintf(w, "%d %d bytes in %.3f ms, %s to %s: %s\n", r.Number, r.Size, float64(r.Took.Microseconds())/1000, r.Local, r.Peer, r.Text)
}

// servers is "a 3, b 2", by name.
func servers(counts map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, counts[name]))
	}
	if parts == nil {
		return "nobody"
	}
	return strings.Join(parts, ", ")
}
