// SPDX-License-Identifier: Apache-2.0

package services

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/state"
)

// Ports returns the service ports that are wanted, in order of name: those of
// one Service, or all where both names are empty.
func (d *Driver) Ports(namespace, name string) []balance.ServicePort {
	d.mu.Lock()
	defer d.mu.Unlock()
	if namespace != "" || name != "" {
		return slices.Clone(d.ports[state.Key(namespace, name)])
	}
	var out []balance.ServicePort
	for _, key := range slices.Sorted(maps.Keys(d.ports)) {
		out = append(out, d.ports[key]...)
	}
	return out
}

// Problems returns what of Services and EndpointSlices is left out, frontends
// that two Services want, and what has no room in the kernel.
func (d *Driver) Problems() []balance.Problem {
	out := d.health.problems()
	d.mu.Lock()
	for _, list := range d.problems {
		out = append(out, list...)
	}
	d.mu.Unlock()
	for _, c := range d.cfg.Writer.Conflicts() {
		out = append(out, balance.Problem{
			Object: objectOf(c.Loser), Field: "spec.ports",
			Value: c.Frontend.String() + "/" + string(c.Loser.Protocol),
			Want:  "an address and port that Service " + state.Key(c.Winner.Namespace, c.Winner.Service) + " does not have",
		})
	}
	for _, e := range d.cfg.Writer.Errors() {
		out = append(out, balance.Problem{Object: objectOf(e.Name), Field: "spec.ports", Value: service.NameOf(e.Name), Want: "to be in force: " + e.Error()})
	}
	slices.SortFunc(out, func(a, b balance.Problem) int {
		return cmp.Or(strings.Compare(a.Object, b.Object), strings.Compare(a.Field, b.Field), strings.Compare(a.Value, b.Value), strings.Compare(a.Want, b.Want))
	})
	return out
}

func objectOf(n balance.Name) string { return "Service " + state.Key(n.Namespace, n.Service) }

// Input returns what the service ports of a Service are computed from.
func (d *Driver) Input(namespace, name string) (balance.Input, bool) {
	row, _, ok := d.cfg.Tables.Services.Get(d.cfg.Tables.DB.ReadTxn(), state.ServiceByName.Query(state.Key(namespace, name)))
	if !ok {
		return balance.Input{}, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.input(row), true
}

// Kernel reads what the kernel has of a service port.
func (d *Driver) Kernel(name balance.Name) (service.InForce, error) { return d.cfg.Reader.Port(name) }

// Dump prints the kernel's maps as text.
func (d *Driver) Dump() (string, error) {
	var b strings.Builder
	err := d.cfg.Writer.Dump(&b)
	return b.String(), err
}

// Status sums up what is in force.
type Status struct {
	Services, Ports, Frontends, Backends int
	Err                                  error         // why not all is
	Changed                              time.Time     // of the last change
	Sync                                 time.Duration // that it took
	Maglev                               service.MaglevStats
	Flows                                service.FlowStats
	Cut                                  uint64 // sockets
}

// count adds the ports of a service, or takes them away.
func (s *Status) count(ports []balance.ServicePort, sign int) {
	if len(ports) > 0 {
		s.Services += sign
	}
	s.Ports += sign * len(ports)
	for i := range ports {
		p := &ports[i]
		s.Frontends += sign * len(p.Frontends)
		s.Backends += sign * max(len(p.Internal), len(p.Cluster), len(p.External))
	}
}

// Status returns the state as of now.
func (d *Driver) Status() Status {
	d.mu.Lock()
	s := d.status
	d.mu.Unlock()
	s.Err = d.failure()
	s.Maglev, s.Flows = d.cfg.Writer.Maglev(), d.cfg.Connections.Stats()
	return s
}
