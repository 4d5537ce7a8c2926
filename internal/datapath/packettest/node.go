// SPDX-License-Identifier: Apache-2.0

// Package packettest runs datapath programs on single packets: it makes the
// tables of a node in a network namespace of their own, builds frames, and
// checks everything that a program may change.
package packettest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/conntrack"
	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// Devices of the node; they are never up, for no packet really leaves.
const (
	PodA   = "wf-a"
	PodB   = "wf-b"
	Uplink = "eth0"
	Tunnel = "weft_vxlan"
)

// Identities in the tables.
const (
	IdentityNode       = 1
	IdentityRemoteNode = 2
	IdentityWorld      = 3
	IdentityA          = 300
	IdentityB          = 301
	IdentityRemotePods = 400
)

// Hardware addresses.
var (
	MACA     = mac("0a:00:00:00:00:0a")
	MACB     = mac("0a:00:00:00:00:0b")
	HostMACA = mac("0e:00:00:00:00:0a")
	HostMACB = mac("0e:00:00:00:00:0b")
	MACNode  = mac("02:00:00:00:00:01")
	MACOther = mac("02:00:00:00:00:02") // a neighbour of the node on the underlay
)

func mac(s string) net.HardwareAddr {
	m, err := net.ParseMAC(s)
	must(err)
	return m
}

// Family is the addresses of one IP version.
type Family struct {
	Name               string
	V6                 bool
	A, B               netip.Addr // local pods
	Unused             netip.Addr // in the pod CIDR, no pod
	Gateway            netip.Addr
	Node, OtherNode    netip.Addr
	RemotePod          netip.Addr // behind OtherNode
	World              netip.Addr
	Excluded           netip.Addr // outside, not masqueraded
	Multicast          netip.Addr
	ICMP, Echo, Answer uint8 // protocol, and types of echo request and reply
}

// Families are what every test runs over.
var Families = []Family{
	{
		Name: "IPv4", A: ip("10.244.1.5"), B: ip("10.244.1.6"), Unused: ip("10.244.1.99"), Gateway: ip("10.244.1.1"),
		Node: ip("172.30.0.1"), OtherNode: ip("172.30.0.2"), RemotePod: ip("10.244.2.5"),
		World: ip("198.51.100.7"), Excluded: ip("203.0.113.7"), Multicast: ip("224.0.0.251"),
		ICMP: ICMP, Echo: 8, Answer: 0,
	},
	{
		Name: "IPv6", V6: true, A: ip("fd00:10:244:1::5"), B: ip("fd00:10:244:1::6"), Unused: ip("fd00:10:244:1::99"), Gateway: ip("fd00:10:244:1::1"),
		Node: ip("fd00:172:30::1"), OtherNode: ip("fd00:172:30::2"), RemotePod: ip("fd00:10:244:2::5"),
		World: ip("2001:db8::7"), Excluded: ip("2001:db8:1::7"), Multicast: ip("ff02::fb"),
		ICMP: ICMPv6, Echo: 128, Answer: 129,
	},
}

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

// Node is the tables of a node with two pods, another node and the outside.
type Node struct {
	Maps     *pin.Maps
	Folder   string // of the pins
	t        testing.TB
	ns       *nstest.NS
	devices  map[string]int
	counters map[string]Count // at the last look
	ring     *ringbuf.Reader
}

// Sizes are small, so that a test can fill a map.
func Sizes() pin.Sizes {
	return pin.Sizes{Endpoints: 64, IPCache: 256, Conntrack: 512, NAT: 512, ServiceFlows: 512, Fragments: 256, Events: 256 << 10}
}

// New makes a node; its tables are gone at the end of the test.
func New(t testing.TB, sizes pin.Sizes) *Node {
	t.Helper()
	n := &Node{t: t, ns: nstest.New(t), devices: map[string]int{}}
	n.Folder = bpffs.New(t) + "/node"
	n.check(n.ns.Do(n.makeDevices), "make devices")
	maps, err := pin.Open(n.Folder, sizes)
	n.check(err, "open maps")
	n.Maps = maps
	t.Cleanup(func() { maps.Close() })
	n.ring, err = ringbuf.NewReader(maps.Map("weft_events"))
	n.check(err, "open ring")
	t.Cleanup(func() { n.ring.Close() })
	n.fill()
	n.counters = n.readCounters()
	return n
}

func (n *Node) check(err error, step string) {
	n.t.Helper()
	if err != nil {
		n.t.Fatalf("%s: %v", step, err)
	}
}

func (n *Node) makeDevices() error {
	names := []string{PodA, PodB, Uplink, Tunnel}
	var script strings.Builder
	for i, d := range names {
		fmt.Fprintf(&script, "link add %s address %s type veth peer name peer%d\n", d, MACNode, i)
	}
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(script.String())
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip: %w: %s", err, out)
	}
	for _, d := range names {
		dev, err := net.InterfaceByName(d)
		if err != nil {
			return err
		}
		n.devices[d] = dev.Index
	}
	return nil
}

