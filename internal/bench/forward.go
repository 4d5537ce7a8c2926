// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	nodepath "github.com/weft-mesh/weft/internal/datapath/node"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/datapath/traffic"
	"github.com/weft-mesh/weft/internal/datapath/xdp"
	"github.com/weft-mesh/weft/internal/netdev"
)

// ForwardPlan measures how many datagrams a second a node sends on from a client
// outside to a backend on another node, with another source address, in three
// ways that take turns.
type ForwardPlan struct {
	Rounds   int           `json:"rounds"` // that count, after one of warming up
	Duration time.Duration `json:"duration_ns"`
	Clients  int           `json:"clients"`  // source ports
	Services int           `json:"services"` // beside the one that is asked, for weft
	// Progress is called before each sample; nil is allowed.
	Progress func(string) `json:"-"`
}

// ForwardResult is what was found.
type ForwardResult struct {
	Facts Facts         `json:"facts"`
	Plan  ForwardPlan   `json:"plan"`
	Ways  []*ForwardWay `json:"ways"` // XDP first
}

// ForwardWay is one way over the rounds.
type ForwardWay struct {
	Name  string    `json:"name"`
	About string    `json:"about"`
	Rates []float64 `json:"rates"` // arrived per second, by round
}

const (
	wayXDP      = "xdp"
	wayTCX      = "tcx"
	wayIPTables = "iptables"
)

const (
	forwardPort = 30080
	backendPort = 8080
	// forwardBatch is how many datagrams one system call sends; it takes 15 ms to
	// begin and to end.
	forwardBatch = 2_000_000
)

// pinFolder holds the maps of nodes, in folders named like their namespaces.
const pinFolder = "/sys/fs/bpf"

var (
	forwardClient  = netip.MustParseAddr("198.51.100.7")
	forwardBackend = netip.MustParsePrefix("10.244.2.0/24")
)

// Run measures.
func (p ForwardPlan) Run(ctx context.Context) (_ *ForwardResult, err error) {
	if p.Rounds < 1 || p.Clients < 1 || p.Clients > 4096 || p.Services < 0 {
		return nil, errors.New("a forwarding plan has at least one round, and from 1 to 4096 clients")
	}
	site, err := NewSite()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, site.Close()) }()
	if err := removePins(); err != nil {
		return nil, err
	}
	result := &ForwardResult{Facts: ReadFacts(), Plan: p}
	var paths []*forwardPath
	defer func() {
		for _, f := range paths {
			err = errors.Join(err, f.close())
		}
	}()
	for _, way := range []*ForwardWay{
		{Name: wayXDP, About: "weft: native XDP on the node's device; arrivals counted by XDP"},
		{Name: wayTCX, About: "weft: tcx behind an XDP program that passes all; arrivals counted by tcx"},
		{Name: wayIPTables, About: "iptables (legacy) DNAT and SNAT, conntrack, kernel forwarding, behind the same; arrivals counted by tcx"},
	} {
		f, err := newForwardPath(site, way.Name, p)
		if f != nil {
			paths = append(paths, f)
		}
		if err != nil {
			return nil, fmt.Errorf("build the path of %s: %w", way.Name, err)
		}
		result.Ways = append(result.Ways, way)
	}
	return result, p.measure(ctx, paths, result.Ways)
}

