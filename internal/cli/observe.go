// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// The short names of enum values are their names without this prefix, in small
// letters.
const (
	verdictPrefix  = "VERDICT_"
	flowTypePrefix = "FLOW_TYPE_"
)

// observeFlags are the flags of "weft observe".
type observeFlags struct {
	agent                                   agentFlag
	output                                  outputFlag
	follow                                  bool
	last                                    uint32
	since                                   string
	fromPod, toPod, pod                     []string
	verdicts, reasons, protocols, flowTypes []string
}

func newObserveCommand(s IO) *cobra.Command {
	var f observeFlags
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show the flows of this node's pods, and what was dropped and why",
		Long: `Show the flows of this node's pods, oldest first: the first packet of each
connection, counters of those that last, their ends, and every dropped packet
with the reason.

A filter may be given several times, or with a list: any of its values will do.
Different filters must all hold. Where events were lost, because the agent or
this client was too slow, the output says so, at that place and with the exact
number.

With -o json each line is an object with one field, "flow" or "lost".`,
		Example: `  weft observe --follow
  weft observe --verdict dropped --since 1m
  weft observe --from-pod shop/web --to-pod shop/ --protocol tcp
  weft observe --last 20 -o json | jq -r .flow.source.pod`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.output.check(); err != nil {
				return err
			}
			req, err := f.request(time.Now())
			if err != nil {
				return err
			}
			print := newFlowTable(s.Out).print
			if f.output.json() {
				print = newFlowLines(s.Out).print
			}
			return f.agent.call(cmd.Context(), func(c weftv1.NodeClient) error {
				stream, err := c.Observe(cmd.Context(), req)
				if err != nil {
					return err
				}
				return receive(stream.Recv, print)
			})
		},
	}
	f.register(cmd)
	return cmd
}

func (f *observeFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.BoolVarP(&f.follow, "follow", "f", false, "go on with new flows until interrupted")
	flags.Uint32Var(&f.last, "last", 0, "at most so many of the newest flows that match; 0 is all that the agent has kept")
	flags.StringVar(&f.since, "since", "", "only flows since then: a duration such as 1m, or a time such as 2026-01-31T12:00:00Z")
	flags.StringSliceVar(&f.fromPod, "from-pod", nil, "source: NAMESPACE/NAME, or NAMESPACE/ for every pod of it")
	flags.StringSliceVar(&f.toPod, "to-pod", nil, "destination, likewise")
	flags.StringSliceVar(&f.pod, "pod", nil, "source or destination, likewise")
	flags.StringSliceVar(&f.verdicts, "verdict", nil, strings.Join(shortNames(weftv1.Verdict_name, verdictPrefix), " or "))
	flags.StringSliceVar(&f.reasons, "reason", nil, "reason of a drop, such as spoofed-address")
	flags.StringSliceVar(&f.protocols, "protocol", nil, "tcp, udp, icmp, icmpv6, or the number of an IP protocol")
	flags.StringSliceVar(&f.flowTypes, "type", nil, strings.Join(shortNames(weftv1.FlowType_name, flowTypePrefix), ", "))
	f.agent.register(cmd)
	f.output.register(cmd, "table, or json (an object a line)")
	complete(cmd, "verdict", shortNames(weftv1.Verdict_name, verdictPrefix)...)
	complete(cmd, "type", shortNames(weftv1.FlowType_name, flowTypePrefix)...)
	complete(cmd, "protocol", "tcp", "udp", "icmp", "icmpv6")
}

// request is what the flags ask for, at the time now. The agent checks pods,
// reasons and protocols.
func (f *observeFlags) request(now time.Time) (*weftv1.ObserveRequest, error) {
	r := &weftv1.ObserveRequest{
		Follow: f.follow, Last: f.last,
		FromPod: f.fromPod, ToPod: f.toPod, Pod: f.pod,
		Reason: f.reasons, Protocol: f.protocols,
	}
	var err error
	if r.Since, err = parseSince(f.since, now); err != nil {
		return nil, err
	}
	if r.Verdict, err = parseShort[weftv1.Verdict]("verdict", f.verdicts, weftv1.Verdict_value, weftv1.Verdict_name, verdictPrefix); err != nil {
		return nil, err
	}
	r.Type, err = parseShort[weftv1.FlowType]("type", f.flowTypes, weftv1.FlowType_value, weftv1.FlowType_name, flowTypePrefix)
	return r, err
}

func parseSince(s string, now time.Time) (*timestamppb.Timestamp, error) {
	if s == "" {
		return nil, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return timestamppb.New(now.Add(-d)), nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return nil, fmt.Errorf("since %q: want a duration such as 90s or 1h30m, or a time such as %s", s, "2026-01-31T12:00:00Z")
	}
	return timestamppb.New(t), nil
}

func shortName(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}

// shortNames are all but that of 0, which means nothing.
func shortNames(names map[int32]string, prefix string) []string {
	var out []string
	for i := int32(1); i < int32(len(names)); i++ {
		out = append(out, shortName(names[i], prefix))
	}
	return out
}

func parseShort[E ~int32](flag string, given []string, values map[string]int32, names map[int32]string, prefix string) ([]E, error) {
	var out []E
	known := shortNames(names, prefix)
	for _, g := range given {
		if !slices.Contains(known, strings.ToLower(g)) {
			return nil, fmt.Errorf("%s %q: want one of %s", flag, g, strings.Join(known, ", "))
		}
		out = append(out, E(values[prefix+strings.ToUpper(g)]))
	}
	return out, nil
}

// receive prints items until the stream ends.
func receive(recv func() (*weftv1.ObserveResponse, error), print func(*weftv1.ObserveResponse) error) error {
	for {
		item, err := recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := print(item); err != nil {
			return err
		}
	}
}