// Ifindex returns the number of a device.
func (n *Node) Ifindex(device string) int { return n.devices[device] }

func (n *Node) fill() {
	endpoints := n.Maps.Map("weft_endpoints")
	cache := ipcache.New(n.Maps)
	ctx := context.Background()
	for _, f := range Families {
		n.check(endpoints.Put(pin.KernelAddr{B: addr.To16(f.A)}, n.endpoint(PodA, IdentityA, MACA, HostMACA)), "endpoint")
		n.check(endpoints.Put(pin.KernelAddr{B: addr.To16(f.B)}, n.endpoint(PodB, IdentityB, MACB, HostMACB)), "endpoint")
		bits := 24
		if f.V6 {
			bits = 64
		}
		subnet := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, bits).Masked() }
		for p, e := range map[netip.Prefix]ipcache.Entry{
			addr.Host(f.Node):      {Identity: IdentityNode, Flags: ipcache.LocalNode},
			addr.Host(f.OtherNode): {Identity: IdentityRemoteNode, Flags: ipcache.RemoteNode, NextHop4: Families[0].OtherNode, NextHop6: Families[1].OtherNode},
			subnet(f.A):            {Identity: IdentityWorld, Flags: ipcache.LocalCIDR},
			subnet(f.RemotePod):    {Identity: IdentityRemotePods, Flags: ipcache.Pod, NextHop4: Families[0].OtherNode, NextHop6: Families[1].OtherNode},
			subnet(f.Excluded):     {Identity: IdentityWorld, Flags: ipcache.NoMasquerade},
		} {
			n.check(cache.Update(ctx, p, e), "ipcache")
		}
	}
}

func (n *Node) endpoint(device string, identity uint64, podMAC, hostMAC net.HardwareAddr) pin.KernelEndpoint {
	e := pin.KernelEndpoint{Ifindex: uint32(n.devices[device]), Identity: identity}
	copy(e.Mac[:], podMAC)
	copy(e.HostMac[:], hostMAC)
	return e
}

// Settings returns what programs are loaded with, for native routing.
func (n *Node) Settings() setting.Node {
	return setting.Node{
		UplinkIfindex: n.devices[Uplink], UplinkMTU: 1500, TunnelMTU: 1450, TunnelPort: 4789,
		IPv4: Families[0].Node, IPv6: Families[1].Node,
		Gateway4: Families[0].Gateway, Gateway6: Families[1].Gateway,
		Masquerade: true, FirstPort: 10000, LastPort: 19999, ServiceFirstPort: 20000, ServiceLastPort: 29999,
		Lifetimes: setting.Lifetimes{
			TCPSyn: time.Minute, TCPEstablished: 6 * time.Hour, TCPClosing: 10 * time.Second,
			UDP: time.Minute, UDPReplied: 3 * time.Minute, Other: 30 * time.Second,
		},
	}
}

// Reset empties what packets leave in the tables, and forgets events.
func (n *Node) Reset() {
	n.t.Helper()
	n.empty("weft_conntrack", "weft_nat", "weft_fragments", "weft_service_flows", "weft_affinity")
	n.Forget()
}

// Forget makes the counters and events so far the state that the next Step
// compares with; the tables keep what is in them.
func (n *Node) Forget() {
	n.t.Helper()
	n.drain()
	n.counters = n.readCounters()
}

// ForgetNextHops takes the address of the other node from the remote pods of f.
func (n *Node) ForgetNextHops(f Family) {
	n.t.Helper()
	bits := 24
	if f.V6 {
		bits = 64
	}
	e := ipcache.Entry{Identity: IdentityRemotePods, Flags: ipcache.Pod}
	n.check(ipcache.New(n.Maps).Update(context.Background(), netip.PrefixFrom(f.RemotePod, bits).Masked(), e), "ipcache")
}

// In is what a program is run on.
type In struct {
	Device  string
	Frame   []byte
	GSOSize int // L4 payload of each segment; 0: the skb is one packet
	Mark    uint32
}

// Out is what the program made of it.
type Out struct {
	Verdict int32
	Frame   []byte
	Mark    uint32
	Events  []pin.KernelEvent
}

