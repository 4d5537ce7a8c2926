// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/services"
	"github.com/weft-mesh/weft/internal/state"
)

var (
	seed = flag.Uint64("seed", 1, "of the random Services")
	most = flag.Int("steps", 1<<30, "sets of Services in each world at most")
)

// budgets of the test.
const (
	worlds = 6
	usual  = 30 * time.Second
	slow   = 10 * time.Minute
)

func TestMain(m *testing.M) {
	if os.Getenv(clientEnv) == "" {
		flag.Parse()
		_ = flag.Set("test.parallel", fmt.Sprint(worlds)) // they mostly wait
		os.Exit(m.Run())
	}
	if err := runClient(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// oracle is the test: an agent's part for Services in a world.
type oracle struct {
	t      *testing.T
	w      *world
	r      random // of the objects
	ask    random // of the probes
	tables *state.Tables

	maglev bool
	writer *service.Writer
	driver *services.Driver
	stop   func()

	before, now *objects
	did         []string
	step        int
	last        map[stickyKey]string

	restarts, questions, connections, quiet int
}

// TestServices compares what connections reach with the model, for as many sets
// of Services as there is time; each follows from the one before. It waits much
// for the kernel, so several worlds, which have nothing in common, run at once.
func TestServices(t *testing.T) {
	nstest.Need(t)
	var sum sums
	t.Run("worlds", func(t *testing.T) {
		for i := range worlds {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				o := newOracle(t, uint64(i))
				defer func() { o.stop() }()
				o.run()
				sum.add(o)
			})
		}
	})
	t.Logf("seed %d: %d sets of Services, %d restarts, %d questions (%d of them got no answer, as they should), %d connections",
		*seed, sum.sets.Load(), sum.restarts.Load(), sum.questions.Load(), sum.quiet.Load(), sum.connections.Load())
}

// sums are over all worlds.
type sums struct{ sets, restarts, questions, quiet, connections atomic.Int64 }

func (s *sums) add(o *oracle) {
	s.sets.Add(int64(o.step))
	s.restarts.Add(int64(o.restarts))
	s.questions.Add(int64(o.questions))
	s.quiet.Add(int64(o.quiet))
	s.connections.Add(int64(o.connections))
}

func newOracle(t *testing.T, number uint64) *oracle {
	t.Helper()
	o := &oracle{t: t, last: map[stickyKey]string{}}
	o.r, o.ask = random{rand.New(rand.NewPCG(*seed, 2*number))}, random{rand.New(rand.NewPCG(*seed, 2*number+1))}
	o.w = newWorld(t)
	var err error
	o.tables, err = state.New()
	o.w.must(err, "make tables")
	o.before = &objects{}
	o.now = o.r.start()
	o.write()
	o.start()
	return o
}

func (o *oracle) run() {
	budget := usual
	if os.Getenv("WEFT_SLOW") != "" {
		budget = slow
	}
	for end := time.Now().Add(budget); time.Now().Before(end) && o.step < *most && !o.t.Failed(); o.step++ {
		o.advance()
		o.check()
	}
	o.settled()
}

// advance changes the Services a little and puts them in force, now and then by
// another agent than before.
func (o *oracle) advance() {
	o.t.Helper()
	o.before = o.now
	kind := o.r.IntN(60)
	if kind == 0 { // nothing has changed when another agent comes
		o.did = []string{"restart"}
		o.restart(true)
		return
	}
	o.now, o.did = o.r.change(o.before)
	switch kind {
	case 1: // while it is down
		o.did = append(o.did, "restart")
		o.stop()
		o.write()
		o.restart(false)
	case 2: // it ends before it has ended connections
		o.did = append(o.did, "restart after Apply")
		o.stop()
		o.write()
		o.apply()
		o.restart(false)
	default:
		o.write()
		o.apply()
	}
}

