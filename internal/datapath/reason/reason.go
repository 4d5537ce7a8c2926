// SPDX-License-Identifier: Apache-2.0

// Package reason names what the datapath counts: the ways that packets go and
// the reasons for which they are dropped (enum reason in bpf/lib/reason.h).
package reason

import (
	"fmt"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Max is the number of reasons; a reason is below it.
const Max = int(pin.KernelReasonREASON_MAX)

// firstDrop is the first reason that stands for a drop; all later ones do too.
const firstDrop = int(pin.KernelReasonDROP_MALFORMED)

var names = [...]string{
	pin.KernelReasonREASON_NONE:               "",
	pin.KernelReasonFORWARD_LOCAL:             "local-pod",
	pin.KernelReasonFORWARD_REMOTE:            "remote-node",
	pin.KernelReasonFORWARD_TUNNEL:            "tunnel",
	pin.KernelReasonFORWARD_WORLD:             "world",
	pin.KernelReasonFORWARD_NODE:              "to-node",
	pin.KernelReasonFORWARD_FROM_NODE:         "from-node",
	pin.KernelReasonFORWARD_FROM_WIRE:         "from-wire",
	pin.KernelReasonFORWARD_REPLY:             "answered",
	pin.KernelReasonFORWARD_SERVICE:           "service",
	pin.KernelReasonFORWARD_MULTICAST:         "multicast-ignored",
	pin.KernelReasonDROP_MALFORMED:            "malformed",
	pin.KernelReasonDROP_ETHERTYPE:            "ethertype",
	pin.KernelReasonDROP_IPV6EXTENSION:        "ipv6-extension",
	pin.KernelReasonDROP_SPOOFED_ADDRESS:      "spoofed-address",
	pin.KernelReasonDROP_SPOOFED_MAC:          "spoofed-mac",
	pin.KernelReasonDROP_UNKNOWN_POD:          "unknown-pod",
	pin.KernelReasonDROP_CONNTRACK_FULL:       "conntrack-full",
	pin.KernelReasonDROP_CONNTRACK_QUOTA:      "conntrack-quota",
	pin.KernelReasonDROP_FRAGMENT_UNKNOWN:     "fragment-unknown",
	pin.KernelReasonDROP_ICMP_UNMATCHED:       "icmp-unmatched",
	pin.KernelReasonDROP_TTL_EXPIRED:          "ttl-expired",
	pin.KernelReasonDROP_TOO_BIG:              "too-big",
	pin.KernelReasonDROP_MASQUERADE_EXHAUSTED: "masquerade-exhausted",
	pin.KernelReasonDROP_MASQUERADE_PROTOCOL:  "masquerade-protocol",
	pin.KernelReasonDROP_MASQUERADE_ADDRESS:   "masquerade-address",
	pin.KernelReasonDROP_NO_NEXT_HOP:          "no-next-hop",
	pin.KernelReasonDROP_REWRITE:              "rewrite",
	pin.KernelReasonDROP_UNROUTABLE:           "unroutable",
	pin.KernelReasonDROP_TUNNEL:               "tunnel-forged",
	pin.KernelReasonDROP_POLICY:               "policy",
	pin.KernelReasonDROP_IDENTITY_UNKNOWN:     "identity-unknown",
	pin.KernelReasonDROP_NO_BACKEND:           "no-backend",
	pin.KernelReasonDROP_SOURCE_RANGE:         "source-range",
	pin.KernelReasonDROP_SERVICE_FULL:         "service-full",
	pin.KernelReasonDROP_SERVICE_PORTS:        "service-ports",
	pin.KernelReasonDROP_DENIED:               "denied",
}

// Name returns the name of reason r; a number that this build does not know
// comes as itself.
func Name(r uint8) string {
	if int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("reason-%d", r)
}

// IsDrop says whether r stands for a drop.
func IsDrop(r uint8) bool { return int(r) >= firstDrop }

// Count is what one reason has counted, all CPUs together.
type Count struct {
	Reason  uint8
	Packets uint64
	Bytes   uint64
}

// Counts reads every counter that is not zero.
func Counts(m *pin.Maps) ([]Count, error) {
	counters := m.Map("weft_counters")
	var out []Count
	for r := range uint32(Max) {
		var perCPU []pin.KernelCounter
		if err := counters.Lookup(r, &perCPU); err != nil {
			return nil, fmt.Errorf("read counter %s: %w", Name(uint8(r)), err)
		}
		c := Count{Reason: uint8(r)}
		for _, v := range perCPU {
			c.Packets += v.Packets
			c.Bytes += v.Bytes
		}
		if c.Packets > 0 {
			out = append(out, c)
		}
	}
	return out, nil
}

// Drops returns the names of all reasons that stand for a drop.
func Drops() []string { return append([]string(nil), names[firstDrop:]...) }
