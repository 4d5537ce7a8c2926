// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// traceJSON is what "policy trace -o json" prints.
type traceJSON struct {
	Node  string     `json:"node"` // that answers
	Paths []pathJSON `json:"paths"`
}

type pathJSON struct {
	From    traceEndJSON  `json:"from"`
	To      traceEndJSON  `json:"to"`
	Egress  traceSideJSON `json:"egress"`
	Ingress traceSideJSON `json:"ingress"`
	Verdict string        `json:"verdict"` // allowed, denied or unknown
}

type traceEndJSON struct {
	IP       string `json:"ip"`
	Kind     string `json:"kind"`
	Pod      string `json:"pod,omitempty"`
	Node     string `json:"node,omitempty"`
	Identity uint64 `json:"identity"`
}

type traceSideJSON struct {
	Node    string `json:"node,omitempty"` // that judges it; none: nobody does
	Here    bool   `json:"here"`
	Verdict string `json:"verdict,omitempty"`
	Tier    string `json:"tier,omitempty"`
	Rule    string `json:"rule,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

func newPolicyTraceCommand(s IO) *cobra.Command {
	var from, to, port string
	cmd := askCommand(s, &cobra.Command{
		Use:   "trace --from NS/POD|IP --to NS/POD|IP --port PORT/PROTOCOL",
		Short: "Tell what becomes of a new connection, and which rule decides",
		Long: `Tell what becomes of a new connection, and which rule decides: the same lookups
as the datapath makes, in what is in force. The policy of the pod that connects
is judged on its node (egress), that of the other pod on the other's (ingress);
an agent answers for the pods of its own node, and names the node to ask for the
rest. Nothing is sent.`,
		Example: `  weft policy trace --from shop/web-0 --to shop/db-0 --port 5432/TCP
  weft policy trace --from shop/web-0 --to 8.8.8.8 --port 53/UDP
  weft policy trace --from 10.244.2.7 --to shop/db-0 --port ICMP -o json`,
		Args: cobra.NoArgs,
	}, func(ctx context.Context, c weftv1.NodeClient, _ []string) (any, func() error, error) {
		req := &weftv1.TracePolicyRequest{From: from, To: to}
		var err error
		if req.Port, req.Protocol, err = parsePort(port); err != nil {
			return nil, nil, err
		}
		r, err := c.TracePolicy(ctx, req)
		if err != nil {
			return nil, nil, err
		}
		t := toTrace(r)
		return t, func() error { return printTrace(s, t, port) }, nil
	})
	cmd.Flags().StringVar(&from, "from", "", "who connects: a pod, NS/POD, or an address")
	cmd.Flags().StringVar(&to, "to", "", "to whom: a pod, NS/POD, or an address")
	cmd.Flags().StringVar(&port, "port", "", "PORT/PROTOCOL such as 80/TCP (UDP, SCTP), or a protocol without ports such as ICMP")
	for _, f := range []string{"from", "to", "port"} {
		if err := cmd.MarkFlagRequired(f); err != nil {
			panic(err) // the flag is not there: a mistake in this function
		}
	}
	return cmd
}

// parsePort reads "80/TCP" or "ICMP".
func parsePort(text string) (port uint32, protocol string, err error) {
	number, protocol, ok := strings.Cut(text, "/")
	if !ok {
		switch strings.ToUpper(text) {
		case "ICMP":
			return 0, "ICMP", nil
		case "ICMPV6":
			return 0, "ICMPv6", nil
		}
		return 0, "", fmt.Errorf("port %q: want PORT/PROTOCOL such as 80/TCP, or ICMP or ICMPv6", text)
	}
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 {
		return 0, "", fmt.Errorf("port %q: want a number from 1 to 65535 before the slash", text)
	}
	return uint32(n), strings.ToUpper(protocol), nil
}

func toTrace(r *weftv1.TracePolicyResponse) *traceJSON {
	return &traceJSON{Node: r.Node, Paths: each(r.Paths, func(p *weftv1.PolicyPath) pathJSON {
		return pathJSON{
			From: toTraceEnd(p.GetFrom()), To: toTraceEnd(p.GetTo()),
			Egress: toTraceSide(p.GetEgress()), Ingress: toTraceSide(p.GetIngress()), Verdict: p.GetVerdict(),
		}
	})}
}

func toTraceEnd(e *weftv1.TraceEnd) traceEndJSON {
	return traceEndJSON{IP: e.GetIp(), Kind: e.GetKind(), Pod: e.GetPod(), Node: e.GetNode(), Identity: e.GetIdentity()}
}

func toTraceSide(t *weftv1.TraceSide) traceSideJSON {
	return traceSideJSON{Node: t.GetNode(), Here: t.GetHere(), Verdict: t.GetVerdict(), Tier: t.GetTier(), Rule: t.GetRule(), Reason: t.GetReason()}
}

func printTrace(s IO, t *traceJSON, port string) error {
	for _, p := range t.Paths {
		lines := []string{
			fmt.Sprintf("%s -> %s, %s: %s", traceEndText(p.From), traceEndText(p.To), port, p.Verdict),
			"  egress   " + traceSideText(p.Egress, p.From),
			"  ingress  " + traceSideText(p.Ingress, p.To),
		}
		if _, err := fmt.Fprintln(s.Out, strings.Join(lines, "\n")); err != nil {
			return err
		}
	}
	return nil
}

func traceEndText(e traceEndJSON) string {
	switch {
	case e.Pod != "":
		return fmt.Sprintf("%s (%s, %s)", e.Pod, e.IP, e.Node)
	case e.Node != "":
		return fmt.Sprintf("%s (%s, %s)", e.IP, e.Kind, e.Node)
	}
	return fmt.Sprintf("%s (%s)", e.IP, e.Kind)
}

func traceSideText(t traceSideJSON, of traceEndJSON) string {
	switch {
	case t.Node == "":
		return "not judged: " + of.IP + " is no pod with an address of its own"
	case !t.Here:
		return fmt.Sprintf("judged on %s: ask its agent", t.Node)
	case t.Rule == "":
		return fmt.Sprintf("%s on %s: %s", t.Verdict, t.Node, t.Reason)
	case t.Tier == "":
		return fmt.Sprintf("%s on %s: %s", t.Verdict, t.Node, t.Rule)
	}
	return fmt.Sprintf("%s on %s: %s (%s)", t.Verdict, t.Node, t.Rule, t.Tier)
}
