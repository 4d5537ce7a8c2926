// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// serviceTraceJSON is what "service trace -o json" prints.
type serviceTraceJSON struct {
	Node      string             `json:"node"` // that answers
	Client    traceClientJSON    `json:"client"`
	Verdict   string             `json:"verdict"` // backend, refused, dropped or no-service
	Reason    string             `json:"reason,omitempty"`
	Namespace string             `json:"namespace,omitempty"`
	Service   string             `json:"service,omitempty"`
	Port      string             `json:"port,omitempty"` // its name
	Frontend  *frontendJSON      `json:"frontend,omitempty"`
	Set       string             `json:"set,omitempty"`
	SetWhy    string             `json:"setWhy,omitempty"`
	Choice    string             `json:"choice,omitempty"` // affinity, only, random or maglev
	ChoiceWhy string             `json:"choiceWhy,omitempty"`
	Backends  []traceBackendJSON `json:"backends"`
	Where     string             `json:"where,omitempty"` // socket, pod, tcx, xdp, or "xdp or tcx"
	WhereWhy  string             `json:"whereWhy,omitempty"`
	Source    string             `json:"source,omitempty"`
}

type traceClientJSON struct {
	Kind    string `json:"kind"` // pod, node or outside
	Pod     string `json:"pod,omitempty"`
	Address string `json:"address,omitempty"`
	Port    uint32 `json:"port,omitempty"`
	Node    string `json:"node,omitempty"`
}

type traceBackendJSON struct {
	Address string  `json:"address"`
	Port    uint32  `json:"port"`
	Pod     string  `json:"pod,omitempty"`
	Node    string  `json:"node,omitempty"`
	State   string  `json:"state"`
	Share   float64 `json:"share"`
}

func newServiceTraceCommand(s IO) *cobra.Command {
	var from string
	cmd := askCommand(s, &cobra.Command{
		Use:   "trace --from NS/POD|node|outside|IP[:PORT] IP:PORT[/PROTOCOL]",
		Short: "Tell which backend a new connection gets, and why",
		Long: `Tell which backend a new connection gets from this node, and why: which Service the
address belongs to, which set of backends its client gets, and what decides between them, by
the same maps that the kernel looks into. Where it is left to chance, all are listed with
their share. What comes from outside is balanced by its source address and port: name both, and
the answer is one backend. Nothing is sent, nothing is counted, and policy is not asked (weft
policy trace).`,
		Example: `  weft service trace --from shop/client 10.96.0.20:80
  weft service trace --from outside 172.30.0.1:30080/TCP
  weft service trace --from 203.0.113.9:40000 172.30.0.1:30080 -o json
  weft service trace --from node '[fd00:10:96::a]:53/UDP'`,
		Args: cobra.ExactArgs(1),
	}, func(ctx context.Context, c weftv1.NodeClient, args []string) (any, func() error, error) {
		to, protocol, err := parseFrontend(args[0])
		if err != nil {
			return nil, nil, err
		}
		r, err := c.TraceService(ctx, &weftv1.TraceServiceRequest{
			From: from, Address: to.Addr().String(), Port: uint32(to.Port()), Protocol: protocol,
		})
		if err != nil {
			return nil, nil, err
		}
		t := toServiceTrace(r)
		return t, func() error { return printServiceTrace(s.Out, t, to.String()+"/"+protocol) }, nil
	})
	cmd.Flags().StringVar(&from, "from", "", "who connects: a pod of this node, NS/POD; node; outside; or an address, with or without a port")
	if err := cmd.MarkFlagRequired("from"); err != nil {
		panic(err) // the flag is not there: a mistake in this function
	}
	return cmd
}

