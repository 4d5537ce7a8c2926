// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// serviceShowJSON is what "service show -o json" prints.
type serviceShowJSON struct {
	Node            string            `json:"node"` // that answers
	Namespace       string            `json:"namespace"`
	Name            string            `json:"name"`
	Type            string            `json:"type"`
	NotServed       string            `json:"notServed,omitempty"`
	InternalPolicy  string            `json:"internalTrafficPolicy,omitempty"`
	ExternalPolicy  string            `json:"externalTrafficPolicy,omitempty"`
	SourceRanges    []string          `json:"sourceRanges"`
	Affinity        uint32            `json:"affinitySeconds"`
	HealthCheckPort uint32            `json:"healthCheckPort,omitempty"`
	LocalReady      uint32            `json:"localReady"` // what the health check tells
	Ports           []servicePortJSON `json:"ports"`
	Problems        []string          `json:"problems"`
}

type servicePortJSON struct {
	Name            string           `json:"name"`
	Protocol        string           `json:"protocol"`
	ID              uint32           `json:"id"` // in the kernel's maps; 0: it is not there
	Frontends       []frontendJSON   `json:"frontends"`
	Sets            []serviceSetJSON `json:"sets"`
	Backends        []backendJSON    `json:"backends"`
	AffinityClients uint32           `json:"affinityClients"`
	Connections     uint64           `json:"connections"`
}

type serviceSetJSON struct {
	Name     string   `json:"name"` // internal, cluster or external
	IDs      []uint32 `json:"ids"`
	Backends uint32   `json:"backends"`
	Rule     string   `json:"rule"`
	Maglev   uint32   `json:"maglev,omitempty"` // entries of its table; none: at random
}

type backendJSON struct {
	Address     string    `json:"address"`
	Port        uint32    `json:"port"`
	Pod         string    `json:"pod,omitempty"`
	Node        string    `json:"node,omitempty"`
	Zone        string    `json:"zone,omitempty"`
	State       string    `json:"state"` // active, terminating or not ready
	ID          uint32    `json:"id"`
	Connections uint64    `json:"connections"`
	Uses        []useJSON `json:"uses"`
}

type useJSON struct {
	Set    string  `json:"set"`
	Chosen bool    `json:"chosen"`
	Share  float64 `json:"share"` // of the new connections of its family
	WhyNot string  `json:"whyNot,omitempty"`
}

func newServiceShowCommand(s IO) *cobra.Command {
	return askCommand(s, &cobra.Command{
		Use:   "show NS/NAME",
		Short: "Show a Service: frontends, backends, and why a backend is not chosen",
		Long: `Show a Service as this node balances it: where clients connect to, which set of
backends that leads to, and of each endpoint its share of the new connections of a set, or
why it has none. A set is "internal" for the cluster addresses, "cluster" for clients on
this node that use an address for the outside, and "external" for those from outside.
Connections are those that this node gave away.`,
		Example: `  weft service show shop/web
  weft service show shop/web -o json | jq '.ports[].backends[] | select(.state != "active")'`,
		Args: cobra.ExactArgs(1),
	}, func(ctx context.Context, c weftv1.NodeClient, args []string) (any, func() error, error) {
		r, err := c.ShowService(ctx, &weftv1.ShowServiceRequest{Service: args[0]})
		if err != nil {
			return nil, nil, err
		}
		v := toServiceShow(r)
		return v, func() error { return printService(s.Out, v) }, nil
	})
}

func toServiceShow(r *weftv1.ShowServiceResponse) *serviceShowJSON {
	return &serviceShowJSON{
		Node: r.Node, Namespace: r.Namespace, Name: r.Name, Type: r.Type, NotServed: r.NotServed,
		InternalPolicy: r.InternalTrafficPolicy, ExternalPolicy: r.ExternalTrafficPolicy,
		SourceRanges: append([]string{}, r.SourceRanges...), Affinity: r.AffinitySeconds,
		HealthCheckPort: r.HealthCheckPort, LocalReady: r.LocalReady,
		Ports: each(r.Ports, toServicePort), Problems: append([]string{}, r.Problems...),
	}
}

func toServicePort(p *weftv1.ServicePort) servicePortJSON {
	return servicePortJSON{
		Name: p.Name, Protocol: p.Protocol, ID: p.Id, AffinityClients: p.AffinityClients, Connections: p.Connections,
		Frontends: each(p.Frontends, toFrontend),
		Sets: each(p.Sets, func(v *weftv1.ServiceSet) serviceSetJSON {
			return serviceSetJSON{Name: v.Name, IDs: append([]uint32{}, v.Ids...), Backends: v.Backends, Rule: v.Rule, Maglev: v.Maglev}
		}),
		Backends: each(p.Backends, func(b *weftv1.ServiceBackend) backendJSON {
			return backendJSON{
				Address: b.Address, Port: b.Port, Pod: b.Pod, Node: b.Node, Zone: b.Zone, State: b.State, ID: b.Id, Connections: b.Connections,
				Uses: each(b.Uses, func(u *weftv1.BackendUse) useJSON {
					return useJSON{Set: u.Set, Chosen: u.Chosen, Share: u.Share, WhyNot: u.WhyNot}
				}),
			}
		}),
	}
}