// write makes the tables hold what there is now.
func (o *oracle) write() {
	o.t.Helper()
	txn := o.tables.DB.WriteTxn(o.tables.Services, o.tables.Endpoints, o.tables.Nodes)
	defer txn.Commit()
	check := func(_ any, _ bool, err error) { o.t.Helper(); o.w.must(err, "write a table") }
	for name, s := range o.now.services {
		if o.before.services[name] != s {
			_, had, err := o.tables.Services.Insert(txn, serviceRow(s))
			check(nil, had, err)
		}
	}
	for name, s := range o.before.services {
		if o.now.services[name] == nil {
			_, had, err := o.tables.Services.Delete(txn, serviceRow(s))
			check(nil, had, err)
		}
	}
	for name, s := range o.now.slices {
		if o.before.slices[name] != s {
			_, had, err := o.tables.Endpoints.Insert(txn, sliceRow(s))
			check(nil, had, err)
		}
	}
	for name, s := range o.before.slices {
		if o.now.slices[name] == nil {
			_, had, err := o.tables.Endpoints.Delete(txn, sliceRow(s))
			check(nil, had, err)
		}
	}
	if o.now.node != o.before.node {
		_, had, err := o.tables.Nodes.Insert(txn, nodeRow(o.now.node))
		check(nil, had, err)
	}
}

func serviceRow(s *corev1.Service) *state.Service {
	return &state.Service{Namespace: s.Namespace, Name: s.Name, Labels: s.Labels, Spec: &s.Spec, Status: &s.Status}
}

func sliceRow(s *discoveryv1.EndpointSlice) *state.Endpoint {
	return &state.Endpoint{Namespace: s.Namespace, Name: s.Name, Service: s.Labels[discoveryv1.LabelServiceName], Slice: s}
}

func nodeRow(n *corev1.Node) *state.Node {
	row := &state.Node{Name: n.Name, Labels: n.Labels, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")}}
	for _, a := range n.Status.Addresses {
		row.IPs = append(row.IPs, netip.MustParseAddr(a.Address))
	}
	return row
}

// complain makes a test fail of what is logged as an error.
type complain struct{ t *testing.T }

func (c complain) Write(b []byte) (int, error) {
	c.t.Errorf("logged: %s", b)
	return len(b), nil
}

// start makes the agent's part for Services, which takes over what is in force.
func (o *oracle) start() {
	o.t.Helper()
	var err error
	o.writer, err = service.New(o.w.maps, service.Options{Maglev: o.maglev})
	o.w.must(err, "open the service maps")
	o.driver, err = services.New(services.Config{
		Node: thisNode, Tables: o.tables, Writer: o.writer, Reader: service.NewReader(o.w.maps, o.writer),
		Connections: service.NewConnections(o.w.maps, lifetimes), Cutter: o.w.net,
		Log: slog.New(slog.NewTextHandler(complain{o.t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	o.w.must(err, "make the driver")
	o.apply()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	driver := o.driver
	go func() { ended <- driver.Run(ctx) }()
	o.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			o.t.Errorf("run the driver: %v", err)
		}
		o.stop = func() {}
	}
}

func (o *oracle) apply() {
	o.t.Helper()
	if err := o.driver.Apply(); err != nil {
		o.fail("apply: %v", err)
	}
	for _, p := range o.driver.Problems() {
		if !strings.Contains(p.Want, "an address and port that Service") {
			o.fail("a problem: %s", p)
		}
	}
}

// restart has another agent take over. same: nothing has changed, so it must
// write nothing, where it chooses in the same way.
func (o *oracle) restart(same bool) {
	o.t.Helper()
	o.restarts++
	if same {
		o.settled()
	}
	o.stop()
	ports := o.writer.Ports()
	if o.r.chance(30) {
		o.maglev, same = !o.maglev, false
	}
	if all := o.r.chance(15); all {
		o.w.must(o.w.maps.Close(), "close the maps")
		o.w.open()
	} else {
		o.reopen()
	}
	o.start()
	if n := o.writer.Writes(); same && n.Total() != 0 {
		o.fail("another agent wrote %+v, want nothing", n)
	}
	known := map[string]uint32{}
	for _, p := range ports {
		known[service.NameOf(p.Name)] = p.ID
	}
	for _, p := range o.writer.Ports() {
		if id, ok := known[service.NameOf(p.Name)]; ok && same && id != p.ID {
			o.fail("%s had the number %d, and has %d now", service.NameOf(p.Name), id, p.ID)
		}
	}
	if !same {
		o.forgetChanged()
	}
}

func (o *oracle) reopen() {
	o.t.Helper()
	o.w.must(o.w.maps.Close(), "close the maps")
	maps, err := pin.Open(o.w.folder, pin.Sizes{Events: 256 << 10})
	o.w.must(err, "open maps")
	o.t.Cleanup(func() { maps.Close() })
	o.w.maps = maps
}