// parseFrontend reads "10.96.0.1:80/TCP"; TCP may be left out.
func parseFrontend(text string) (netip.AddrPort, string, error) {
	address, protocol, ok := strings.Cut(text, "/")
	if !ok {
		protocol = "TCP"
	}
	to, err := netip.ParseAddrPort(address)
	if err != nil || to.Port() == 0 {
		return netip.AddrPort{}, "", fmt.Errorf("address %q: want IP:PORT or IP:PORT/PROTOCOL, such as 10.96.0.20:80 or [fd00::1]:53/UDP", text)
	}
	protocol = strings.ToUpper(protocol)
	switch protocol {
	case "TCP", "UDP", "SCTP":
		return netip.AddrPortFrom(to.Addr().Unmap(), to.Port()), protocol, nil
	}
	return netip.AddrPort{}, "", fmt.Errorf("protocol %q: want TCP, UDP or SCTP", protocol)
}

func toServiceTrace(r *weftv1.TraceServiceResponse) *serviceTraceJSON {
	t := &serviceTraceJSON{
		Node: r.Node, Verdict: r.Verdict, Reason: r.Reason, Namespace: r.Namespace, Service: r.Service, Port: r.PortName,
		Set: r.Set, SetWhy: r.SetWhy, Choice: r.Choice, ChoiceWhy: r.ChoiceWhy, Where: r.Where, WhereWhy: r.WhereWhy, Source: r.Source,
		Backends: each(r.Backends, func(b *weftv1.TraceBackend) traceBackendJSON {
			return traceBackendJSON{Address: b.Address, Port: b.Port, Pod: b.Pod, Node: b.Node, State: b.State, Share: b.Share}
		}),
	}
	c := r.GetClient()
	t.Client = traceClientJSON{Kind: c.GetKind(), Pod: c.GetPod(), Address: c.GetAddress(), Port: c.GetPort(), Node: c.GetNode()}
	if r.Frontend != nil {
		f := toFrontend(r.Frontend)
		t.Frontend = &f
	}
	return t
}

func printServiceTrace(w io.Writer, t *serviceTraceJSON, to string) error {
	p := printer{w: w}
	p.line("%s -> %s on %s: %s", traceClientText(&t.Client), to, t.Node, verdictText(t))
	var rows [][]string
	add := func(name, value, why string) {
		switch {
		case value != "" && why != "":
			rows = append(rows, []string{"  " + name, value + ": " + why})
		case value != "" || why != "":
			rows = append(rows, []string{"  " + name, value + why})
		}
	}
	if t.Frontend != nil {
		add("service", t.Namespace+"/"+t.Service+" port "+portName(t.Port, to[strings.LastIndexByte(to, '/')+1:]), t.Frontend.Kind)
	}
	add("set", t.Set, t.SetWhy)
	add("choice", t.Choice, t.ChoiceWhy)
	add("where", t.Where, t.WhereWhy)
	add("source", "", t.Source)
	p.list(rows)
	if len(t.Backends) > 1 {
		p.table([]string{"  BACKEND", "POD", "NODE", "STATE", "SHARE"}, each(t.Backends, func(b traceBackendJSON) []string {
			return []string{"  " + hostPort(b.Address, b.Port), dash(b.Pod), dash(b.Node), b.State, percent(b.Share)}
		}))
	}
	return p.err
}

func traceClientText(c *traceClientJSON) string {
	address := c.Address
	if c.Port != 0 {
		address = hostPort(c.Address, c.Port)
	}
	switch {
	case c.Pod != "" && address != "":
		return fmt.Sprintf("%s (%s, %s)", c.Pod, address, c.Node)
	case c.Kind == "node":
		return "the node " + c.Node
	case address == "":
		return "somebody outside"
	case c.Node != "":
		return fmt.Sprintf("%s (%s)", address, c.Node)
	}
	return address + " (outside)"
}

func verdictText(t *serviceTraceJSON) string {
	switch {
	case t.Verdict == "backend" && len(t.Backends) == 1:
		b := &t.Backends[0]
		if b.Pod != "" {
			return fmt.Sprintf("%s (%s, %s)", hostPort(b.Address, b.Port), b.Pod, dash(b.Node))
		}
		return hostPort(b.Address, b.Port)
	case t.Verdict == "backend":
		return fmt.Sprintf("one of %d backends", len(t.Backends))
	case t.Verdict == "no-service":
		return "no service, it goes on as it is"
	case t.Reason != "":
		return t.Verdict + " (" + t.Reason + ")"
	}
	return t.Verdict
}
