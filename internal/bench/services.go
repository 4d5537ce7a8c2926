// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/weft-mesh/weft/internal/bench/kubeproxy"
)

// ServicesPlan is a run of weft's services, and of kube-proxy's where there is
// one, at different numbers of services. Each has a node of its own. First each
// node is programmed and changed, one at a time; then connections through all
// of them take turns, nothing else running.
type ServicesPlan struct {
	// Counts of services for weft, ascending. The first is what the others are
	// compared with.
	Counts []int `json:"counts"`
	// KubeProxy is a folder of binaries; "" leaves kube-proxy out.
	KubeProxy string `json:"kube_proxy,omitempty"`
	// KubeProxyCounts of services, and modes.
	KubeProxyCounts []int `json:"kube_proxy_counts,omitempty"`
	// Changes of an endpoint to measure on each node, Pause apart, and within
	// Budget: a node that needs longer has fewer.
	Changes int           `json:"changes"`
	Pause   time.Duration `json:"pause_ns"`
	Budget  time.Duration `json:"budget_ns"`
	// Of the connections; see Plan and Load.
	Rounds      int           `json:"rounds"`
	Warmup      time.Duration `json:"warmup_ns"`
	Duration    time.Duration `json:"duration_ns"`
	Pin         bool          `json:"pin"`
	Calibration time.Duration `json:"calibration_ns"`
	Self        []string      `json:"-"`
	Progress    func(string)  `json:"-"`
}

func (p *ServicesPlan) validate() error {
	var errs []error
	if len(p.Counts) == 0 || !slices.IsSorted(p.Counts) {
		errs = append(errs, fmt.Errorf("numbers of services %v: at least one, ascending", p.Counts))
	}
	for _, n := range slices.Concat(p.Counts, p.KubeProxyCounts) {
		if n < 1 || n > maxFleet {
			errs = append(errs, fmt.Errorf("%d services: 1 to %d", n, maxFleet))
		}
	}
	if p.Changes < 0 || p.Pause < 0 || p.Budget <= 0 {
		errs = append(errs, fmt.Errorf("%d changes, %v apart, within %v: not negative, and a time", p.Changes, p.Pause, p.Budget))
	}
	if p.KubeProxy != "" {
		errs = append(errs, kubeproxy.Check(p.KubeProxy))
	}
	return errors.Join(errs...)
}

// ServicesResult is all that a run found.
type ServicesResult struct {
	Plan  ServicesPlan  `json:"plan"`
	Nodes []*NodeResult `json:"nodes"`
	// Connect has the connections, and the facts of the machine.
	Connect *Result `json:"connect"`
}

// NodeResult is what programming one node took.
type NodeResult struct {
	Target   string `json:"target"`
	About    string `json:"about"`
	Services int    `json:"services"`
	// Start is from the start of the process to the first connection through
	// the last service, in seconds.
	Start float64 `json:"start_seconds"`
	// Sync is the part of it in which the kernel was written, as the
	// implementation itself says, in seconds.
	Sync float64 `json:"sync_seconds"`
	// Changes are from a change of an endpoint to the first connection that
	// reaches the new one.
	Changes []Changes `json:"changes"`
	// Memory in bytes; nil where it is not known.
	Memory *Memory `json:"memory,omitempty"`
}

// Changes are those made in one way.
type Changes struct {
	By string `json:"by"`
	// Milliseconds of each, in the order they were made.
	Milliseconds []float64 `json:"milliseconds"`
	// Attempts that did not connect while these were waited for.
	Errors int     `json:"errors"`
	P50    float64 `json:"p50_ms"`
	P99    float64 `json:"p99_ms"`
}

// Memory is what an implementation has in use, in bytes.
type Memory struct {
	// Tables is the agent's heap, after a collection, with the manifests and
	// the rows from them; Heap with the driver and the writer of the maps too.
	Tables uint64 `json:"tables"`
	Heap   uint64 `json:"heap"`
	// Kernel is of the entries of its maps.
	Kernel uint64 `json:"kernel"`
	// KernelEmpty is of the maps without any entry, as their configured sizes make it.
	KernelEmpty uint64 `json:"kernel_empty"`
}

