// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// NetnsPath is the file of a named network namespace; a name with a slash is
// the path already.
func NetnsPath(name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	return filepath.Join("/run/netns", name)
}

// Target is a path to measure.
type Target struct {
	Name  string `json:"name"`
	About string `json:"about,omitempty"` // what is on the path
	// Client and Server are network namespaces (see NetnsPath), "" the one of this process.
	Client string     `json:"client"`
	Server string     `json:"server"`
	Addr   netip.Addr `json:"addr"` // of the server, as the client reaches it
	Port   uint16     `json:"port"` // 0: the server takes a free one
	// Services are what the client connects to instead of Addr.
	Services *Services `json:"services,omitempty"`
	// ClientCgroup is the cgroup2 folder that the client starts in; "" is the
	// one of this process.
	ClientCgroup string `json:"client_cgroup,omitempty"`
	// Cgroups whose processor time is reported beside the machine's.
	Cgroups []string `json:"cgroups,omitempty"`
}

// Plan is one run. Targets take turns within each round.
type Plan struct {
	Title   string   `json:"title"`
	Targets []Target `json:"targets"`
	Loads   []Load   `json:"loads"`
	// Compare are pairs of targets by name, the second the baseline of the
	// first; without any, the first target is compared with each of the others.
	Compare [][2]string `json:"compare,omitempty"`
	// Rounds that count; one round of warming up goes before them.
	Rounds int `json:"rounds"`
	// Pin keeps the client on processor 0 and the server on 1.
	Pin bool `json:"pin"`
	// Calibration is how long the machine is watched idle, before and after.
	Calibration time.Duration `json:"calibration_ns"`
	// Self is the command to which "client TASK" or "server TASK" is added.
	Self []string `json:"-"`
	// Progress is called before each sample; nil is allowed.
	Progress func(string) `json:"-"`
}

