// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

func newStatusCommand(s IO) *cobra.Command {
	var agent agentFlag
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what the agent on this node is doing",
		Long: `Show what the agent on this node is doing: its components, the pods it has
wired, the programs it has attached, the Services in force, how full its maps
are, and what it has forwarded and dropped, by reason.`,
		Example: `  weft status
  weft status -o json | jq '.drops[] | select(.packets > 100)'
  weft lab node exec node1 -- weft status`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			return agent.call(cmd.Context(), func(c weftv1.NodeClient) error {
				st, err := c.Status(cmd.Context(), &weftv1.StatusRequest{})
				if err != nil {
					return err
				}
				if output.json() {
					return printJSON(s.Out, toNodeStatus(st))
				}
				return printStatus(s.Out, toNodeStatus(st))
			})
		},
	}
	agent.register(cmd)
	output.register(cmd, "table, or json")
	return cmd
}

// nodeStatus is what -o json prints; the names of its fields stay.
type nodeStatus struct {
	Node         string            `json:"node"`
	Version      string            `json:"version"`
	Started      time.Time         `json:"started"`
	Ready        bool              `json:"ready"`
	Routing      string            `json:"routing"`
	MTU          uint32            `json:"mtu"`
	Generation   uint64            `json:"generation"`
	SourceErrors []string          `json:"sourceErrors"`
	Components   []componentStatus `json:"components"`
	Pods         []podStatus       `json:"pods"`
	Programs     []programStatus   `json:"programs"`
	Maps         []mapStatus       `json:"maps"`
	Drops        []counterStatus   `json:"drops"`
	Forwarded    []counterStatus   `json:"forwarded"`
	Events       *eventStatus      `json:"events,omitempty"`
	Services     *servicesStatus   `json:"services,omitempty"`
}

// servicesStatus is as weftv1.ServicesStatus.
type servicesStatus struct {
	Services     uint32     `json:"services"`
	Ports        uint32     `json:"ports"`
	Frontends    uint32     `json:"frontends"`
	Backends     uint32     `json:"backends"`
	Problems     []string   `json:"problems"`
	Error        string     `json:"error,omitempty"` // why the last change is not in force
	Changed      *time.Time `json:"changed"`
	SyncSeconds  float64    `json:"syncSeconds"`
	MaglevTables uint32     `json:"maglevTables"`
	MaglevBytes  uint64     `json:"maglevBytes"`
	External     string     `json:"external"` // snat or dsr
	Edge         string     `json:"edge"`     // what sees packets from outside first
	Denied       uint32     `json:"denied"`
	Flows        uint64     `json:"flows"`
	Cut          uint64     `json:"cut"` // sockets whose backend had gone
}

// eventStatus is as weftv1.Events.
type eventStatus struct {
	Generated    uint64 `json:"generated"`
	Lost         uint64 `json:"lost"`
	Received     uint64 `json:"received"`
	ReportedLost uint64 `json:"reportedLost"`
}

type componentStatus struct {
	Name    string `json:"name"`
	Ready   bool   `json:"ready"`
	Message string `json:"message,omitempty"`
}

type podStatus struct {
	Namespace   string   `json:"namespace"`
	Name        string   `json:"name"`
	IPs         []string `json:"ips"`
	Interface   string   `json:"interface"`
	Identity    uint64   `json:"identity"`
	ContainerID string   `json:"containerID"`
}

type programStatus struct {
	Name   string `json:"name"`
	Attach string `json:"attach"`
	Device string `json:"device"`
	ID     uint32 `json:"id"`
	LinkID uint32 `json:"linkID"`
}

type mapStatus struct {
	Name       string `json:"name"`
	Entries    uint64 `json:"entries"`
	MaxEntries uint64 `json:"maxEntries"`
}

