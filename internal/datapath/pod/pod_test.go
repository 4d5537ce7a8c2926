// SPDX-License-Identifier: Apache-2.0

package pod

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// fresh is an endpoint that the fixture's tables do not have yet.
func (fix fixture) fresh(device string, last byte) *Endpoint {
	return &Endpoint{
		Device: device, Ifindex: fix.Ifindex(device), MAC: pt.MACA, HostMAC: pt.HostMACA, Identity: 500,
		IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 1, last}), netip.AddrFrom16([16]byte{0: 0xfd, 15: last})},
	}
}

func (fix fixture) attach(t *testing.T, ep *Endpoint) {
	t.Helper()
	fix.Do(func() error { return fix.Attach(ep) })
}

func (fix fixture) devices(t *testing.T) []string {
	t.Helper()
	got, err := fix.Maps.Attachments()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, a := range got {
		out = append(out, a.Device+" "+a.Hook+" "+a.Program)
	}
	return out
}

func (fix fixture) known(t *testing.T, ep *Endpoint) (n int) {
	t.Helper()
	for _, a := range ep.IPs {
		var v pin.KernelEndpoint
		if fix.endpoints.Lookup(kernelAddr(a), &v) == nil && int(v.Ifindex) == ep.Ifindex {
			n++
		}
	}
	return n
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestAttachDetach(t *testing.T) {
	fix := newFixture(t, nil)
	ep := fix.fresh(pt.PodA, 50)
	if err := fix.Attached(ep); err == nil {
		t.Error("a pod that never was is attached")
	}
	fix.attach(t, ep)
	must(t, fix.Attached(ep))
	want := []string{"wf-a egress to_pod", "wf-a ingress from_pod"}
	if got := fix.devices(t); !slices.Equal(got, want) {
		t.Errorf("attached: %v, want %v", got, want)
	}
	ep.Identity = 501
	fix.attach(t, ep)
	var v pin.KernelEndpoint
	must(t, fix.endpoints.Lookup(kernelAddr(ep.IPs[1]), &v))
	if v.Identity != 501 {
		t.Errorf("identity %d after a change to 501", v.Identity)
	}
	for range 2 {
		must(t, fix.Detach(ep))
	}
	if err := fix.Attached(ep); err == nil || fix.known(t, ep) != 0 || len(fix.devices(t)) != 0 {
		t.Errorf("after Detach: %v, %d addresses, programs %v", err, fix.known(t, ep), fix.devices(t))
	}
}

// TestDetachLeavesSuccessor: the address has a new owner when the late DEL of
// the old one comes.
func TestDetachLeavesSuccessor(t *testing.T) {
	fix := newFixture(t, nil)
	old, next := fix.fresh(pt.PodA, 50), fix.fresh(pt.PodB, 50)
	fix.attach(t, old)
	fix.attach(t, next)
	if err := fix.Attached(old); err == nil || !strings.Contains(err.Error(), "belongs to device") {
		t.Errorf("the old pod: %v", err)
	}
	must(t, fix.Detach(old))
	must(t, fix.Attached(next))
}

func TestAttachRefusesWrongMAC(t *testing.T) {
	fix := newFixture(t, nil)
	ep := fix.fresh(pt.PodA, 50)
	ep.MAC = net.HardwareAddr{1, 2, 3}
	if err := fix.Attach(ep); err == nil || fix.known(t, ep) != 0 {
		t.Errorf("MAC %s: %v, %d addresses known", ep.MAC, err, fix.known(t, ep))
	}
}

func TestPrune(t *testing.T) {
	fix := newFixture(t, nil)
	kept, gone := fix.fresh(pt.PodA, 50), fix.fresh(pt.PodB, 51)
	fix.attach(t, kept)
	fix.attach(t, gone)
	for range 2 {
		must(t, fix.Prune([]*Endpoint{kept}))
	}
	must(t, fix.Attached(kept))
	if fix.known(t, gone) != 0 || len(fix.devices(t)) != 2 {
		t.Errorf("%d addresses of the pruned pod are known; attached: %v", fix.known(t, gone), fix.devices(t))
	}
	must(t, fix.Prune(nil))
	if fix.known(t, kept) != 0 || len(fix.devices(t)) != 0 {
		t.Errorf("after pruning everything: %d addresses, attached %v", fix.known(t, kept), fix.devices(t))
	}
}

func TestNoLeaks(t *testing.T) {
	fix := newFixture(t, nil)
	ep := fix.fresh(pt.PodA, 50)
	before := len(bpffs.Descriptors(t))
	d, err := Load(fix.Maps, fix.Settings())
	must(t, err)
	fixture{fix.Node, d}.attach(t, ep)
	must(t, d.Attached(ep))
	must(t, d.Detach(ep))
	must(t, d.Prune(nil))
	must(t, d.Close())
	if after := len(bpffs.Descriptors(t)); after != before {
		t.Errorf("%d open BPF objects, %d before", after, before)
	}
}