// translator makes services of a node's network.
type translator interface {
	// start begins; it returns when that was, on the monotonic clock.
	start(ctx context.Context) (time.Duration, error)
	// synced tells, once the last service works, how long the kernel was written.
	synced(ctx context.Context) (seconds float64, err error)
	// ways are the names of the ways to change endpoints.
	ways() []string
	// change sets the endpoints of service i; it returns when it began.
	change(ctx context.Context, way string, i int, endpoints []netip.Addr) (time.Duration, error)
	// memory is nil where it is not known.
	memory(ctx context.Context) (*Memory, error)
	// log is the end of what its process has said.
	log() string
	// stop ends the processes; what they wrote to the kernel stays until remove.
	stop() error
	remove() error
}

// stages makes the nodes; it returns those that it has also with an error.
func (p ServicesPlan) stages(site *Site) (out []*stage, err error) {
	add := func(name, about string, count int, of func(fleet, *node) translator) error {
		n, err := site.node(name)
		if err != nil {
			return err
		}
		out = append(out, &stage{name: name, about: about, fleet: fleet(count), node: n, translator: of(fleet(count), n)})
		return nil
	}
	for _, n := range p.Counts {
		err := add(weftName(n), "weft: programs at the sockets of the client's cgroup", n, func(f fleet, on *node) translator {
			return newWeft(p.Self, f, on)
		})
		if err != nil {
			return out, err
		}
	}
	if p.KubeProxy == "" {
		return out, nil
	}
	for _, n := range p.KubeProxyCounts {
		for _, mode := range []kubeproxy.Mode{kubeproxy.IPTables, kubeproxy.NFTables} {
			err := add(fmt.Sprintf("%s@%d", mode, n), peerAbout[mode], n, func(f fleet, on *node) translator {
				return newPeer(p.KubeProxy, mode, f, on)
			})
			if err != nil {
				return out, err
			}
		}
	}
	return out, nil
}

func weftName(services int) string { return fmt.Sprintf("weft@%d", services) }

// stage is a node with services of one implementation.
type stage struct {
	name, about string
	fleet       fleet
	node        *node
	translator  translator
}

// Run measures. An error of any connection ends the run.
func (p ServicesPlan) Run(ctx context.Context) (_ *ServicesResult, err error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	site, err := NewSite()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, site.Close()) }()
	stages, err := p.stages(site)
	defer func() {
		for _, s := range stages {
			err = errors.Join(err, s.translator.remove())
		}
	}()
	if err != nil {
		return nil, err
	}
	result := &ServicesResult{Plan: p}
	for _, s := range stages {
		p.progress("program " + s.name)
		r, err := p.program(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		result.Nodes = append(result.Nodes, r)
	}
	result.Connect, err = p.connect(ctx, site, stages)
	return result, err
}

func (p ServicesPlan) progress(step string) {
	if p.Progress != nil {
		p.Progress(step)
	}
}

// connect measures connections, all stages in turns.
func (p ServicesPlan) connect(ctx context.Context, site *Site, stages []*stage) (*Result, error) {
	bare, err := site.node("direct")
	if err != nil {
		return nil, err
	}
	plan := Plan{
		Title: "connections to services: each to any of them at random, or all to one",
		Loads: []Load{
			{Mode: CC, Connections: 1, Warmup: p.Warmup, Duration: p.Duration},
			{Mode: CC, Connections: 1, Warmup: p.Warmup, Duration: p.Duration, Same: true},
		},
		Rounds: p.Rounds, Pin: p.Pin, Calibration: p.Calibration, Self: p.Self, Progress: p.Progress,
		Compare: p.comparisons(stages),
	}
	for _, s := range stages {
		plan.Targets = append(plan.Targets, s.node.target(s.name, s.about, s.fleet.services()))
	}
	plan.Targets = append(plan.Targets, bare.target("direct", "the same path, straight to 10,000 endpoints: no service", nil))
	return plan.Run(ctx)
}

