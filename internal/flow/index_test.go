// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/event"
	"github.com/weft-mesh/weft/internal/state"
)

// cluster is tables that a test changes, an index on them and a clock.
type cluster struct {
	t     testing.TB
	db    *state.Tables
	index *index
	clock time.Time
}

func newCluster(t testing.TB) *cluster {
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, db: tables, clock: time.Unix(5000, 0)}
	c.node("node1", "172.30.0.1", "10.244.1.0/24")
	c.node("node2", "172.30.0.2", "10.244.2.0/24")
	c.index, err = newIndex("node1", tables, func() time.Time { return c.clock })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.index.close)
	return c
}

func (c *cluster) node(name, ip, cidr string) {
	txn := c.db.DB.WriteTxn(c.db.Nodes)
	c.db.Nodes.Insert(txn, &state.Node{Name: name, IPs: []netip.Addr{netip.MustParseAddr(ip)}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix(cidr)}})
	txn.Commit()
}

func (c *cluster) workload(w *state.Workload) {
	txn := c.db.DB.WriteTxn(c.db.Workloads)
	c.db.Workloads.Insert(txn, w)
	txn.Commit()
}

func (c *cluster) pod(p *state.Pod) {
	txn := c.db.DB.WriteTxn(c.db.Pods)
	c.db.Pods.Insert(txn, p)
	txn.Commit()
}

func (c *cluster) unpod(p *state.Pod) {
	txn := c.db.DB.WriteTxn(c.db.Pods)
	c.db.Pods.Delete(txn, p)
	txn.Commit()
}

// who is "KIND" or "KIND NS/NAME app=LABEL".
func (c *cluster) who(ip string) string {
	c.index.refresh()
	e := c.index.lookup(netip.MustParseAddr(ip))
	if e.ip != netip.MustParseAddr(ip).Unmap().String() {
		c.t.Errorf("lookup of %s is about %s", ip, e.ip)
	}
	if e.pod == "" {
		return e.kind
	}
	return fmt.Sprintf("%s %s/%s app=%s", e.kind, e.namespace, e.pod, e.labels["app"])
}

func (c *cluster) want(ip, want string) {
	c.t.Helper()
	if got := c.who(ip); got != want {
		c.t.Errorf("%s is %q, want %q", ip, got, want)
	}
}

func TestIndexFollowsTheTables(t *testing.T) {
	c := newCluster(t)
	ip := []netip.Addr{netip.MustParseAddr("10.244.1.5")}
	app := func(s string) map[string]string { return map[string]string{"app": s} }

	c.want("172.30.0.1", "node")
	c.want("10.244.1.1", "node")
	c.want("10.244.2.1", "remote-node")
	c.want("::ffff:172.30.0.2", "remote-node")
	c.want("8.8.8.8", "world")
	c.want("10.244.1.5", "unknown")
	c.want("224.0.0.1", "unknown")
	c.want("fe80::1", "unknown")

	local := &state.Pod{ContainerID: "c1", Namespace: "shop", Name: "web", IPs: ip, Interface: "wf01", Ifindex: 12}
	c.pod(local)
	c.want("10.244.1.5", "pod shop/web app=")
	c.workload(&state.Workload{Namespace: "shop", Name: "web", Node: "node1", Labels: app("a")})
	c.want("10.244.1.5", "pod shop/web app=a")
	c.workload(&state.Workload{Namespace: "shop", Name: "web", Node: "node1", IPs: ip, Labels: app("b")})
	c.want("10.244.1.5", "pod shop/web app=b")
	if c.index.devices[12].name != "wf01" {
		t.Errorf("device of the pod: %v", c.index.devices)
	}

	c.workload(&state.Workload{Namespace: "shop", Name: "host", HostNetwork: true, IPs: []netip.Addr{netip.MustParseAddr("172.30.0.2")}})
	c.want("172.30.0.2", "remote-node")

	remote := []netip.Addr{netip.MustParseAddr("10.244.2.9")}
	c.workload(&state.Workload{Namespace: "jobs", Name: "new", IPs: remote, Phase: "Running", Labels: app("n")})
	c.workload(&state.Workload{Namespace: "jobs", Name: "old", IPs: remote, Phase: "Succeeded", Labels: app("o")})
	c.want("10.244.2.9", "pod jobs/new app=n")

	c.unpod(local)
	c.want("10.244.1.5", "pod shop/web app=b") // by its workload
	if len(c.index.devices) != 0 || len(c.index.localByName) != 0 {
		t.Errorf("left of a pod that is gone: %v %v", c.index.devices, c.index.localByName)
	}
	c.workload(&state.Workload{Namespace: "shop", Name: "web"})
	c.index.refresh()
	c.clock = c.clock.Add(remember - time.Second)
	c.want("10.244.1.5", "pod shop/web app=b") // still remembered
	c.clock = c.clock.Add(2 * time.Second)
	c.want("10.244.1.5", "unknown")
	c.node("node3", "172.30.0.3", "10.244.3.0/24")
	c.index.refresh()
	if len(c.index.gone) != 0 {
		t.Errorf("still remembered: %v", c.index.gone)
	}
}