func (p *Plan) validate() error {
	var errs []error
	if len(p.Targets) == 0 || len(p.Loads) == 0 {
		errs = append(errs, errors.New("a plan has a target and a load"))
	}
	if p.Rounds < 1 {
		errs = append(errs, fmt.Errorf("%d rounds: at least 1", p.Rounds))
	}
	if p.Pin && runtime.NumCPU() < 2 {
		errs = append(errs, errors.New("pinning needs two processors"))
	}
	for _, t := range p.Targets {
		if !t.Addr.IsValid() {
			errs = append(errs, fmt.Errorf("target %s has no address", t.Name))
		}
	}
	for _, l := range p.Loads {
		if err := l.validate(); err != nil {
			errs = append(errs, fmt.Errorf("load %s: %w", l.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// Sample is one load on one target.
type Sample struct {
	Target string       `json:"target"`
	Round  int          `json:"round"` // 0 is the warm-up and does not count
	Start  time.Time    `json:"start"`
	Client ClientReport `json:"client"`
	Server ServerReport `json:"server"`
	// Busy is the processor time of the whole machine while measured, idle
	// calibration not yet taken off.
	Busy float64 `json:"busy_cpu_seconds"`
	// Cgroups are processor seconds of each cgroup over the whole load.
	Cgroups map[string]float64 `json:"cgroup_cpu_seconds,omitempty"`
}

// rate is requests per second, or of a stream bytes per second.
func (s Sample) rate() float64 {
	if s.Client.Seconds == 0 {
		return 0
	}
	return s.work() / s.Client.Seconds
}

func (s Sample) work() float64 {
	if s.Client.Latency == nil {
		return float64(s.Client.Bytes)
	}
	return float64(s.Client.Requests)
}

// cost is processor seconds of the machine for each request, or for each byte.
func (s Sample) cost(idle float64) float64 {
	if s.work() == 0 {
		return 0
	}
	return max(0, s.Busy-idle*s.Client.Seconds) / s.work()
}

func (s Sample) latency(of func(Latency) float64) float64 {
	if s.Client.Latency == nil {
		return 0
	}
	return of(*s.Client.Latency)
}

// Result is all that a run found.
type Result struct {
	Facts Facts     `json:"facts"`
	Plan  Plan      `json:"plan"`
	Start time.Time `json:"start"`
	// Idle is the calibration: busy processor seconds per second of the
	// machine left alone, before and after the run.
	Idle  []float64    `json:"idle_cpu"`
	Cases []CaseResult `json:"cases"`
}

// CaseResult is one load on all targets.
type CaseResult struct {
	Load        Load         `json:"load"`
	Samples     []Sample     `json:"samples"` // in the order they were taken
	Summaries   []Summary    `json:"summaries"`
	Comparisons []Comparison `json:"comparisons,omitempty"`
}

// Summary is one target over the rounds.
type Summary struct {
	Target string `json:"target"`
	Rate   Spread `json:"rate"` // requests, or of a stream bytes, per second
	P50    Spread `json:"p50_us"`
	P99    Spread `json:"p99_us"`
	P999   Spread `json:"p999_us"`
	Max    Spread `json:"max_us"`
	// CPU is microseconds of the machine per request, or per MB of a stream;
	// Client is what of it the client's process had.
	CPU    Spread `json:"cpu_us"`
	Client Spread `json:"client_cpu_us"`
}

// Comparison holds ratios of a target to its baseline, taken round by round.
type Comparison struct {
	Target   string `json:"target"`
	Baseline string `json:"baseline"`
	Rate     Spread `json:"rate"`
	P50      Spread `json:"p50"`
	P99      Spread `json:"p99"`
	CPU      Spread `json:"cpu"`
	Client   Spread `json:"client_cpu"`
}

// Run measures. A load that ends with an error ends the run: such a result is
// none.
func (p Plan) Run(ctx context.Context) (*Result, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	r := &Result{Facts: ReadFacts(), Plan: p, Start: time.Now()}
	if err := r.calibrate(ctx, p.Calibration); err != nil {
		return nil, err
	}
	for _, load := range p.Loads {
		c, err := p.runCase(ctx, load)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", load.Name(), err)
		}
		r.Cases = append(r.Cases, c)
	}
	if err := r.calibrate(ctx, p.Calibration); err != nil {
		return nil, err
	}
	idle := spreadOf(r.Idle).Median
	for i := range r.Cases {
		r.Cases[i].evaluate(p, idle)
	}
	return r, nil
}

func (r *Result) calibrate(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	idle, err := calibrate(ctx, d, r.Facts.CPUs)
	r.Idle = append(r.Idle, idle)
	return err
}

func (p Plan) runCase(ctx context.Context, load Load) (CaseResult, error) {
	c := CaseResult{Load: load}
	for round := range p.Rounds + 1 {
		for turn := range p.Targets {
			// Who goes first moves on with the round.
			target := p.Targets[(turn+round)%len(p.Targets)]
			if p.Progress != nil {
				p.Progress(fmt.Sprintf("%s: round %d of %d: %s", load.Name(), round, p.Rounds, target.Name))
			}
			s, err := p.sample(ctx, load, target)
			if err != nil {
				return c, fmt.Errorf("%s: %w", target.Name, err)
			}
			s.Round = round
			c.Samples = append(c.Samples, s)
		}
	}
	return c, nil
}

// sample runs a server and a client.
func (p Plan) sample(ctx context.Context, load Load, t Target) (Sample, error) {
	s := Sample{Target: t.Name, Start: time.Now()}
	before, err := readCgroups(t.Cgroups)
	if err != nil {
		return s, err
	}
	clientCPU, serverCPU := -1, -1
	if p.Pin {
		clientCPU, serverCPU = 0, 1
	}
	listen := Task{Load: load, Address: netip.AddrPortFrom(t.Addr, t.Port), CPU: serverCPU}
	server, err := start(ctx, p.Self, "server", t.Server, listen)
	if err != nil {
		return s, err
	}
	addr, err := server.address()
	if err != nil {
		return s, fmt.Errorf("server: %w", err)
	}
	client, err := startIn(ctx, p.Self, "client", t.Client, t.ClientCgroup, Task{Load: load, Address: addr, CPU: clientCPU, Services: t.Services})
	if err != nil {
		server.kill()
		return s, err
	}
	if err := finishBoth(client, server, &s); err != nil {
		return s, err
	}
	s.Busy = s.Client.Machine.busy(time.Duration(s.Client.Seconds*float64(time.Second)), runtime.NumCPU())
	s.Cgroups, err = cgroupsSince(before)
	return s, errors.Join(err, s.check())
}

// address is the server's first line. A child without one has ended.
func (c *child) address() (netip.AddrPort, error) {
	line, err := c.out.ReadString('\n')
	if err != nil {
		return netip.AddrPort{}, errors.Join(c.finish(nil), err)
	}
	return netip.ParseAddrPort(strings.TrimSpace(line))
}

func finishBoth(client, server *child, s *Sample) error {
	if err := client.finish(&s.Client); err != nil {
		server.kill()
		return fmt.Errorf("client: %w", err)
	}
	if err := server.finish(&s.Server); err != nil {
		return fmt.Errorf("server: %w", err)
	}
	return nil
}

// check compares what the two sides counted.
func (s Sample) check() error {
	if s.Client.Sent != s.Server.Received || s.Client.Answered != s.Server.Requests {
		return fmt.Errorf("client sent %d bytes and has %d answers, server received %d and gave %d",
			s.Client.Sent, s.Client.Answered, s.Server.Received, s.Server.Requests)
	}
	if s.work() == 0 {
		return errors.New("nothing was done in the measured time")
	}
	return nil
}

func readCgroups(dirs []string) (map[string]float64, error) {
	out := map[string]float64{}
	for _, dir := range dirs {
		v, err := cgroupCPU(dir)
		if err != nil {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
		out[dir] = v
	}
	return out, nil
}

func cgroupsSince(before map[string]float64) (map[string]float64, error) {
	for dir, was := range before {
		v, err := cgroupCPU(dir)
		if err != nil {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
		before[dir] = v - was
	}
	return before, nil
}

// evaluate fills summaries and comparisons from the samples.
func (c *CaseResult) evaluate(p Plan, idle float64) {
	unit := 1e6 // µs per request
	if c.Load.Mode == Stream {
		unit = 1e12 // µs per MB
	}
	quantity := func(target string, of func(Sample) float64) []float64 {
		var out []float64
		for _, s := range c.Samples {
			if s.Round > 0 && s.Target == target {
				out = append(out, of(s))
			}
		}
		return out
	}
	p50 := func(s Sample) float64 { return s.latency(func(l Latency) float64 { return l.P50 }) }
	p99 := func(s Sample) float64 { return s.latency(func(l Latency) float64 { return l.P99 }) }
	p999 := func(s Sample) float64 { return s.latency(func(l Latency) float64 { return l.P999 }) }
	highest := func(s Sample) float64 { return s.latency(func(l Latency) float64 { return l.Max }) }
	cpu := func(s Sample) float64 { return s.cost(idle) * unit }
	client := func(s Sample) float64 { return s.Client.Process / s.work() * unit }
	for _, t := range p.Targets {
		spread := func(of func(Sample) float64) Spread { return spreadOf(quantity(t.Name, of)) }
		c.Summaries = append(c.Summaries, Summary{
			Target: t.Name, Rate: spread(Sample.rate), P50: spread(p50), P99: spread(p99), P999: spread(p999),
			Max: spread(highest), CPU: spread(cpu), Client: spread(client),
		})
	}
	for _, pair := range p.pairs() {
		ratio := func(of func(Sample) float64) Spread {
			return spreadOf(ratios(quantity(pair[0], of), quantity(pair[1], of)))
		}
		c.Comparisons = append(c.Comparisons, Comparison{
			Target: pair[0], Baseline: pair[1],
			Rate: ratio(Sample.rate), P50: ratio(p50), P99: ratio(p99), CPU: ratio(cpu), Client: ratio(client),
		})
	}
}

// pairs are the targets to compare.
func (p Plan) pairs() [][2]string {
	if len(p.Compare) > 0 {
		return p.Compare
	}
	var out [][2]string
	for _, t := range p.Targets[1:] {
		out = append(out, [2]string{p.Targets[0].Name, t.Name})
	}
	return out
}