// comparisons: weft to itself with the fewest services, each to no service at
// all, and kube-proxy to weft with as many.
func (p ServicesPlan) comparisons(stages []*stage) [][2]string {
	var out [][2]string
	for _, n := range p.Counts[1:] {
		out = append(out, [2]string{weftName(n), weftName(p.Counts[0])})
	}
	for _, s := range stages {
		out = append(out, [2]string{s.name, "direct"})
	}
	for _, s := range stages {
		if n := int(s.fleet); s.name != weftName(n) && slices.Contains(p.Counts, n) {
			out = append(out, [2]string{s.name, weftName(n)})
		}
	}
	return out
}

// program fills a node, changes endpoints, and ends what did it.
func (p ServicesPlan) program(ctx context.Context, s *stage) (_ *NodeResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, 4*p.Budget)
	defer cancel()
	defer func() { err = errors.Join(err, s.translator.stop()) }()
	server, err := start(ctx, p.Self, "server", s.node.server,
		Task{Load: Load{Mode: who, Connections: 1, Duration: time.Second}, Address: netip.AddrPortFrom(netip.IPv4Unspecified(), fleetTarget), CPU: -1})
	if err != nil {
		return nil, err
	}
	defer server.kill()
	if _, err := server.address(); err != nil {
		return nil, err
	}
	child, err := startIn(ctx, p.Self, "probe", s.node.client, s.node.pod, Task{CPU: -1})
	if err != nil {
		return nil, err
	}
	defer child.kill()
	r, err := p.measure(ctx, s, &prober{child})
	if err != nil {
		err = errors.Join(ctx.Err(), fmt.Errorf("%w\n%s", err, s.translator.log()))
	}
	return r, err
}

func (p ServicesPlan) measure(ctx context.Context, s *stage, probe *prober) (*NodeResult, error) {
	r := &NodeResult{Target: s.name, About: s.about, Services: int(s.fleet)}
	var began time.Duration
	last := s.fleet.services().at(int(s.fleet) - 1)
	f, err := probe.wait(ask{Service: last, Patience: p.Budget}, func() (err error) {
		began, err = s.translator.start(ctx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("first connection: %w", err)
	}
	r.Start = (f.At - began).Seconds()
	if r.Sync, err = s.translator.synced(ctx); err != nil {
		return nil, err
	}
	p.progress(fmt.Sprintf("%s: %.2f s until the first connection, %.2f s of writing", s.name, r.Start, r.Sync))
	if r.Memory, err = s.translator.memory(ctx); err != nil {
		return nil, fmt.Errorf("memory: %w", err)
	}
	for w, way := range s.translator.ways() {
		c, err := p.change(ctx, s, probe, way, w*p.Changes)
		if err != nil {
			return nil, fmt.Errorf("change by %s: %w", way, err)
		}
		r.Changes = append(r.Changes, c)
	}
	return r, nil
}

// change moves one endpoint of one service after the other.
func (p ServicesPlan) change(ctx context.Context, s *stage, probe *prober, way string, firstSpare int) (Changes, error) {
	c := Changes{By: way}
	services := s.fleet.services()
	end := time.Now().Add(p.Budget)
	for i := range p.Changes {
		if time.Now().After(end) {
			break
		}
		if err := pause(ctx, p.Pause); err != nil {
			return c, err
		}
		at := (firstSpare + i) * 7919 % int(s.fleet) // all over the fleet
		endpoints := s.fleet.change(at, firstSpare+i)
		var began time.Duration
		f, err := probe.wait(ask{Service: services.at(at), Want: endpoints[0], Patience: p.Budget}, func() (err error) {
			began, err = s.translator.change(ctx, way, at, endpoints)
			return err
		})
		if err != nil {
			return c, err
		}
		c.Milliseconds = append(c.Milliseconds, float64((f.At-began).Microseconds())/1e3)
		c.Errors += f.Errors
	}
	c.P50, c.P99 = quantile(c.Milliseconds, 0.5), quantile(c.Milliseconds, 0.99)
	p.progress(fmt.Sprintf("%s: %d changes by %s: p50 %.2f ms, p99 %.2f ms", s.name, len(c.Milliseconds), way, c.P50, c.P99))
	return c, nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// quantile is the smallest value that at least the share q of all does not
// exceed: with fewer than 100 values the 99th percentile is the largest. 0 for none.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	at := int(q*float64(len(sorted)) + 0.999999)
	return sorted[max(0, min(len(sorted), at)-1)]
}