func TestDecode(t *testing.T) {
	c := newCluster(t)
	c.pod(&state.Pod{ContainerID: "c1", Namespace: "shop", Name: "web", IPs: []netip.Addr{netip.MustParseAddr("10.244.1.5")}, Interface: "wf01", Ifindex: 12})
	c.workload(&state.Workload{Namespace: "shop", Name: "web", Labels: map[string]string{"app": "web"}})
	c.index.refresh()
	calls := 0
	d := newDecoder("node1", c.index, func(i uint32) string { calls++; return fmt.Sprint("eth", i) }, func(n uint32) string { return fmt.Sprint("rule ", n) })
	base := event.Record{
		Type: event.TypeDrop, Direction: event.DirectionEgress, Reason: "spoofed-address", CPU: 1, Sequence: 42,
		Time: time.Unix(10, 20), Protocol: 6, Ifindex: 12, TCPFlags: 0x12, Packets: 1, Bytes: 74,
		Source: netip.MustParseAddrPort("10.244.1.5:40000"), Destination: netip.MustParseAddrPort("8.8.8.8:53"),
		SourceIdentity: 256, DestinationIdentity: 2,
	}
	want := func() *weftv1.Flow {
		return &weftv1.Flow{
			Time: &timestamppb.Timestamp{Seconds: 10, Nanos: 20}, Node: "node1", Type: weftv1.FlowType_FLOW_TYPE_DROP,
			Verdict: weftv1.Verdict_VERDICT_DROPPED, Reason: "spoofed-address", Protocol: "TCP", Direction: "egress",
			TcpFlags: "SYN,ACK", Packets: 1, Bytes: 74, Cpu: 1, Sequence: 42, Device: "wf01", DevicePod: "shop/web",
			Source:      &weftv1.FlowEndpoint{Ip: "10.244.1.5", Port: 40000, Identity: 256, Namespace: "shop", Pod: "web", Kind: "pod", Labels: map[string]string{"app": "web"}},
			Destination: &weftv1.FlowEndpoint{Ip: "8.8.8.8", Port: 53, Identity: 2, Kind: "world"},
		}
	}
	for _, x := range []struct {
		name   string
		record func(*event.Record)
		flow   func(*weftv1.Flow)
	}{
		{"a dropped TCP packet", func(*event.Record) {}, func(*weftv1.Flow) {}},
		{"a new connection has no reason", func(r *event.Record) { r.Type = event.TypeNew }, func(f *weftv1.Flow) {
			f.Type, f.Verdict, f.Reason = weftv1.FlowType_FLOW_TYPE_NEW, weftv1.Verdict_VERDICT_FORWARDED, ""
		}},
		{"ingress", func(r *event.Record) { r.Direction = event.DirectionIngress }, func(f *weftv1.Flow) { f.Direction = "ingress" }},
		{"UDP has no flags", func(r *event.Record) { r.Protocol = 17 }, func(f *weftv1.Flow) { f.Protocol, f.TcpFlags = "UDP", "" }},
		{"ICMPv6", func(r *event.Record) { r.Protocol, r.ICMPType, r.ICMPCode = 58, 2, 1 }, func(f *weftv1.Flow) {
			f.Protocol, f.TcpFlags, f.IcmpType, f.IcmpCode = "ICMPv6", "", 2, 1
		}},
		{"a protocol without a name", func(r *event.Record) { r.Protocol = 132 }, func(f *weftv1.Flow) { f.Protocol, f.TcpFlags = "132", "" }},
		{"a rule of policy", func(r *event.Record) { r.Reason, r.Rule = "policy", 7 }, func(f *weftv1.Flow) {
			f.Reason, f.Policy = "policy", "rule 7"
		}},
		{"the uplink", func(r *event.Record) { r.Ifindex = 3 }, func(f *weftv1.Flow) { f.Device, f.DevicePod = "eth3", "" }},
		{"the uplink again, from the cache", func(r *event.Record) { r.Ifindex = 3 }, func(f *weftv1.Flow) { f.Device, f.DevicePod = "eth3", "" }},
		{"no device", func(r *event.Record) { r.Ifindex = 0 }, func(f *weftv1.Flow) { f.Device, f.DevicePod = "", "" }},
	} {
		r, w := base, want()
		x.record(&r)
		x.flow(w)
		if diff := cmp.Diff(w, d.decode(&r).GetFlow(), protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", x.name, diff)
		}
	}
	if calls != 1 {
		t.Errorf("%d calls for a device name, want 1", calls)
	}
}

