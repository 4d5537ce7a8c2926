// SPDX-License-Identifier: Apache-2.0

package setting

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// load returns the object that has every variable, as it includes all headers.
func load(t *testing.T) *ebpf.CollectionSpec {
	t.Helper()
	spec, err := pin.LoadKernel()
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

// TestNames: a name that C does not have would be ignored without a word.
func TestNames(t *testing.T) {
	spec := load(t)
	set := Node{}.variables()
	for name := range set {
		if spec.Variables[name] == nil {
			t.Errorf("setting %s is no variable of bpf/lib", name)
		}
	}
	for name := range spec.Variables {
		if _, ok := set[name]; !ok && name != "LICENSE" && !strings.HasPrefix(name, "unused_") {
			t.Errorf("variable %s of bpf/lib is never set", name)
		}
	}
}

func TestApply(t *testing.T) {
	spec := load(t)
	n := Node{
		UplinkIfindex: 7, UplinkMTU: 9000, IPv4: netip.MustParseAddr("172.30.0.1"), Masquerade: true,
		FirstPort: 10000, LastPort: 10001, Lifetimes: Lifetimes{UDP: 90 * time.Second}, ReportInterval: 5 * time.Second,
	}
	if err := n.Apply(spec); err != nil {
		t.Fatal(err)
	}
	var mtu, udp, interval uint32
	var port uint16
	var masquerade bool
	var v4, v6 pin.KernelAddr
	for name, p := range map[string]any{
		"uplink_mtu": &mtu, "ct_udp": &udp, "report_interval": &interval, "masquerade_last_port": &port,
		"masquerade_enabled": &masquerade, "node_v4": &v4, "node_v6": &v6,
	} {
		if err := spec.Variables[name].Get(p); err != nil {
			t.Fatal(err)
		}
	}
	if mtu != 9000 || udp != 90 || interval != 5 || port != 10001 || !masquerade {
		t.Errorf("mtu %d, udp %d, interval %d, port %d, masquerade %t", mtu, udp, interval, port, masquerade)
	}
	if netip.AddrFrom16(v4.B).Unmap() != n.IPv4 || v6 != (pin.KernelAddr{}) {
		t.Errorf("addresses %v, %v", v4, v6)
	}
}
