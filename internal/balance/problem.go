// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
)

// Problem is a part of a Service or EndpointSlice that was left out, and why.
// All else of the object is in force.
type Problem struct {
	Object string // "Service NAMESPACE/NAME" or "EndpointSlice NAMESPACE/NAME"
	Field  string // path within the object, such as spec.ports[1].protocol
	Value  string // as written, quoted where it is text
	Want   string // what was expected
}

// String is the problem as one line.
func (p Problem) String() string {
	return fmt.Sprintf("%s: %s: %s: want %s", p.Object, p.Field, p.Value, p.Want)
}

// problems collects what one object has.
type problems struct {
	object string
	list   *[]Problem
}

func (p problems) add(field string, value any, want string) {
	text := fmt.Sprint(value)
	if s, ok := value.(string); ok {
		text = strconv.Quote(s)
	}
	*p.list = append(*p.list, Problem{Object: p.object, Field: field, Value: text, Want: want})
}

func sortProblems(list []Problem) {
	slices.SortFunc(list, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Object, b.Object), cmp.Compare(a.Field, b.Field), cmp.Compare(a.Value, b.Value), cmp.Compare(a.Want, b.Want))
	})
}

const unicast = "a unicast address, neither loopback nor link-local"

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// usable parses s and says what is wrong with it as the address of a frontend or
// a backend: "" for a good one. The rule is Kubernetes' for endpoints and
// external IPs (ValidateNonSpecialIP in pkg/apis/core/validation).
func usable(s string) (netip.Addr, string) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return netip.Addr{}, "an IPv4 or IPv6 address"
	case a.Is4In6() || a.Zone() != "":
		return netip.Addr{}, "a plain IPv4 or IPv6 address"
	case a.IsUnspecified() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() || a == broadcast:
		return netip.Addr{}, unicast
	}
	return a, ""
}
