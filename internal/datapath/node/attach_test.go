// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"
	"testing"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
)

// TestAttach: what an agent with another configuration left is taken off.
func TestAttach(t *testing.T) {
	fix := newFixture(t, nil)
	device := func(name string) Device { return Device{Name: name, Ifindex: fix.Ifindex(name)} }
	tunnel := device(pt.Tunnel)
	for _, c := range []struct {
		name   string
		uplink Device
		tunnel *Device
		want   []string
	}{
		{"native", device(pt.Uplink), nil, []string{"eth0 egress to_uplink", "eth0 ingress from_uplink"}},
		{"tunnel", device(pt.Uplink), &tunnel, []string{"eth0 egress to_uplink", "eth0 ingress from_uplink", "weft_vxlan egress to_tunnel", "weft_vxlan ingress from_tunnel"}},
		{"the same again", device(pt.Uplink), &tunnel, []string{"eth0 egress to_uplink", "eth0 ingress from_uplink", "weft_vxlan egress to_tunnel", "weft_vxlan ingress from_tunnel"}},
		{"another uplink, native", device(pt.PodA), nil, []string{"wf-a egress to_uplink", "wf-a ingress from_uplink"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			fix.Do(func() error { return fix.Attach(c.uplink, c.tunnel) })
			attached, err := fix.Maps.Attachments()
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, a := range attached {
				got = append(got, a.Device+" "+a.Hook+" "+a.Program)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("attached: %v, want %v", got, c.want)
			}
		})
	}
}
