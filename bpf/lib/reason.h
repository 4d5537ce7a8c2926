// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Why a packet was dropped, or which way it went. Each has its own counter,
 * and the Go names in internal/datapath/reason have the same order. */

enum reason {
	REASON_NONE = 0,
	/* The way a packet went. */
	FORWARD_LOCAL,      /* pod to a pod of this node */
	FORWARD_REMOTE,     /* pod to another node, by its next hop */
	FORWARD_TUNNEL,     /* pod to another node, through VXLAN */
	FORWARD_WORLD,      /* pod to the outside */
	FORWARD_NODE,       /* pod to a process of this node */
	FORWARD_FROM_NODE,  /* process of this node to a pod */
	FORWARD_FROM_WIRE,  /* arrived at the uplink or the tunnel, to a pod */
	FORWARD_REPLY,      /* an ARP, ND or ICMP answer made by the datapath */
	FORWARD_SERVICE,    /* arrived for a service, to a backend elsewhere, or its answer */
	FORWARD_MULTICAST,  /* from a pod: there is no multicast routing, ignored */
	/* Drops, each also an event. */
	DROP_MALFORMED,            /* a header is cut off or contradicts itself */
	DROP_ETHERTYPE,            /* neither IPv4, IPv6 nor ARP */
	DROP_IPV6_EXTENSION,       /* more extension headers than the datapath reads */
	DROP_SPOOFED_ADDRESS,      /* source address is not the sender's own */
	DROP_SPOOFED_MAC,          /* source MAC is not the pod's */
	DROP_UNKNOWN_POD,          /* an address of this node's pod CIDR without a pod */
	DROP_CONNTRACK_FULL,       /* no room for a new connection */
	DROP_CONNTRACK_QUOTA,      /* the pod has as many connections as one may have */
	DROP_FRAGMENT_UNKNOWN,     /* needs its ports, first fragment not seen */
	DROP_ICMP_UNMATCHED,       /* ICMP error about a connection that does not exist */
	DROP_TTL_EXPIRED,          /* answered with ICMP time exceeded */
	DROP_TOO_BIG,              /* answered with ICMP fragmentation needed / packet too big */
	DROP_MASQUERADE_EXHAUSTED, /* no free source port towards this destination */
	DROP_MASQUERADE_PROTOCOL,  /* a protocol that cannot be masqueraded */
	DROP_MASQUERADE_ADDRESS,   /* the node has no address of this family */
	DROP_NO_NEXT_HOP,          /* a node without an address of this family */
	DROP_REWRITE,              /* the kernel refused to change the packet */
	DROP_UNROUTABLE,           /* loopback, unspecified or link-local destination */
	DROP_TUNNEL,               /* not what a node of the cluster sends through the tunnel */
	DROP_POLICY,               /* network policy; the event holds the rule */
	DROP_IDENTITY_UNKNOWN,     /* policy applies, and who sends is not known yet */
	DROP_NO_BACKEND,           /* the service has none that this client may reach */
	DROP_SOURCE_RANGE,         /* the service is not for this client */
	DROP_SERVICE_FULL,         /* no room for another translated connection */
	DROP_SERVICE_PORTS,        /* no free source port towards this backend */
	DROP_DENIED,               /* the deny list of the node has the sender */
	REASON_MAX,
};

struct counter {
	__u64 packets;
	__u64 bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_MAX);
	__type(key, __u32);
	__type(value, struct counter);
} weft_counters SEC(".maps");

static __always_inline void count(__u32 reason, __u64 bytes)
{
	struct counter *c = bpf_map_lookup_elem(&weft_counters, &reason);

	if (!c)
		return;
	c->packets++;
	c->bytes += bytes;
}
