// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The programs on the node's own devices: from_uplink and from_tunnel hand what
 * arrives for pods of this node to them, to_tunnel finds the other end for what
 * processes of this node send through VXLAN. Everything else passes as if they
 * were not there. */
#include "vmlinux.h"
#include "bpf_helpers.h"
#include "bpf_endian.h"
#include "lib/addr.h"
#include "lib/reason.h"
#include "lib/packet.h"
#include "lib/endpoint.h"
#include "lib/event.h"
#include "lib/fragment.h"
#include "lib/conntrack.h"
#include "lib/checksum.h"
#include "lib/forward.h"
#include "lib/tunnel.h"
#include "lib/icmp.h"
#include "lib/masquerade.h"
#include "lib/track.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* What is for an address of this node: an answer to a masqueraded connection,
 * or the node's own. Returns 0 with *p changed for the former. */
static __always_inline int maybe_unmasquerade(struct __sk_buff *skb, struct packet *p)
{
	struct addr node;

	node_addr(&node, p->v4);
	if (!masquerade_enabled || !addr_equal(&p->dst, &node))
		return 0;
	if ((p->first_fragment || p->later_fragment) && !fragment_ports(p))
		return 0;
	return unmasquerade(skb, p);
}

/* Shared by both ways in. An address of a local pod as the source is a lie:
 * such packets never leave the node. */
static __always_inline int arrive(struct __sk_buff *skb, struct packet *p)
{
	struct endpoint *ep = bpf_map_lookup_elem(&weft_endpoints, &p->dst);
	struct ipcache_entry *to;

	if (!ep) {
		to = ipcache_lookup(&p->dst);
		if (to && to->flags & IPCACHE_LOCAL_CIDR)
			return drop(skb, p, DIRECTION_INGRESS, DROP_UNKNOWN_POD);
		return TCX_NEXT;
	}
	if (bpf_map_lookup_elem(&weft_endpoints, &p->src))
		return drop(skb, p, DIRECTION_INGRESS, DROP_SPOOFED_ADDRESS);
	return to_local_pod(skb, p, ep, FORWARD_FROM_WIRE);
}

static __always_inline bool is_ip(const struct __sk_buff *skb)
{
	return skb->protocol == bpf_htons(ETH_P_IP) || skb->protocol == bpf_htons(ETH_P_IPV6);
}

SEC("tcx/ingress")
int from_uplink(struct __sk_buff *skb)
{
	struct packet p = {};
	int err;

	/* what cannot be read is not for a pod as far as we can tell */
	if (!is_ip(skb) || parse(skb, &p) || is_multicast(&p))
		return TCX_NEXT;
	err = maybe_unmasquerade(skb, &p);
	if (err)
		return drop(skb, &p, DIRECTION_INGRESS, err);
	return arrive(skb, &p);
}

SEC("tcx/ingress")
int from_tunnel(struct __sk_buff *skb)
{
	struct packet p = {};
	int err = parse(skb, &p);

	if (err)
		return drop(skb, &p, DIRECTION_INGRESS, err);
	/* the inner MAC addresses mean nothing, also not to the node's own stack */
	bpf_skb_change_type(skb, PACKET_HOST);
	return arrive(skb, &p);
}

SEC("tcx/egress")
int to_tunnel(struct __sk_buff *skb)
{
	struct ipcache_entry *to;
	struct packet p = {};
	int err;

	if (skb->mark == MARK_ENCAPSULATED) {
		skb->mark = 0;
		return TCX_NEXT;
	}
	if (!is_ip(skb) || parse(skb, &p) || is_multicast(&p)) {
		count(FORWARD_MULTICAST, skb->len);
		return TCX_DROP;
	}
	to = ipcache_lookup(&p.dst);
	err = to && to->flags & IPCACHE_POD ? tunnel_key(skb, to) : DROP_NO_NEXT_HOP;
	if (err)
		return drop(skb, &p, DIRECTION_EGRESS, err);
	count(FORWARD_FROM_NODE, skb->len);
	return TCX_NEXT;
}
