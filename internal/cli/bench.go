// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weft-mesh/weft/internal/bench"
	"github.com/weft-mesh/weft/internal/lab/layout"
)

func newBenchCommand(s IO) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure a path between network namespaces beside others, in turns",
		Long: `Measure a path between network namespaces beside others, in turns.

A path is NETNS,NETNS,ADDR: the client's network namespace, the server's, and
the server's address as the client reaches it; or the name of a baseline, which
is built for the run:

  host          two namespaces joined by one veth pair
  host-across   two namespaces joined by a bridge in a third
  plain         two namespaces and a router between them (kernel forwarding)
  plain-across  the same with two routers joined by a bridge
  plain-vxlan   the same through VXLAN devices of the kernel`,
	}
	cmd.AddCommand(newBenchRRCommand(s), newBenchStreamCommand(s), newBenchNetCommand(s), newBenchServicesCommand(s), newBenchXDPCommand(s),
		newBenchProcessCommand(s, "client"), newBenchProcessCommand(s, "server"), newBenchProcessCommand(s, "probe"),
		newBenchProcessCommand(s, "node"))
	return cmd
}

// benchFlags are those of every kind of run.
type benchFlags struct {
	rounds                        int
	warmup, duration, calibration time.Duration
	pin, ipv6                     bool
	output                        string
}

func (f *benchFlags) register(cmd *cobra.Command) {
	f.registerRounds(cmd)
	cmd.Flags().BoolVarP(&f.ipv6, "ipv6", "6", false, "measure the baselines, and the pods of a lab, over IPv6")
}

func (f *benchFlags) registerRounds(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.IntVar(&f.rounds, "rounds", 5, "rounds that count, after one of warming up")
	flags.DurationVar(&f.warmup, "warmup", 200*time.Millisecond, "what each load runs before it is measured")
	flags.DurationVar(&f.duration, "duration", time.Second, "how long each load is measured")
	flags.DurationVar(&f.calibration, "calibration", time.Second, "how long the idle machine is watched, before and after")
	flags.BoolVar(&f.pin, "pin", false, "keep the client on processor 0 and the server on 1")
	flags.StringVarP(&f.output, "output", "o", "table", "table, or json with every raw number")
}

// run measures targets and prints.
func (f *benchFlags) run(cmd *cobra.Command, s IO, plans ...bench.Plan) error {
	var results []*bench.Result
	for _, p := range plans {
		for i := range p.Loads {
			p.Loads[i].Warmup, p.Loads[i].Duration = f.warmup, f.duration
		}
		p.Rounds, p.Pin, p.Calibration = f.rounds, f.pin, f.calibration
		p.Self = []string{"/proc/self/exe", "bench"}
		p.Progress = func(step string) { fmt.Fprintln(s.Err, step) }
		r, err := p.Run(cmd.Context())
		if err != nil {
			return fmt.Errorf("measure %s: %w", p.Title, err)
		}
		results = append(results, r)
	}
	return f.print(s, results)
}

func (f *benchFlags) print(s IO, results []*bench.Result) error {
	if f.output == "json" {
		e := json.NewEncoder(s.Out)
		e.SetIndent("", "  ")
		return e.Encode(results)
	}
	for i, r := range results {
		if i > 0 {
			fmt.Fprintln(s.Out)
		}
		if err := r.Print(s.Out); err != nil {
			return err
		}
	}
	return nil
}

func (f *benchFlags) validate() error {
	if f.output != "table" && f.output != "json" {
		return fmt.Errorf("output %q: table or json", f.output)
	}
	return nil
}

// pairFlags name the paths of a run.
type pairFlags struct {
	a string
	b []string
}

func (f *pairFlags) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.a, "pair-a", "plain", "path to measure: NETNS,NETNS,ADDR or a baseline")
	cmd.Flags().StringArrayVar(&f.b, "pair-b", []string{"plain"}, "path to compare with; may be repeated")
}

func (f *pairFlags) targets(site *bench.Site, ipv6 bool) ([]bench.Target, error) {
	var out []bench.Target
	for i, text := range append([]string{f.a}, f.b...) {
		t, err := parsePair(site, text, ipv6)
		if err != nil {
			return nil, fmt.Errorf("path %q: %w", text, err)
		}
		t.Name = fmt.Sprintf("%c:%s", 'A'+i, t.Name)
		out = append(out, t)
	}
	return out, nil
}

