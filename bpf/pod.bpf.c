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
#include "lib/service.h"
#include "lib/flow.h"
#include "lib/scratch.h"
#include "lib/checksum.h"
#include "lib/forward.h"
#include "lib/tunnel.h"
#include "lib/way.h"
#include "lib/icmp.h"
#include "lib/answer.h"
#include "lib/masquerade.h"
#include "lib/neighbor.h"
#include "lib/dsr.h"
#include "lib/translate.h"
#include "lib/track.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* To the outside, or to another node's own address where the network between
 * the nodes does not know pod addresses. */
static __always_inline int forward_world(struct __sk_buff *skb, struct packet *p,
					 const struct ipcache_entry *to, struct ct_entry *ct,
					 bool reply)
{
	bool translate = masquerade_enabled && !(to && to->flags & IPCACHE_NO_MASQUERADE);
	int err = 0;

	if (p->icmp_error) {
		if (ct && ct->nat_port)
			err = masquerade_error(skb, p, ct->nat_port);
	} else if (translate && !reply) {
		err = ct ? masquerade(skb, p, ct) : DROP_FRAGMENT_UNKNOWN;
	}
	if (err)
		return drop(skb, p, DIRECTION_EGRESS, err);
	return forward_routed(skb, p, DIRECTION_EGRESS, FORWARD_WORLD);
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

static __always_inline void find_destination(struct destination *d, const struct packet *p)
{
	d->to = NULL;
	d->local = bpf_map_lookup_elem(&weft_endpoints, &p->dst);
	if (!d->local)
		d->to = ipcache_lookup(&p->dst);
}

static __always_inline bool is_pod(const struct destination *d)
{
	return d->local || (d->to && d->to->flags & IPCACHE_POD);
}

/* Sends a packet that is the pod's own on its way. */
static __always_inline int route(struct __sk_buff *skb, struct scratch *s,
				 const struct destination *d, struct ct_entry *ct)
{
	struct packet *p = &s->packet;

	if (!d->local && !is_local_node(d) && is_too_big(skb, p, way_mtu(d->to))) {
		packet_was(p, &s->translation);
		return answer_error(skb, p, DROP_TOO_BIG);
	}
	if (rewrite(skb, s))
		return drop(skb, p, DIRECTION_EGRESS, DROP_REWRITE);
	if (d->local)
		return deliver(skb, p, d->local, DIRECTION_EGRESS, FORWARD_LOCAL);
	if (is_local_node(d)) {
		count(FORWARD_NODE, skb->len);
		return TCX_PASS;
	}
	if (is_pod(d))
		return tunnel_ifindex
			       ? forward_tunnel(skb, p, d->to, DIRECTION_EGRESS, FORWARD_TUNNEL)
			       : forward_native(skb, p, d->to, DIRECTION_EGRESS, FORWARD_REMOTE);
	if (d->to && d->to->flags & IPCACHE_REMOTE_NODE && !tunnel_ifindex)
		return forward_native(skb, p, d->to, DIRECTION_EGRESS, FORWARD_REMOTE);
	return forward_world(skb, p, d->to, ct, s->lookup.reply || is_answer(&s->translation));
}

/* Refuses a packet; what it made is taken back. */
static __always_inline int refuse(struct __sk_buff *skb, struct scratch *s, int reason)
{
	struct packet *p = &s->packet;

	flow_undo(&s->translation);
	if (reason == DROP_TTL_EXPIRED || reason == DROP_NO_BACKEND) {
		packet_was(p, &s->translation);
		return answer_error(skb, p, reason);
	}
	return drop(skb, p, DIRECTION_EGRESS, reason);
}

/* What a pod and a service of which it is the backend say to each other through
 * the service: a connection of the gateway to the pod, which no policy judges. An
 * ICMP error about it has its ends already. */
static __always_inline int to_itself(struct __sk_buff *skb, struct scratch *s,
				     const struct endpoint *ep)
{
	struct translation *t = &s->translation;
	struct packet *p = &s->packet;
	struct ct_entry *ct;
	int err;

	if (p->ttl <= 1)
		return refuse(skb, s, DROP_TTL_EXPIRED);
	if (!p->icmp_error) {
		s->lookup.direction = t->moved ? DIRECTION_INGRESS : DIRECTION_EGRESS;
		err = track(skb, s, &ct);
		if (err)
			return refuse(skb, s, err);
		if (!t->moved)
			packet_becomes(p, t);
		if (rewrite(skb, s))
			return drop(skb, p, DIRECTION_EGRESS, DROP_REWRITE);
	}
	return deliver(skb, p, ep, DIRECTION_EGRESS, FORWARD_LOCAL);
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
	find_destination(&d, p);
	if (!is_pod(&d)) {
		err = translate_near(skb, s);
		if (err)
			return refuse(skb, s, err);
		if (s->translation.active && s->translation.to.flags & FLOW_HAIRPIN)
			return to_itself(skb, s, ep);
		if (s->translation.active)
			find_destination(&d, p);
	}
	err = unreachable(p, &d);
	if (err)
		return refuse(skb, s, err);
	s->lookup.direction = DIRECTION_EGRESS;
	s->lookup.src_subject = ep->subject;
	s->lookup.dst_subject = d.local ? d.local->subject : 0;
	err = track(skb, s, &ct);
	if (!err)
		err = translate_tracked(skb, s, ct, DIRECTION_EGRESS);
	if (err)
		return refuse(skb, s, err);
	return route(skb, s, &d, ct);
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
	err = track(skb, s, &ct);
	if (!err)
		err = translate_tracked(skb, s, ct, DIRECTION_INGRESS);
	if (!err)
		err = rewrite(skb, s);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	count(FORWARD_FROM_NODE, skb->len);
	return TCX_PASS;
}
