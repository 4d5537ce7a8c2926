// SPDX-License-Identifier: Apache-2.0

package addr

import (
	"net/netip"
	"testing"
)

func TestGateway(t *testing.T) {
	for cidr, want := range map[string]string{
		"10.244.1.77/24":      "10.244.1.1",
		"fd00:10:244:1::/64":  "fd00:10:244:1::1",
		"fd00:10:244:1::9/64": "fd00:10:244:1::1",
	} {
		if got := Gateway(netip.MustParsePrefix(cidr)); got.String() != want {
			t.Errorf("%s: %s, want %s", cidr, got, want)
		}
	}
}