func parsePair(site *bench.Site, text string, ipv6 bool) (bench.Target, error) {
	fields := strings.Split(text, ",")
	if len(fields) == 1 {
		kind, err := bench.ParseBaseline(text)
		if err != nil {
			return bench.Target{}, err
		}
		return site.Build(kind, 0, ipv6)
	}
	if len(fields) != 3 {
		return bench.Target{}, errors.New("not of the form NETNS,NETNS,ADDR")
	}
	addr, err := netip.ParseAddr(fields[2])
	if err != nil {
		return bench.Target{}, err
	}
	return bench.Target{
		Name: fields[0] + "→" + fields[1], About: "as given on the command line",
		Client: fields[0], Server: fields[1], Addr: addr,
	}, nil
}

// withSite calls f with a place for baselines, and clears it.
func withSite(f func(*bench.Site) error) error {
	site, err := bench.NewSite()
	if err != nil {
		return err
	}
	return errors.Join(f(site), site.Close())
}

func newBenchRRCommand(s IO) *cobra.Command {
	var (
		common      benchFlags
		pairs       pairFlags
		size        int
		connections []int
		reconnect   bool
		rate        float64
	)
	cmd := &cobra.Command{
		Use:   "rr",
		Short: "Request and response over TCP",
		Args:  cobra.NoArgs,
		Example: `  weft bench rr --pair-a plain --pair-b plain          # A against A
  weft bench rr --pair-a ns1,ns2,10.0.0.2 --pair-b plain -c 1,16 -o json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := common.validate(); err != nil {
				return err
			}
			mode := bench.RR
			if reconnect {
				mode = bench.CRR
			}
			var loads []bench.Load
			for _, n := range connections {
				loads = append(loads, bench.Load{Mode: mode, Bytes: size, Connections: n, Rate: rate})
			}
			return common.measurePairs(cmd, s, "request and response over TCP", pairs, loads)
		},
	}
	common.register(cmd)
	pairs.register(cmd)
	cmd.Flags().IntVar(&size, "bytes", 200, "of a request, and of its response")
	cmd.Flags().IntSliceVarP(&connections, "connections", "c", []int{1}, "at once; each number is a load of its own")
	cmd.Flags().BoolVar(&reconnect, "connect-per-request", false, "a connection for each request, one at a time")
	cmd.Flags().Float64Var(&rate, "rate", 0, "open loop: requests a second over all connections; 0 is a closed loop")
	return cmd
}

func newBenchStreamCommand(s IO) *cobra.Command {
	var (
		common benchFlags
		pairs  pairFlags
	)
	cmd := &cobra.Command{
		Use:   "stream",
		Short: "Throughput of one TCP connection",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := common.validate(); err != nil {
				return err
			}
			return common.measurePairs(cmd, s, "one TCP stream", pairs, []bench.Load{{Mode: bench.Stream, Connections: 1}})
		},
	}
	common.register(cmd)
	pairs.register(cmd)
	return cmd
}

func (f *benchFlags) measurePairs(cmd *cobra.Command, s IO, title string, pairs pairFlags, loads []bench.Load) error {
	return withSite(func(site *bench.Site) error {
		targets, err := pairs.targets(site, f.ipv6)
		if err != nil {
			return err
		}
		return f.run(cmd, s, bench.Plan{Title: title, Targets: targets, Loads: loads})
	})
}

// netLoads are what `weft bench net` can put on each pair.
var netLoads = []struct {
	name string
	load bench.Load
}{
	{"rr", bench.Load{Mode: bench.RR, Bytes: 200, Connections: 1}},
	{"rr16", bench.Load{Mode: bench.RR, Bytes: 200, Connections: 16}},
	{"crr", bench.Load{Mode: bench.CRR, Bytes: 200, Connections: 1}},
	{"stream", bench.Load{Mode: bench.Stream, Connections: 1}},
}

func netLoadNames() (names []string) {
	for _, l := range netLoads {
		names = append(names, l.name)
	}
	return names
}

// pickLoads returns the loads of these names, in the order of netLoads.
func pickLoads(names []string) ([]bench.Load, error) {
	var out []bench.Load
	for _, name := range names {
		if !slices.Contains(netLoadNames(), name) {
			return nil, fmt.Errorf("load %q: it is one of %s", name, strings.Join(netLoadNames(), ", "))
		}
	}
	for _, l := range netLoads {
		if slices.Contains(names, l.name) {
			out = append(out, l.load)
		}
	}
	return out, nil
}

// netFlags say what to measure of a lab.
type netFlags struct {
	lab            labFlag
	client, server string
	where, loads   []string
}

func (f *netFlags) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.lab.name, "lab", "", "name of the lab (default $"+layout.EnvLab+", else "+defaultLab+")")
	cmd.Flags().StringVar(&f.client, "from", "", "client NS/POD; default is any that fits")
	cmd.Flags().StringVar(&f.server, "to", "", "server NS/POD")
	cmd.Flags().StringSliceVar(&f.where, "where", []string{"same-node", "across"}, "which pairs to look for")
	cmd.Flags().StringSliceVar(&f.loads, "loads", netLoadNames(), "what to put on each pair")
	cmd.MarkFlagsRequiredTogether("from", "to")
}

func newBenchNetCommand(s IO) *cobra.Command {
	var common benchFlags
	var which netFlags
	cmd := &cobra.Command{
		Use:   "net",
		Short: "The pods of a lab beside plain veth with kernel forwarding, and host to host",
		Long: `Measure the pods of a running lab, on one node and across nodes, each beside

  plain, plain-across   the same hops as namespaces, veth and kernel forwarding
  plain-vxlan           in a lab with VXLAN: the same through the kernel's VXLAN
  host                  on one node: two namespaces joined by one veth pair
  nodes                 across nodes: the nodes' own namespaces

with 200-byte requests and responses over 1 and 16 connections, a connection
for each request, and one stream.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := common.validate(); err != nil {
				return err
			}
			return withSite(func(site *bench.Site) error {
				plans, err := which.plans(site, common.ipv6)
				if err != nil {
					return err
				}
				return common.run(cmd, s, plans...)
			})
		},
	}
	common.register(cmd)
	which.register(cmd)
	return cmd
}

