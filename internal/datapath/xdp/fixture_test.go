// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weft-mesh/weft/internal/addr"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/reason"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// Verdicts of XDP.
const (
	drop = 1
	pass = 2
	tx   = 3
)

const (
	nodePort    = 30080
	backendPort = 8080
	natPort     = 25000 // the only one that the node has for clients from outside
	external    = uint32(pin.KernelServiceFlagSERVICE_EXTERNAL)
)

// flowFlags in the order in which flows lists them.
var flowFlags = []struct {
	flag pin.KernelServiceFlowFlag
	name string
}{
	{pin.KernelServiceFlowFlagFLOW_REPLY, "reply"}, {pin.KernelServiceFlowFlagFLOW_SNAT, "snat"}, {pin.KernelServiceFlowFlagFLOW_DSR, "dsr"},
	{pin.KernelServiceFlowFlagFLOW_HAIRPIN, "hairpin"}, {pin.KernelServiceFlowFlagFLOW_FIN, "fin"}, {pin.KernelServiceFlowFlagFLOW_RST, "rst"},
	{pin.KernelServiceFlowFlagFLOW_FIN_BACK, "fin-back"}, {pin.KernelServiceFlowFlagFLOW_RST_BACK, "rst-back"},
	{pin.KernelServiceFlowFlagFLOW_ANSWERED, "answered"}, {pin.KernelServiceFlowFlagFLOW_ESTABLISHED, "established"},
	{pin.KernelServiceFlowFlagFLOW_FAR, "far"},
}

type fixture struct {
	testing.TB
	*pt.Node
	*Datapath
}

func newFixture(t testing.TB, change func(*setting.Node)) *fixture {
	t.Helper()
	sizes := pt.Sizes()
	sizes.Services, sizes.Slots, sizes.Backends, sizes.ServiceFlows, sizes.Denied, sizes.Neighbors = 256, 1024, 512, 512, 16, 64
	n := pt.New(t, sizes)
	return &fixture{t, n, load(t, n, change)}
}

func load(t testing.TB, n *pt.Node, change func(*setting.Node)) *Datapath {
	t.Helper()
	s := n.Settings()
	s.ServiceFirstPort, s.ServiceLastPort = natPort, natPort
	if change != nil {
		change(&s)
	}
	d, err := Load(n.Maps, s, Device{Name: pt.Uplink, Ifindex: n.Ifindex(pt.Uplink), MAC: pt.MACNode})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) put(m string, key, value any) {
	f.Helper()
	if err := f.Maps.Map(m).Put(key, value); err != nil {
		f.Fatalf("put into %s: %v", m, err)
	}
}

// frontend is a service as the maps have it.
type frontend struct {
	addr     netip.Addr
	port     uint16
	protocol uint8
	id       uint32 // also of its far set; its backends have numbers from 10 × id
	flags    uint32
	backends []netip.AddrPort
}

func (f *fixture) service(s frontend) {
	f.Helper()
	v := pin.KernelService{Id: s.id, Flags: s.flags}
	v.Far.Id, v.Far.Count = s.id, uint32(len(s.backends))
	for i, b := range s.backends {
		number := 10*s.id + uint32(i)
		f.put("weft_backends", number, &pin.KernelBackend{Addr: pin.KernelAddr{B: addr.To16(b.Addr())}, Port: pt.HostPort(b.Port()), Protocol: s.protocol})
		f.put("weft_slots", &pin.KernelSlotKey{Set: s.id, Slot: uint32(i)}, number)
	}
	f.put("weft_services", &pin.KernelServiceKey{Addr: pin.KernelAddr{B: addr.To16(s.addr)}, Port: pt.HostPort(s.port), Protocol: s.protocol}, &v)
}

func (f *fixture) neighbor(a netip.Addr, mac []byte) {
	f.Helper()
	f.put("weft_neighbors", &pin.KernelAddr{B: addr.To16(a)}, &pin.KernelNeighbor{Mac: [6]byte(mac)})
}

// nodePorts enters what most tests use: a node port of each family and protocol
// with one backend on the other node.
func (f *fixture) nodePorts() {
	f.Helper()
	id := uint32(1)
	for _, fam := range pt.Families {
		f.neighbor(fam.OtherNode, pt.MACOther)
		for _, protocol := range []uint8{pt.TCP, pt.UDP} {
			f.service(frontend{fam.Node, nodePort, protocol, id, external, []netip.AddrPort{netip.AddrPortFrom(fam.RemotePod, backendPort)}})
			id++
		}
	}
}

func (f *fixture) clear(maps ...string) {
	f.Helper()
	for _, name := range maps {
		m := f.Maps.Map(name)
		key := make([]byte, m.KeySize())
		for m.NextKey(nil, &key) == nil {
			f.must(m.Delete(key))
		}
	}
}

// reset puts the services back to what nodePorts made, with no flows.
func (f *fixture) reset() {
	f.Helper()
	f.clear("weft_service_flows", "weft_services", "weft_slots", "weft_backends", "weft_neighbors", "weft_source_ranges", "weft_deny", "weft_affinity", "weft_conntrack")
	f.nodePorts()
}

type flow struct {
	key   pin.KernelFlowKey
	value pin.KernelServiceFlow
}