// printer writes lines until one fails.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

func (p *printer) table(header []string, rows [][]string) {
	if p.err == nil {
		p.err = printTable(p.w, header, rows)
	}
}

// list writes names and values, aligned.
func (p *printer) list(rows [][]string) {
	var c columns
	for _, row := range rows {
		c.fit(row)
	}
	for _, row := range rows {
		if p.err == nil {
			p.err = c.write(p.w, row)
		}
	}
}

func printService(w io.Writer, v *serviceShowJSON) error {
	p := printer{w: w}
	p.list(serviceHead(v))
	for _, text := range v.Problems {
		p.line("Problem: %s", text)
	}
	for i := range v.Ports {
		printServicePort(&p, v, &v.Ports[i])
	}
	return p.err
}

func serviceHead(v *serviceShowJSON) [][]string {
	rows := [][]string{{"Service", v.Namespace + "/" + v.Name + ", " + v.Type + ", as " + v.Node + " balances it"}}
	if v.NotServed != "" {
		return append(rows, []string{"Not served", v.NotServed})
	}
	policies := "internal " + v.InternalPolicy
	if v.ExternalPolicy != "" {
		policies += ", external " + v.ExternalPolicy
	}
	affinity := "none"
	if v.Affinity > 0 {
		affinity = "by client, " + affinityText(v.Affinity) + " after its last connection"
	}
	rows = append(rows, []string{"Policies", policies}, []string{"Affinity", affinity})
	if len(v.SourceRanges) > 0 {
		rows = append(rows, []string{"Clients", "at load balancer addresses " + strings.Join(v.SourceRanges, ", ") + " only"})
	}
	if v.HealthCheckPort != 0 {
		rows = append(rows, []string{"Health check", fmt.Sprintf("port %d tells of %s ready here", v.HealthCheckPort, plural(uint64(v.LocalReady), "backend"))})
	}
	return rows
}

func printServicePort(p *printer, v *serviceShowJSON, port *servicePortJSON) {
	id := "not in the kernel's maps"
	if port.ID != 0 {
		id = fmt.Sprintf("number %d", port.ID)
	}
	clients := ""
	if v.Affinity > 0 {
		clients = ", " + plural(uint64(port.AffinityClients), "client") + " kept"
	}
	p.line("\nPort %s, %s, %s given away%s", portName(port.Name, port.Protocol), id, plural(port.Connections, "connection"), clients)
	p.table([]string{"KIND", "FRONTEND", "NEAR CLIENTS", "FAR CLIENTS"}, each(port.Frontends, func(f frontendJSON) []string {
		return []string{f.Kind, f.hostPort(), f.Near, dash(f.Far)}
	}))
	p.line("")
	p.table([]string{"SET", "BACKENDS", "WHICH", "CHOICE"}, each(port.Sets, func(s serviceSetJSON) []string {
		choice := "random"
		if s.Maglev > 0 {
			choice = fmt.Sprintf("Maglev, %d entries", s.Maglev)
		}
		return []string{s.Name, strconv.FormatUint(uint64(s.Backends), 10), s.Rule, choice}
	}))
	p.line("")
	if len(port.Backends) == 0 {
		p.line("No endpoint has this port.")
		return
	}
	header := []string{"BACKEND", "POD", "NODE", "ZONE", "STATE"}
	for _, s := range port.Sets {
		header = append(header, strings.ToUpper(s.Name))
	}
	p.table(append(header, "CONNECTIONS", "WHY NOT"), each(port.Backends, func(b backendJSON) []string { return backendRow(&b) }))
}

func backendRow(b *backendJSON) []string {
	row := []string{hostPort(b.Address, b.Port), dash(b.Pod), dash(b.Node), dash(b.Zone), b.State}
	var why []string
	for _, u := range b.Uses {
		share := "-"
		if u.Chosen {
			share = percent(u.Share)
		} else if text := u.WhyNot; !slices.Contains(why, text) {
			why = append(why, text)
		}
		row = append(row, share)
	}
	return append(row, strconv.FormatUint(b.Connections, 10), strings.Join(why, "; "))
}

func percent(share float64) string { return fmt.Sprintf("%.3g%%", 100*share) }