// removePins takes away those of processes that are gone.
func removePins() error {
	folders, err := filepath.Glob(filepath.Join(pinFolder, namePrefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, folder := range folders {
		if abandoned(filepath.Base(folder)) {
			errs = append(errs, pin.Remove(folder))
		}
	}
	return errors.Join(errs...)
}

func (p ForwardPlan) measure(ctx context.Context, paths []*forwardPath, ways []*ForwardWay) error {
	for round := range p.Rounds + 1 {
		for i, f := range paths {
			if p.Progress != nil {
				p.Progress(fmt.Sprintf("round %d of %d, %s", round, p.Rounds, ways[i].Name))
			}
			rate, err := f.rate(ctx, p.Duration)
			if err != nil {
				return fmt.Errorf("measure %s: %w", ways[i].Name, err)
			}
			if round > 0 {
				ways[i].Rates = append(ways[i].Rates, rate)
			}
		}
	}
	return nil
}

// forwardPath is a node and, at the other end of its uplink, a namespace that is
// the client, the router and the backend's node at once.
type forwardPath struct {
	node, far         string // network namespaces
	uplink, device    *net.Interface
	address, farAddr  netip.Addr
	pins              string // "" for none
	line              *traffic.Line
	cleanup           []func() error
	frontend, backend netip.AddrPort
}

func newForwardPath(site *Site, way string, plan ForwardPlan) (_ *forwardPath, err error) {
	site.paths++
	p := &path{site: site, prefix: fmt.Sprintf("%s%d-%d-", namePrefix, os.Getpid(), site.paths), mtu: underlayMTU}
	if err := p.namespaces("node", "far"); err != nil {
		return nil, err
	}
	f := &forwardPath{node: p.name("node"), far: p.name("far"), address: in(1, 1)[0].Addr(), farAddr: in(1, 2)[0].Addr()}
	f.frontend, f.backend = netip.AddrPortFrom(f.address, forwardPort), netip.AddrPortFrom(forwardBackend.Addr().Next(), backendPort)
	err = netdev.CreateVeth(
		netdev.LabLink{NetNS: f.far, Name: "eth0", Addresses: in(1, 2)},
		netdev.LabLink{NetNS: f.node, Name: "eth0", Addresses: in(1, 1), Gateways: addrs(in(1, 2))}, underlayMTU)
	if err != nil {
		return f, err
	}
	if f.uplink, err = deviceIn(f.node); err != nil {
		return f, err
	}
	if f.device, err = deviceIn(f.far); err != nil {
		return f, err
	}
	// so that no packet waits for an answer to ARP
	if err := ipBatch(f.node, fmt.Sprintf("neigh replace %s lladdr %s dev eth0 nud permanent", f.farAddr, f.device.HardwareAddr)); err != nil {
		return f, err
	}
	err = map[string]func(ForwardPlan) error{wayXDP: f.byXDP, wayTCX: f.byTCX, wayIPTables: f.byIPTables}[way](plan)
	if err != nil {
		return f, err
	}
	return f, f.join(way, plan)
}

func deviceIn(netNS string) (dev *net.Interface, err error) {
	err = netdev.InNetNS(netdev.NetNSPath(netNS), func() error {
		dev, err = net.InterfaceByName("eth0")
		return err
	})
	return dev, err
}

func ipBatch(netNS string, lines ...string) error {
	return runIn(netNS, strings.Join(lines, "\n")+"\n", "ip", "-batch", "-")
}

func runIn(netNS, stdin, name string, args ...string) error {
	return netdev.InNetNS(netdev.NetNSPath(netNS), func() error {
		cmd := exec.Command(name, args...)
		cmd.Stdin = strings.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
		}
		return nil
	})
}

// weft opens the maps of the node and enters the service.
func (f *forwardPath) weft(plan ForwardPlan) (*pin.Maps, setting.Node, error) {
	f.pins = filepath.Join(pinFolder, f.node)
	maps, err := pin.Open(f.pins, pin.Sizes{})
	if err != nil {
		return nil, setting.Node{}, err
	}
	f.cleanup = append(f.cleanup, maps.Close)
	cache := ipcache.New(maps)
	for prefix, e := range map[netip.Prefix]ipcache.Entry{
		addr.Host(f.address): {Identity: 1, Flags: ipcache.LocalNode},
		addr.Host(f.farAddr): {Identity: 2, Flags: ipcache.RemoteNode, NextHop4: f.farAddr},
		forwardBackend:       {Identity: 3, Flags: ipcache.Pod, NextHop4: f.farAddr},
	} {
		if err := cache.Update(context.Background(), prefix, e); err != nil {
			return nil, setting.Node{}, err
		}
	}
	err = traffic.Enter(maps, traffic.Service{
		Frontend: f.frontend, Backend: f.backend, Node: f.farAddr, NodeMAC: f.device.HardwareAddr, Others: plan.Services,
	})
	return maps, setting.Node{
		UplinkIfindex: f.uplink.Index, UplinkMTU: f.uplink.MTU, IPv4: f.address, ServiceFirstPort: 20000, ServiceLastPort: 29999,
		FirstPort: 10000, LastPort: 19999,
		Lifetimes: setting.Lifetimes{TCPSyn: time.Minute, TCPEstablished: time.Hour, TCPClosing: time.Minute, UDP: time.Hour, UDPReplied: time.Hour, Other: time.Minute},
	}, err
}

func (f *forwardPath) byXDP(plan ForwardPlan) error {
	maps, settings, err := f.weft(plan)
	if err != nil {
		return err
	}
	d, err := xdp.Load(maps, settings, xdp.Device{Name: "eth0", Ifindex: f.uplink.Index, MAC: f.uplink.HardwareAddr})
	if err != nil {
		return err
	}
	f.cleanup = append(f.cleanup, d.Close)
	return netdev.InNetNS(netdev.NetNSPath(f.node), func() error {
		_, err := d.Attach(xdp.Native)
		return err
	})
}

func (f *forwardPath) byTCX(plan ForwardPlan) error {
	maps, settings, err := f.weft(plan)
	if err != nil {
		return err
	}
	d, err := nodepath.Load(maps, settings)
	if err != nil {
		return err
	}
	f.cleanup = append(f.cleanup, d.Close)
	err = netdev.InNetNS(netdev.NetNSPath(f.node), func() error {
		return d.Attach(nodepath.Device{Name: "eth0", Ifindex: f.uplink.Index}, nil)
	})
	if err != nil {
		return err
	}
	return f.accept()
}

func (f *forwardPath) byIPTables(ForwardPlan) error {
	if err := netdev.EnableForwarding(f.node); err != nil {
		return err
	}
	if err := netdev.AddGatewayRoute(f.node, forwardBackend, f.farAddr); err != nil {
		return err
	}
	for _, rule := range []string{
		fmt.Sprintf("-t nat -A PREROUTING -d %s -p udp --dport %d -j DNAT --to-destination %s", f.address, forwardPort, f.backend),
		fmt.Sprintf("-t nat -A POSTROUTING -d %s -p udp --dport %d -j SNAT --to-source %s", f.backend.Addr(), backendPort, f.address),
	} {
		if err := runIn(f.node, "", "iptables-legacy", append([]string{"-w"}, strings.Fields(rule)...)...); err != nil {
			return err
		}
	}
	return f.accept()
}

// accept has the node's device take frames, as the driver of a network card does.
func (f *forwardPath) accept() error {
	return netdev.InNetNS(netdev.NetNSPath(f.node), func() error {
		a, err := xdp.Accept(f.uplink.Index)
		if err == nil {
			f.cleanup = append(f.cleanup, a.Close)
		}
		return err
	})
}

// join puts source and sink to the other end. The node's device polls on a
// thread of its own, so that source and node each have a processor.
func (f *forwardPath) join(way string, plan ForwardPlan) error {
	sink := traffic.Packets
	if way == wayXDP {
		sink = traffic.Frames
	}
	err := netdev.InNetNS(netdev.NetNSPath(f.far), func() (err error) {
		f.line, err = traffic.NewLine(traffic.Stream{
			Ifindex: f.device.Index, From: f.device.HardwareAddr, To: f.uplink.HardwareAddr,
			Src: forwardClient, Dst: f.frontend, Clients: plan.Clients, Arrived: backendPort,
		}, sink)
		return err
	})
	if err != nil {
		return err
	}
	f.cleanup = append(f.cleanup, f.line.Close)
	return runIn(f.node, "", "ip", "netns", "exec", f.node, "sh", "-c", "echo 1 > /sys/class/net/eth0/threaded")
}

// rate is how many datagrams arrive in a second.
func (f *forwardPath) rate(ctx context.Context, d time.Duration) (float64, error) {
	var rate float64
	err := netdev.InNetNS(netdev.NetNSPath(f.far), func() error {
		if err := f.line.Send(1); err != nil {
			return err
		}
		before, err := f.line.Arrived()
		if err != nil {
			return err
		}
		start := time.Now()
		for time.Since(start) < d && ctx.Err() == nil {
			if err := f.line.Send(forwardBatch); err != nil {
				return err
			}
		}
		took := time.Since(start)
		after, err := f.line.Arrived()
		rate = float64(after-before) / took.Seconds()
		return err
	})
	if err == nil && rate == 0 {
		err = errors.New("nothing arrived")
	}
	return rate, errors.Join(err, ctx.Err())
}

func (f *forwardPath) close() error {
	var errs []error
	for _, c := range slices.Backward(f.cleanup) {
		errs = append(errs, c())
	}
	if f.pins != "" {
		errs = append(errs, pin.Remove(f.pins))
	}
	return errors.Join(errs...)
}

// Print writes the result for people.
func (r *ForwardResult) Print(out io.Writer) error {
	w := &writer{w: out}
	w.printf("datagrams of 60 bytes from a client outside to a backend on another node, sent on by one node with its own address; %d source ports, %d more services\n\n", r.Plan.Clients, r.Plan.Services)
	t := &writer{w: tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)}
	t.printf("\tforwarded/s\tmin\tmax\txdp is\tmin\tmax\t\n")
	for _, way := range r.Ways {
		s, ratio := spreadOf(way.Rates), spreadOf(ratios(r.Ways[0].Rates, way.Rates))
		t.printf("%s\t%.0f\t%.0f\t%.0f\t%.2f×\t%.2f×\t%.2f×\t\n", way.Name, s.Median, s.Min, s.Max, ratio.Median, ratio.Min, ratio.Max)
	}
	w.flush(t)
	for _, way := range r.Ways {
		w.printf("  %s: %s\n", way.Name, way.About)
	}
	return w.err
}
