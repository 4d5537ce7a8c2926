// SPDX-License-Identifier: Apache-2.0

package maglev

import (
	"net/netip"
	"testing"
)

// TestHash: the numbers are what connection_hash makes of these, compiled from C.
func TestHash(t *testing.T) {
	for _, c := range []struct {
		client, frontend string
		protocol         uint8
		want             uint32
	}{
		{"203.0.113.9:40000", "172.30.0.1:30080", 6, 1876140559},
		{"[2001:db8::7]:1025", "[fd00:172:30::1]:443", 17, 4193857092},
	} {
		if got := Hash(netip.MustParseAddrPort(c.client), netip.MustParseAddrPort(c.frontend), c.protocol); got != c.want {
			t.Errorf("%+v: got %d", c, got)
		}
	}
}