func (f *fixture) rawFlows() (out []flow) {
	f.Helper()
	var x flow
	rows := f.Maps.Map("weft_service_flows").Iterate()
	for rows.Next(&x.key, &x.value) {
		out = append(out, x)
	}
	f.must(rows.Err())
	return out
}

func end(a pin.KernelAddr, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(addr.From16(a.B), pt.HostPort(port))
}

// flows lists the flows as "udp CLIENT>FRONTEND = NODE>BACKEND snat", sorted.
func (f *fixture) flows() (out []string) {
	f.Helper()
	for _, x := range f.rawFlows() {
		s := fmt.Sprintf("%s %s>%s = %s>%s", map[uint8]string{pt.TCP: "tcp", pt.UDP: "udp"}[x.key.Protocol],
			end(x.key.Src, x.key.Sport), end(x.key.Dst, x.key.Dport), end(x.value.Src, x.value.Sport), end(x.value.Dst, x.value.Dport))
		for _, n := range flowFlags {
			if x.value.Flags&uint32(n.flag) != 0 {
				s += " " + n.name
			}
		}
		out = append(out, s)
	}
	slices.Sort(out)
	return out
}

func (f *fixture) hits() (n uint64) {
	f.Helper()
	var k uint32
	var b pin.KernelBackend
	rows := f.Maps.Map("weft_backends").Iterate()
	for rows.Next(&k, &b) {
		n += b.Hits
	}
	f.must(rows.Err())
	return n
}

func (f *fixture) counters() map[string]pt.Count {
	f.Helper()
	rows, err := reason.Counts(f.Maps)
	f.must(err)
	out := map[string]pt.Count{}
	for _, r := range rows {
		out[reason.Name(r.Reason)] = pt.Count{Packets: r.Packets, Bytes: r.Bytes}
	}
	return out
}

func (f *fixture) run(prog *ebpf.Program, frame []byte) (uint32, []byte) {
	f.Helper()
	opts := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)}
	verdict, err := prog.Run(opts)
	f.must(err)
	return verdict, opts.DataOut
}

// step runs the program on one frame and compares the verdict, the frame
// afterwards (nil: as it was) and what was counted (empty: nothing).
func (f *fixture) step(t testing.TB, in []byte, verdict uint32, out []byte, counted string) {
	t.Helper()
	before := f.counters()
	got, frame := f.run(f.objects.FromWire, in)
	if got != verdict {
		t.Errorf("verdict %d, want %d", got, verdict)
	}
	if out == nil {
		out = in
	}
	if !bytes.Equal(out, frame) {
		t.Errorf("frame (-want +got):\n%s", cmp.Diff(hex.Dump(out), hex.Dump(frame)))
	}
	want := map[string]pt.Count{}
	if counted != "" {
		want[counted] = pt.Count{Packets: 1, Bytes: uint64(len(in))}
	}
	diff := map[string]pt.Count{}
	for name, c := range f.counters() {
		if b := before[name]; b != c {
			diff[name] = pt.Count{Packets: c.Packets - b.Packets, Bytes: c.Bytes - b.Bytes}
		}
	}
	if d := cmp.Diff(want, diff, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("counters (-want +got):\n%s", d)
	}
}

func each(t *testing.T, f func(*testing.T, pt.Family, uint8)) {
	for _, fam := range pt.Families {
		for _, p := range []struct {
			name     string
			protocol uint8
		}{{"TCP", pt.TCP}, {"UDP", pt.UDP}} {
			t.Run(fam.Name+"/"+p.name, func(t *testing.T) { f(t, fam, p.protocol) })
		}
	}
}

// request is the good packet: a client outside asks a node port.
func request(f pt.Family, protocol uint8) pt.Packet {
	p := pt.Packet{
		EthSrc: pt.MACB, EthDst: pt.MACNode, Src: f.World, Dst: f.Node, TTL: 64, DF: true,
		Protocol: protocol, Sport: 40000, Dport: nodePort, Payload: []byte("who is there"),
	}
	if protocol == pt.TCP {
		p.Flags = pt.SYN
	}
	return p
}

// forwarded is the request on its way to the backend.
func forwarded(f pt.Family, p pt.Packet) pt.Packet {
	p.EthSrc, p.EthDst = pt.MACNode, pt.MACOther
	p.Src, p.Dst, p.Sport, p.Dport = f.Node, f.RemotePod, natPort, backendPort
	p.TTL--
	return p
}

// answer is what the backend sends to a forwarded packet.
func answer(p pt.Packet) pt.Packet {
	r := p.Reply()
	r.EthSrc, r.EthDst, r.TTL, r.Payload = pt.MACOther, pt.MACNode, 63, []byte("me, and my answer is odd.")
	if r.Protocol == pt.TCP {
		r.Flags = pt.SYN | pt.ACK
	}
	return r
}

// answered is an answer on its way to the client.
func answered(f pt.Family, r pt.Packet) pt.Packet {
	r.EthSrc, r.EthDst = pt.MACNode, pt.MACB
	r.Src, r.Dst, r.Sport, r.Dport = f.Node, f.World, nodePort, 40000
	r.TTL--
	return r
}

// asUint32s returns 16 bytes as the words of a key.
func asUint32s(b [16]byte) [4]uint32 { return *(*[4]uint32)(unsafe.Pointer(&b)) }
