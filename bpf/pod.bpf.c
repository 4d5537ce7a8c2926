// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The two programs on the host side of every pod's veth pair: from_pod decides
 * where each packet of the pod goes, to_pod sees what processes of the node
 * send to it. What comes from other pods and from the wire is handed to the pod
 * by the program that received it and passes neither. */
#include "vmlinux.h"
#include "bpf_helpers.h"
#include "bpf_endian.h"
#include "lib/addr.h"
#include "lib/reason.h"
#include "lib/packet.h"
#include "lib/endpoint.h"
#include "lib/event.h"
#include "lib/clock.h"
#include "lib/fragment.h"
#include "lib/policy.h"
#include "lib/conntrack.h"
#include "lib/checksum.h"
#include "lib/forward.h"
#include "lib/tunnel.h"
#include "lib/icmp.h"
#include "lib/answer.h"
#include "lib/masquerade.h"
#include "lib/neighbor.h"
#include "lib/track.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Whether the packet does not fit a way of this MTU, which p then holds. */
static __always_inline bool is_too_big(struct __sk_buff *skb, struct packet *p, __u32 mtu)
{
	p->mtu = mtu;
	return wire_len(skb, p) > mtu && p->dont_fragment;
}

/* To a pod or process of another node: by the node's own address as next hop. */
static __always_inline int forward_native(struct __sk_buff *skb, struct packet *p,
					  const struct ipcache_entry *to)
{
	struct bpf_redir_neigh next = {};

	if (is_too_big(skb, p, uplink_mtu))
		return answer_error(skb, p, DROP_TOO_BIG);
	if (p->v4) {
		next.nh_family = AF_INET;
		next.ipv4_nh = to->next_hop4;
		if (!next.ipv4_nh)
			return drop(skb, p, DIRECTION_EGRESS, DROP_NO_NEXT_HOP);
	} else {
		next.nh_family = AF_INET6;
		__builtin_memcpy(next.ipv6_nh, &to->next_hop6, sizeof(next.ipv6_nh));
		if (addr_is_zero(&to->next_hop6))
			return drop(skb, p, DIRECTION_EGRESS, DROP_NO_NEXT_HOP);
	}
	if (next_hop_header(skb, p, NULL, NULL))
		return drop(skb, p, DIRECTION_EGRESS, DROP_REWRITE);
	count(FORWARD_REMOTE, skb->len);
	return bpf_redirect_neigh(uplink_ifindex, &next, sizeof(next), 0);
}

static __always_inline int forward_tunnel(struct __sk_buff *skb, struct packet *p,
					  const struct ipcache_entry *to)
{
	int err;

	if (is_too_big(skb, p, tunnel_mtu))
		return answer_error(skb, p, DROP_TOO_BIG);
	err = tunnel_key(skb, to);
	if (err)
		return drop(skb, p, DIRECTION_EGRESS, err);
	if (next_hop_header(skb, p, tunnel_mac, tunnel_mac))
		return drop(skb, p, DIRECTION_EGRESS, DROP_REWRITE);
	skb->mark = MARK_ENCAPSULATED;
	count(FORWARD_TUNNEL, skb->len);
	return bpf_redirect(tunnel_ifindex, 0);
}

/* To the outside, or to another node's own address where the network between
 * the nodes does not know pod addresses. */
static __always_inline int forward_world(struct __sk_buff *skb, struct packet *p,
					 const struct ipcache_entry *to, struct ct_entry *ct,
					 bool reply)
{
	bool translate = masquerade_enabled && !(to && to->flags & IPCACHE_NO_MASQUERADE);
	int err = 0;

	if (is_too_big(skb, p, uplink_mtu))
		return answer_error(skb, p, DROP_TOO_BIG);
	if (p->icmp_error) {
		if (ct && ct->nat_port)
			err = masquerade_error(skb, p, ct->nat_port);
	} else if (translate && !reply) {
		err = ct ? masquerade(skb, p, ct) : DROP_FRAGMENT_UNKNOWN;
	}
	if (!err)
		err = next_hop_header(skb, p, NULL, NULL);
	if (err)
		return drop(skb, p, DIRECTION_EGRESS, err);
	count(FORWARD_WORLD, skb->len);
	return bpf_redirect_neigh(uplink_ifindex, NULL, 0, 0);
}

/* What is known of a packet's destination. */
struct destination {
	struct endpoint *local;   /* a pod of this node, or NULL */
	struct ipcache_entry *to; /* where not local; NULL is the outside */
};

static __always_inline bool is_local_node(const struct destination *d)
{
	return !d->local && d->to && d->to->flags & IPCACHE_LOCAL_NODE;
}

/* A node would take it for an encapsulated packet of another node. */
static __always_inline bool is_to_tunnel(const struct packet *p)
{
	return p->protocol == IPPROTO_UDP && p->dport == tunnel_port;
}