// skbContext is struct __sk_buff of include/uapi/linux/bpf.h up to gso_size.
type skbContext struct {
	Len, PktType, Mark, QueueMapping, Protocol, VLANPresent, VLANTCI, VLANProto uint32
	Priority, IngressIfindex, Ifindex, TCIndex                                  uint32
	CB                                                                          [5]uint32
	Hash, TCClassID, Data, DataEnd, NAPIID, Family                              uint32
	Remote4, Local4                                                             uint32
	Remote6, Local6                                                             [4]uint32
	RemotePort, LocalPort, DataMeta                                             uint32
	FlowKeys, Tstamp                                                            uint64
	WireLen, GSOSegs                                                            uint32
	Sk                                                                          uint64
	GSOSize, _                                                                  uint32
}

// contextRoom is enough for the struct __sk_buff of any kernel.
const contextRoom = 256

const markOffset = 8

// Run runs a program on one packet.
func (n *Node) Run(prog *ebpf.Program, in In) Out {
	n.t.Helper()
	ctx := skbContext{Ifindex: uint32(n.devices[in.Device]), Mark: in.Mark, GSOSize: uint32(in.GSOSize)}
	if in.GSOSize > 0 {
		ctx.GSOSegs = uint32(len(in.Frame)/in.GSOSize + 1)
	}
	var (
		out    = Out{Frame: make([]byte, len(in.Frame)+256)}
		after  [contextRoom]byte
		result uint32
	)
	opts := &ebpf.RunOptions{Data: in.Frame, DataOut: out.Frame, Context: &ctx, ContextOut: after[:]}
	err := n.ns.Do(func() (err error) {
		result, err = prog.Run(opts)
		return err
	})
	n.check(err, "run "+prog.String())
	out.Verdict, out.Frame, out.Mark, out.Events = int32(result), opts.DataOut, binary.NativeEndian.Uint32(after[markOffset:]), n.drain()
	return out
}

// drain takes every event out of the ring.
func (n *Node) drain() []pin.KernelEvent {
	n.t.Helper()
	var events []pin.KernelEvent
	n.ring.SetDeadline(time.Unix(1, 0))
	for {
		r, err := n.ring.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return events
		}
		n.check(err, "read the ring")
		events = append(events, decodeEvent(r.RawSample))
	}
}

// Masquerade enters the connection of p, that of a pod to the outside, with
// port on the wire, last seen ago.
func (n *Node) Masquerade(p Packet, port uint16, ago time.Duration) {
	n.t.Helper()
	var ts unix.Timespec
	n.check(unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts), "read the clock")
	sport, dport := p.ports()
	remotePort := dport
	if p.Protocol == ICMP || p.Protocol == ICMPv6 {
		remotePort = 0
	}
	pod, remote := pin.KernelAddr{B: addr.To16(p.Src)}, pin.KernelAddr{B: addr.To16(p.Dst)}
	k := conntrack.Key(pod, remote, HostPort(sport), HostPort(dport), p.Protocol)
	e := pin.KernelCtEntry{
		Packets: [2]uint64{1, 0}, SrcIdentity: IdentityA, DstIdentity: IdentityWorld,
		LastSeen: uint32(ts.Sec) - uint32(ago/time.Second), LastReport: uint32(ts.Sec), NatPort: uint32(HostPort(port)),
	}
	if k.A == pod && k.A_port == HostPort(sport) {
		e.Flags = uint32(pin.KernelCtFlagCT_FROM_A)
	}
	n.check(n.Maps.Map("weft_conntrack").Put(&k, &e), "enter a connection")
	nk := pin.KernelNatKey{Remote: remote, RemotePort: HostPort(remotePort), NatPort: HostPort(port), Protocol: p.Protocol}
	n.check(n.Maps.Map("weft_nat").Put(&nk, &pin.KernelNatEntry{Pod: pod, PodPort: HostPort(sport)}), "enter a masqueraded connection")
}

// Do runs f on a thread that is in the node's namespace.
func (n *Node) Do(f func() error) {
	n.t.Helper()
	n.check(n.ns.Do(f), "in the node's namespace")
}

// Repeat runs a program on the same packet many times and leaves the events in
// the ring. It may run beside others.
func (n *Node) Repeat(prog *ebpf.Program, in In, times int) error {
	opts := &ebpf.RunOptions{Data: in.Frame, Context: &skbContext{Ifindex: uint32(n.devices[in.Device])}, Repeat: uint32(times)}
	return n.ns.Do(func() error {
		_, err := prog.Run(opts)
		return err
	})
}

// Time runs a program on one packet many times, each on what the one before
// left of it, and returns what one run takes.
func (n *Node) Time(prog *ebpf.Program, in In, times int) (each time.Duration) {
	opts := &ebpf.RunOptions{Data: in.Frame, Context: &skbContext{Ifindex: uint32(n.devices[in.Device])}, Repeat: uint32(times)}
	n.check(n.ns.Do(func() error {
		start := time.Now()
		_, err := prog.Run(opts)
		each = time.Since(start) / time.Duration(times)
		return err
	}), "time "+prog.String())
	return each
}