func BenchmarkDecode(b *testing.B) {
	c := newCluster(b)
	for n := range 200 {
		ip := netip.AddrFrom4([4]byte{10, 244, 1, byte(n + 2)})
		c.pod(&state.Pod{ContainerID: fmt.Sprint(n), Namespace: "shop", Name: fmt.Sprint("web", n), IPs: []netip.Addr{ip}, Ifindex: 100 + n, Interface: "wf"})
		c.workload(&state.Workload{Namespace: "far", Name: fmt.Sprint("db", n), IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 2, byte(n + 2)})}, Labels: map[string]string{"app": "db"}})
	}
	c.index.refresh()
	d := newDecoder("node1", c.index, func(uint32) string { return "eth0" }, nil)
	for _, to := range []string{"10.244.2.7:80", "8.8.8.8:53"} {
		b.Run(to, func(b *testing.B) {
			r := tcpRecord()
			r.Destination = netip.MustParseAddrPort(to)
			b.ReportAllocs()
			for b.Loop() {
				d.decode(&r)
			}
		})
	}
}

// BenchmarkEvent is all that an event costs: account, decode, keep, and match
// against four clients' filters.
func BenchmarkEvent(b *testing.B) {
	p := &pipe{}
	cfg := config()
	cfg.Keep, cfg.MaxClients = 16384, 4
	o := newObserver(b, cfg, p)
	x, err := newIndex("node1", o.tables, time.Now)
	if err != nil {
		b.Fatal(err)
	}
	defer x.close()
	for range 4 {
		if _, _, err := o.join(&filter{from: []podRef{{"a", "b"}}}, true); err != nil {
			b.Fatal(err)
		}
	}
	r := &reader{Observer: o, index: x, decoder: newDecoder("node1", x, nil, nil), ledger: newLedger(nil, nil), record: tcpRecord()}
	b.ReportAllocs()
	for b.Loop() {
		x.refresh()
		if err := r.event(); err != nil {
			b.Fatal(err)
		}
		r.record.Sequence++
	}
}
