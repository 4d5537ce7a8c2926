// SPDX-License-Identifier: Apache-2.0

// Package addr holds the one address form that weft uses in kernel keys: an
// IPv4 address travels as an IPv4-mapped IPv6 address (RFC 4291, 2.5.5.2), so
// that no table, map or program has an IPv4 and an IPv6 twin.
package addr

import (
	"fmt"
	"net/netip"
)

// mappedBits is the length of the ::ffff:0:0/96 prefix in front of an IPv4
// address in its mapped form.
const mappedBits = 96

// To16 returns the 16 bytes, in network order, of a in mapped form. An invalid
// address gives sixteen zero bytes. A zone is dropped.
func To16(a netip.Addr) [16]byte {
	if !a.IsValid() {
		return [16]byte{}
	}
	return a.As16()
}

// From16 is the inverse of To16: a mapped address comes back as IPv4, the
// unspecified IPv6 address as "::".
func From16(b [16]byte) netip.Addr { return netip.AddrFrom16(b).Unmap() }

// PrefixTo16 returns the masked address of p in mapped form and its length in
// bits of that form (0 to 128): 10.0.0.0/8 is ::ffff:10.0.0.0 and 104.
func PrefixTo16(p netip.Prefix) ([16]byte, int) {
	p = p.Masked()
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += mappedBits
	}
	return To16(p.Addr()), bits
}

// PrefixFrom16 is the inverse of PrefixTo16. A prefix shorter than the mapped
// range stays IPv6.
func PrefixFrom16(b [16]byte, bits int) netip.Prefix {
	a := netip.AddrFrom16(b)
	if a.Is4In6() && bits >= mappedBits {
		return netip.PrefixFrom(a.Unmap(), bits-mappedBits)
	}
	return netip.PrefixFrom(a, bits)
}

// Host returns the prefix that holds a alone: /32 or /128.
func Host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()) }

// Gateway is what the pods of a pod CIDR route to: the first address behind the
// network's own.
func Gateway(cidr netip.Prefix) netip.Addr { return cidr.Masked().Addr().Unmap().Next() }

// Pick returns the first IPv4 and the first IPv6 address of as; an absent
// family is the zero Addr.
func Pick(as []netip.Addr) (v4, v6 netip.Addr) {
	for _, a := range as {
		a = a.Unmap()
		switch {
		case a.Is4() && !v4.IsValid():
			v4 = a
		case a.Is6() && !v6.IsValid():
			v6 = a
		}
	}
	return v4, v6
}

// ParseAll parses every string of ss as an address and names the first that is
// not one.
func ParseAll(ss []string) ([]netip.Addr, error) {
	out := make([]netip.Addr, 0, len(ss))
	for _, s := range ss {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("address %q: want an IPv4 or IPv6 address", s)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}