/* Why the packet cannot go there, or 0: known before it counts as a connection. */
static __always_inline int unreachable(const struct packet *p, const struct destination *d)
{
	if (!d->local && d->to && d->to->flags & IPCACHE_LOCAL_CIDR)
		return DROP_UNKNOWN_POD;
	if (is_unroutable(&p->dst))
		return DROP_UNROUTABLE;
	if (tunnel_ifindex && is_to_tunnel(p) &&
	    !(d->local || (d->to && d->to->flags & IPCACHE_POD)))
		return DROP_TUNNEL;
	if (p->ttl <= 1 && !is_local_node(d))
		return DROP_TTL_EXPIRED;
	return 0;
}

/* Sends a packet that is the pod's own on its way. */
static __always_inline int route(struct __sk_buff *skb, struct packet *p,
				 const struct destination *d, struct ct_entry *ct, bool reply)
{
	if (d->local)
		return deliver(skb, p, d->local, DIRECTION_EGRESS, FORWARD_LOCAL);
	if (is_local_node(d)) {
		count(FORWARD_NODE, skb->len);
		return TCX_PASS;
	}
	if (d->to && d->to->flags & IPCACHE_POD)
		return tunnel_ifindex ? forward_tunnel(skb, p, d->to)
				      : forward_native(skb, p, d->to);
	if (d->to && d->to->flags & IPCACHE_REMOTE_NODE && !tunnel_ifindex)
		return forward_native(skb, p, d->to);
	return forward_world(skb, p, d->to, ct, reply);
}

static __always_inline bool from_own_mac(struct __sk_buff *skb, const struct endpoint *ep)
{
	struct ethhdr *eth = packet_data(skb);

	if ((void *)(eth + 1) > packet_end(skb))
		return false;
	return !__builtin_memcmp(eth->h_source, ep->mac, ETH_ALEN);
}

static __always_inline bool is_solicitation(const struct packet *p)
{
	return p->protocol == IPPROTO_ICMPV6 && p->icmp_type == ND_SOLICIT && !p->v4;
}

SEC("tcx/ingress")
int from_pod(struct __sk_buff *skb)
{
	struct scratch *s = new_scratch();
	struct destination d = {};
	struct ct_entry *ct;
	struct endpoint *ep;
	struct packet *p;
	int err;

	if (!s)
		return TCX_DROP;
	p = &s->packet;
	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return from_pod_arp(skb);
	err = skb->vlan_present ? DROP_ETHERTYPE : parse(skb, p);
	if (err)
		return drop(skb, p, DIRECTION_EGRESS, err);
	if (is_solicitation(p))
		return from_pod_nd(skb, p);
	if (is_multicast(p)) {
		count(FORWARD_MULTICAST, skb->len);
		return TCX_DROP;
	}
	ep = own_endpoint(skb, &p->src);
	if (!ep)
		return drop(skb, p, DIRECTION_EGRESS, DROP_SPOOFED_ADDRESS);
	if (!from_own_mac(skb, ep))
		return drop(skb, p, DIRECTION_EGRESS, DROP_SPOOFED_MAC);
	d.local = bpf_map_lookup_elem(&weft_endpoints, &p->dst);
	if (!d.local)
		d.to = ipcache_lookup(&p->dst);
	err = unreachable(p, &d);
	if (err == DROP_TTL_EXPIRED)
		return answer_error(skb, p, err);
	if (err)
		return drop(skb, p, DIRECTION_EGRESS, err);
	s->lookup.direction = DIRECTION_EGRESS;
	s->lookup.src_subject = ep->subject;
	s->lookup.dst_subject = d.local ? d.local->subject : 0;
	err = track(skb, p, &s->lookup, &ct);
	if (err)
		return drop(skb, p, DIRECTION_EGRESS, err);
	return route(skb, p, &d, ct, s->lookup.reply);
}

SEC("tcx/egress")
int to_pod(struct __sk_buff *skb)
{
	struct scratch *s = new_scratch();
	struct ct_entry *ct;
	struct endpoint *ep;
	struct packet *p;
	int err;

	if (!s)
		return TCX_DROP;
	p = &s->packet;
	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return TCX_PASS;
	err = parse(skb, p);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	/* neighbour discovery and multicast of the node itself, on this link only */
	if (is_multicast(p)) {
		count(FORWARD_MULTICAST, skb->len);
		return TCX_PASS;
	}
	ep = own_endpoint(skb, &p->dst);
	if (!ep)
		return drop(skb, p, DIRECTION_INGRESS, DROP_UNKNOWN_POD);
	s->lookup.direction = DIRECTION_INGRESS;
	s->lookup.dst_subject = ep->subject;
	err = track(skb, p, &s->lookup, &ct);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	count(FORWARD_FROM_NODE, skb->len);
	return TCX_PASS;
}