func (f *netFlags) plans(site *bench.Site, ipv6 bool) ([]bench.Plan, error) {
	loads, err := pickLoads(f.loads)
	if err != nil {
		return nil, err
	}
	lab, err := bench.ReadLab(f.lab.lab())
	if err != nil {
		return nil, err
	}
	pairs, err := labPairs(lab, f.client, f.server, f.where)
	if err != nil {
		return nil, err
	}
	var plans []bench.Plan
	for _, pair := range pairs {
		targets, err := lab.Targets(site, pair[0], pair[1], ipv6)
		if err != nil {
			return nil, err
		}
		title := fmt.Sprintf("lab %s: pods on one node", lab.Names.Name)
		if pair[0].Node != pair[1].Node {
			title = fmt.Sprintf("lab %s: pods across nodes, %s", lab.Names.Name, lab.Routing)
		}
		plans = append(plans, bench.Plan{Title: title, Targets: targets, Loads: slices.Clone(loads)})
	}
	return plans, nil
}

func labPairs(lab *bench.Lab, client, server string, where []string) ([][2]bench.LabEnd, error) {
	if client != "" {
		a, errA := lab.Pod(client)
		b, errB := lab.Pod(server)
		return [][2]bench.LabEnd{{a, b}}, errors.Join(errA, errB)
	}
	var pairs [][2]bench.LabEnd
	for _, place := range where {
		if place != "same-node" && place != "across" {
			return nil, fmt.Errorf("place %q: same-node or across", place)
		}
		a, b, err := lab.Pair(place == "same-node")
		if err != nil {
			return nil, err
		}
		pairs = append(pairs, [2]bench.LabEnd{a, b})
	}
	return pairs, nil
}

// newBenchProcessCommand is a half of a measurement; weft starts it itself.
func newBenchProcessCommand(s IO, role string) *cobra.Command {
	return &cobra.Command{
		Use:    role + " TASK",
		Short:  "The " + role + " of a measurement",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if code := bench.Process(role, args, s.In, s.Out, s.Err); code != 0 {
				return &ExitError{Code: code}
			}
			return nil
		},
	}
}
