// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

var lifetimes = setting.Lifetimes{
	TCPSyn: 100 * time.Second, TCPEstablished: 200 * time.Second, TCPClosing: 300 * time.Second,
	UDP: 400 * time.Second, UDPReplied: 500 * time.Second, Other: 600 * time.Second,
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newCollector(t *testing.T, entries int) (*Collector, *pin.Maps) {
	t.Helper()
	m, err := pin.Open(filepath.Join(bpffs.New(t), "node"), pin.Sizes{Conntrack: entries, NAT: entries, Events: 256 << 10})
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return New(m, lifetimes, slog.New(slog.DiscardHandler)), m
}

func kernelAddr(s string) pin.KernelAddr {
	return pin.KernelAddr{B: addr.To16(netip.MustParseAddr(s))}
}

func now(t *testing.T) uint32 {
	t.Helper()
	n, err := monotonicSeconds()
	must(t, err)
	return n
}

func exists(t *testing.T, m *ebpf.Map, key any) bool {
	t.Helper()
	value := make([]byte, m.ValueSize())
	return m.Lookup(key, &value) == nil
}

// TestCollect: the collector deletes what the datapath takes for expired, and
// nothing else. The datapath's side of this table is TestExpiry of package pod.
func TestCollect(t *testing.T) {
	const (
		replied     = uint32(pin.KernelCtFlagCT_REPLIED)
		established = uint32(pin.KernelCtFlagCT_ESTABLISHED)
		fin         = uint32(pin.KernelCtFlagCT_FIN_ORIG)
		finReply    = uint32(pin.KernelCtFlagCT_FIN_REPLY)
		rst         = uint32(pin.KernelCtFlagCT_RST)
	)
	for _, ends := range [][2]string{{"10.244.1.5", "198.51.100.7"}, {"fd00:10:244:1::5", "2001:db8::7"}} {
		for _, c := range []struct {
			name     string
			protocol uint8
			flags    uint32
			want     time.Duration
		}{
			{"TCP SYN", unix.IPPROTO_TCP, 0, lifetimes.TCPSyn},
			{"TCP handshake", unix.IPPROTO_TCP, replied, lifetimes.TCPSyn},
			{"TCP established", unix.IPPROTO_TCP, replied | established, lifetimes.TCPEstablished},
			{"TCP half closed", unix.IPPROTO_TCP, established | fin, lifetimes.TCPEstablished},
			{"TCP half closed by the responder", unix.IPPROTO_TCP, established | finReply, lifetimes.TCPEstablished},
			{"TCP closed", unix.IPPROTO_TCP, established | fin | finReply, lifetimes.TCPClosing},
			{"TCP reset", unix.IPPROTO_TCP, established | rst, lifetimes.TCPClosing},
			{"UDP", unix.IPPROTO_UDP, 0, lifetimes.UDP},
			{"UDP replied", unix.IPPROTO_UDP, replied, lifetimes.UDPReplied},
			{"ICMP", unix.IPPROTO_ICMP, replied, lifetimes.Other},
			{"ICMPv6", unix.IPPROTO_ICMPV6, 0, lifetimes.Other},
			{"SCTP", unix.IPPROTO_SCTP, established, lifetimes.Other},
		} {
			t.Run(c.name+" "+ends[0], func(t *testing.T) {
				col, m := newCollector(t, 16)
				ct := m.Map("weft_conntrack")
				seconds := uint32(c.want / time.Second)
				key := func(port uint16) pin.KernelCtKey {
					return Key(kernelAddr(ends[0]), kernelAddr(ends[1]), port, 80, c.protocol)
				}
				kept, expired, ahead := key(1), key(2), key(3)
				must(t, ct.Put(&kept, &pin.KernelCtEntry{Flags: c.flags, LastSeen: now(t) - seconds + 5}))
				must(t, ct.Put(&expired, &pin.KernelCtEntry{Flags: c.flags, LastSeen: now(t) - seconds - 5}))
				// another CPU's clock may be a second ahead
				must(t, ct.Put(&ahead, &pin.KernelCtEntry{Flags: c.flags, LastSeen: now(t) + 5}))
				must(t, col.Collect())
				if !exists(t, ct, &kept) || exists(t, ct, &expired) || !exists(t, ct, &ahead) {
					t.Errorf("kept %t, expired %t, ahead %t: want true, false, true", exists(t, ct, &kept), exists(t, ct, &expired), exists(t, ct, &ahead))
				}
				if s := col.Stats(); s != (Stats{Live: 2, Deleted: 1}) {
					t.Errorf("stats %+v", s)
				}
			})
		}
	}
}

// TestCollectMany: more than a batch, all of them gone at once.
func TestCollectMany(t *testing.T) {
	const n = 2*batch + 100
	col, m := newCollector(t, 3*batch)
	ct := m.Map("weft_conntrack")
	for i := range n {
		k := Key(kernelAddr("10.244.1.5"), kernelAddr("10.244.1.6"), uint16(i), 80, unix.IPPROTO_UDP)
		e := pin.KernelCtEntry{LastSeen: now(t)}
		if i%2 == 0 {
			e.LastSeen -= 1000
		}
		must(t, ct.Put(&k, &e))
	}
	must(t, col.Collect())
	if s := col.Stats(); s != (Stats{Live: n / 2, Deleted: n / 2}) {
		t.Errorf("stats %+v, want %d live and as many deleted", s, n/2)
	}
}

// masquerade enters a connection that has natPort on the wire, and the way back.
func masquerade(t *testing.T, m *pin.Maps, protocol uint8, ctPort, natPort uint16) (pin.KernelCtKey, pin.KernelNatKey) {
	t.Helper()
	pod, remote := kernelAddr("10.244.1.5"), kernelAddr("198.51.100.7")
	podPort, remotePort := uint16(1000), uint16(53)
	nk := pin.KernelNatKey{Remote: remote, RemotePort: remotePort, NatPort: natPort, Protocol: protocol}
	if protocol == unix.IPPROTO_ICMP || protocol == unix.IPPROTO_ICMPV6 {
		remotePort, nk.RemotePort = podPort, 0
	}
	k := Key(pod, remote, podPort, remotePort, protocol)
	must(t, m.Map("weft_conntrack").Put(&k, &pin.KernelCtEntry{LastSeen: now(t), NatPort: uint32(ctPort)}))
	must(t, m.Map("weft_nat").Put(&nk, &pin.KernelNatEntry{Pod: pod, PodPort: podPort}))
	return k, nk
}

func TestCollectMasqueraded(t *testing.T) {
	for name, protocol := range map[string]uint8{"TCP": unix.IPPROTO_TCP, "UDP": unix.IPPROTO_UDP, "ICMP": unix.IPPROTO_ICMP, "ICMPv6": unix.IPPROTO_ICMPV6} {
		t.Run(name, func(t *testing.T) {
			col, m := newCollector(t, 16)
			nat := m.Map("weft_nat")
			ck, nk := masquerade(t, m, protocol, 7, 7)
			for range 3 {
				must(t, col.Collect())
			}
			if !exists(t, nat, &nk) {
				t.Fatal("an entry in use was deleted")
			}
			// a port that was taken twice at the same time: one is of no use
			_, orphan := masquerade(t, m, protocol, 7, 8)
			must(t, col.Collect())
			if !exists(t, nat, &orphan) {
				t.Error("an orphan was deleted at once: its connection may be about to have its port")
			}
			must(t, col.Collect())
			if exists(t, nat, &orphan) || !exists(t, nat, &nk) {
				t.Errorf("after two passes the orphan is there: %t, the other: %t", exists(t, nat, &orphan), exists(t, nat, &nk))
			}
			must(t, m.Map("weft_conntrack").Delete(&ck))
			must(t, col.Collect())
			must(t, col.Collect())
			if exists(t, nat, &nk) {
				t.Error("the entry of a connection that is over is still there")
			}
			if s := col.Stats(); s.NAT != 0 || s.Deleted != 2 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

func TestOrphanThatGetsItsConnection(t *testing.T) {
	col, m := newCollector(t, 16)
	_, nk := masquerade(t, m, unix.IPPROTO_UDP, 0, 7) // taken, not yet written to the connection
	must(t, col.Collect())
	masquerade(t, m, unix.IPPROTO_UDP, 7, 7)
	must(t, col.Collect())
	must(t, col.Collect())
	if !exists(t, m.Map("weft_nat"), &nk) {
		t.Error("the entry was deleted")
	}
}

func TestRunEnds(t *testing.T) {
	col, _ := newCollector(t, 16)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- col.Run(ctx) }()
	cancel()
	select {
	case err := <-done:
		must(t, err)
	case <-time.After(10 * time.Second):
		t.Fatal("Run goes on after its context has ended")
	}
}

func TestInterval(t *testing.T) {
	col, _ := newCollector(t, 100)
	for live, want := range map[uint64]time.Duration{0: maxInterval, 100: minInterval, 50: minInterval + (maxInterval-minInterval)/16} {
		col.live.Store(live)
		if got := col.interval(); got.Round(time.Millisecond) != want.Round(time.Millisecond) {
			t.Errorf("%d of 100 live: %v between passes, want %v", live, got, want)
		}
	}
}

// TestQuota: the datapath only counts up; a pass sets what is true, and forgets
// addresses that are no pod's any more.
func TestQuota(t *testing.T) {
	col, maps := newCollector(t, 64)
	pod, other, gone := kernelAddr("10.244.1.5"), kernelAddr("8.8.8.8"), kernelAddr("10.244.1.9")
	must(t, maps.Map("weft_endpoints").Put(pod, pin.KernelEndpoint{Ifindex: 1}))
	for port := range uint16(3) {
		k := Key(pod, other, 1000+port, 80, unix.IPPROTO_TCP)
		e := pin.KernelCtEntry{LastSeen: now(t)}
		e.Flags = uint32(pin.KernelCtFlagCT_OWNED_ORIG)
		if k.A == pod {
			e.Flags |= uint32(pin.KernelCtFlagCT_FROM_A)
		}
		if port == 2 { // stays for late packets only
			e.Flags |= uint32(pin.KernelCtFlagCT_CLOSED)
		}
		must(t, maps.Map("weft_conntrack").Put(k, e))
	}
	must(t, maps.Map("weft_quota").Put(pod, uint64(77)))
	must(t, maps.Map("weft_quota").Put(gone, uint64(5)))
	must(t, col.Collect())
	var n uint64
	must(t, maps.Map("weft_quota").Lookup(pod, &n))
	if n != 2 {
		t.Errorf("quota of the pod: %d, want 2", n)
	}
	for _, a := range []pin.KernelAddr{gone, other} {
		if err := maps.Map("weft_quota").Lookup(a, &n); err == nil {
			t.Errorf("an address that is no pod's has a quota of %d", n)
		}
	}
}