type counterStatus struct {
	Name    string `json:"name"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

func toNodeStatus(r *weftv1.StatusResponse) *nodeStatus {
	return &nodeStatus{
		Node: r.Node, Version: r.Version, Started: r.Started.AsTime(), Ready: r.Ready,
		Routing: r.Routing, MTU: r.Mtu, Generation: r.Generation,
		SourceErrors: append([]string{}, r.SourceErrors...),
		Components: each(r.Components, func(c *weftv1.Component) componentStatus {
			return componentStatus{Name: c.Name, Ready: c.Ready, Message: c.Message}
		}),
		Pods: each(r.Pods, func(p *weftv1.PodStatus) podStatus {
			return podStatus{
				Namespace: p.Namespace, Name: p.Name, IPs: append([]string{}, p.Ips...),
				Interface: p.Interface, Identity: p.Identity, ContainerID: p.ContainerId,
			}
		}),
		Programs: each(r.Programs, func(p *weftv1.Program) programStatus {
			return programStatus{Name: p.Name, Attach: p.Attach, Device: p.Device, ID: p.Id, LinkID: p.LinkId}
		}),
		Maps: each(r.Maps, func(m *weftv1.MapFill) mapStatus {
			return mapStatus{Name: m.Name, Entries: m.Entries, MaxEntries: m.MaxEntries}
		}),
		Drops:     each(r.Drops, toCounter),
		Forwarded: each(r.Forwarded, toCounter),
		Events:    toEvents(r.Events),
		Services:  toServicesStatus(r.Services),
	}
}

func toServicesStatus(r *weftv1.ServicesStatus) *servicesStatus {
	if r == nil {
		return nil
	}
	return &servicesStatus{
		Services: r.Services, Ports: r.Ports, Frontends: r.Frontends, Backends: r.Backends,
		Problems: append([]string{}, r.Problems...), Error: r.Error, Changed: toTime(r.Changed), SyncSeconds: r.SyncSeconds,
		MaglevTables: r.MaglevTables, MaglevBytes: r.MaglevBytes, External: r.External, Edge: r.Xdp,
		Denied: r.Denied, Flows: r.Flows, Cut: r.Cut,
	}
}

// head says what is in force, in lines.
func (v *servicesStatus) head() [][]string {
	last := fmt.Sprintf("the last change took %s", time.Duration(v.SyncSeconds*float64(time.Second)).Round(10*time.Microsecond))
	switch {
	case v.Error != "":
		last = "the last change is NOT in force: " + v.Error
	case v.Changed == nil:
		last = "nothing is in force yet"
	}
	return [][]string{
		{"Services", fmt.Sprintf("%d with %s and %s; %s", v.Services, plural(uint64(v.Frontends), "frontend"), plural(uint64(v.Backends), "backend"), last)},
		{"Outside", fmt.Sprintf("%s, %s to other nodes, %s of Maglev in %d KiB, %s, %s denied", v.Edge, v.External,
			plural(uint64(v.MaglevTables), "table"), v.MaglevBytes>>10, plural(v.Flows, "translated connection"), plural(uint64(v.Denied), "network"))},
	}
}

func toEvents(e *weftv1.Events) *eventStatus {
	if e == nil {
		return nil
	}
	return &eventStatus{Generated: e.Generated, Lost: e.Lost, Received: e.Received, ReportedLost: e.ReportedLost}
}

func toCounter(c *weftv1.Counter) counterStatus {
	return counterStatus{Name: c.Name, Packets: c.Packets, Bytes: c.Bytes}
}

// each is never nil, so that JSON has an empty list.
func each[A, B any](as []A, f func(A) B) []B {
	out := make([]B, 0, len(as))
	for _, a := range as {
		out = append(out, f(a))
	}
	return out
}

// section is a part of the printed status.
type section struct {
	title  string
	header []string
	rows   [][]string
}

func printStatus(w io.Writer, st *nodeStatus) error {
	ready := "ready"
	if !st.Ready {
		ready = "not ready"
	}
	head := [][]string{
		{"Node", st.Node + ", " + ready},
		{"Agent", st.Version + ", started " + st.Started.UTC().Format(time.RFC3339)},
		{"Routing", fmt.Sprintf("%s, pod MTU %d", st.Routing, st.MTU)},
		{"Manifests", fmt.Sprintf("generation %d, %d refused", st.Generation, len(st.SourceErrors))},
	}
	if e := st.Events; e != nil {
		head = append(head, []string{"Events", fmt.Sprintf("%d made, %d without room in the ring; %d received and %d reported as lost since the start", e.Generated, e.Lost, e.Received, e.ReportedLost)})
	}
	if st.Services != nil {
		head = append(head, st.Services.head()...)
	}
	p := printer{w: w}
	p.list(head)
	if p.err != nil {
		return p.err
	}
	for _, part := range sections(st) {
		if len(part.rows) == 0 {
			if _, err := fmt.Fprintf(w, "\n%s: none\n", part.title); err != nil {
				return err
			}
			continue
		}
		if _, err := fmt.Fprintf(w, "\n%s\n", part.title); err != nil {
			return err
		}
		if err := printTable(w, part.header, part.rows); err != nil {
			return err
		}
	}
	return nil
}

func sections(st *nodeStatus) []section {
	parts := []section{
		{"Components", []string{"NAME", "READY", "MESSAGE"}, each(st.Components, func(c componentStatus) []string {
			return []string{c.Name, strconv.FormatBool(c.Ready), c.Message}
		})},
		{"Pods", []string{"NAMESPACE", "NAME", "IPS", "INTERFACE", "IDENTITY"}, each(st.Pods, func(p podStatus) []string {
			return []string{p.Namespace, p.Name, strings.Join(p.IPs, ","), p.Interface, strconv.FormatUint(p.Identity, 10)}
		})},
		{"Programs", []string{"NAME", "ATTACHED", "DEVICE", "ID"}, each(st.Programs, func(p programStatus) []string {
			return []string{p.Name, p.Attach, p.Device, strconv.FormatUint(uint64(p.ID), 10)}
		})},
		{"Maps", []string{"NAME", "ENTRIES", "MAX", "FULL"}, each(st.Maps, func(m mapStatus) []string {
			return []string{m.Name, strconv.FormatUint(m.Entries, 10), strconv.FormatUint(m.MaxEntries, 10), fill(m)}
		})},
		{"Forwarded", []string{"PATH", "PACKETS", "BYTES"}, each(st.Forwarded, counterRow)},
		{"Drops", []string{"REASON", "PACKETS", "BYTES"}, each(st.Drops, counterRow)},
	}
	if len(st.SourceErrors) > 0 {
		parts = append(parts, section{"Refused manifests", []string{"WHY"}, each(st.SourceErrors, func(e string) []string { return []string{e} })})
	}
	if st.Services != nil && len(st.Services.Problems) > 0 {
		parts = append(parts, section{"Problems of services", []string{"WHAT"}, each(st.Services.Problems, func(e string) []string { return []string{e} })})
	}
	return parts
}

func counterRow(c counterStatus) []string {
	return []string{c.Name, strconv.FormatUint(c.Packets, 10), strconv.FormatUint(c.Bytes, 10)}
}

func fill(m mapStatus) string {
	if m.MaxEntries == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f%%", 100*float64(m.Entries)/float64(m.MaxEntries))
}
