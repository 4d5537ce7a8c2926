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
#include "lib/dsr.h"
#include "lib/translate.h"
#include "lib/track.h"
#include "lib/deny.h"
#include "lib/frame.h"

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
	return p->icmp_error ? unmasquerade_error(skb, p) : unmasquerade(skb, p);
}

/* Hands the packet to the pod, where it is for one. An address of this node or
 * of its pods as the source is a lie: such packets never leave the node. */
static __always_inline int arrive(struct __sk_buff *skb, struct scratch *s, struct endpoint *ep,
				  const struct ipcache_entry *from)
{
	struct packet *p = &s->packet;
	int err;

	if ((from && from->flags & (IPCACHE_LOCAL_NODE | IPCACHE_LOCAL_CIDR)) ||
	    is_unroutable(&p->src) || bpf_map_lookup_elem(&weft_endpoints, &p->src))
		return drop(skb, p, DIRECTION_INGRESS, DROP_SPOOFED_ADDRESS);
	if (service_dsr && !tunnel_ifindex && has_options(p)) {
		err = dsr_receive(skb, s);
		if (err)
			return drop(skb, p, DIRECTION_INGRESS, err);
	}
	return to_local_pod(skb, s, ep, FORWARD_FROM_WIRE);
}

/* Sends a packet on that is neither from here nor for here. */
static __always_inline int pass_on(struct __sk_buff *skb, struct scratch *s,
				   const struct ipcache_entry *to)
{
	struct translation *t = &s->translation;
	struct packet *p = &s->packet;
	int err = p->ttl <= 1                       ? DROP_TTL_EXPIRED
		  : is_too_big(skb, p, way_mtu(to)) ? DROP_TOO_BIG
						    : 0;

	if (err) {
		flow_undo(t);
		packet_was(p, t);
		return answer_error(skb, p, err);
	}
	err = rewrite(skb, s);
	if (!err && (t->to.flags & (FLOW_DSR | FLOW_REPLY)) == FLOW_DSR && !p->icmp_error)
		err = dsr_insert(skb, p, &t->key);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	if (tunnel_ifindex && to && to->flags & IPCACHE_POD)
		return forward_tunnel(skb, p, to, DIRECTION_INGRESS, FORWARD_SERVICE);
	if (!tunnel_ifindex && to && to->flags & (IPCACHE_POD | IPCACHE_REMOTE_NODE))
		return forward_native(skb, p, to, DIRECTION_INGRESS, FORWARD_SERVICE);
	return forward_routed(skb, p, DIRECTION_INGRESS, FORWARD_SERVICE);
}

/* To a process of this node that is the backend. */
static __always_inline int pass_up(struct __sk_buff *skb, struct scratch *s)
{
	if (rewrite(skb, s))
		return drop(skb, &s->packet, DIRECTION_INGRESS, DROP_REWRITE);
	count(FORWARD_SERVICE, skb->len);
	return TCX_NEXT;
}

/* A packet for no pod: where it is for a service, or an answer to what was sent
 * on for one, it goes on from here; all else is the node's own. */
static SUBPROGRAM int serve(struct __sk_buff *skb, struct scratch *s, bool tunnel)
{
	struct translation *t;
	struct ipcache_entry *to;
	struct endpoint *ep;
	int err;

	if (!s)
		return TCX_DROP;
	t = &s->translation;
	err = translate_far(skb, s, tunnel);
	if (!err && !t->active)
		return TCX_NEXT;
	if (err == DROP_NO_BACKEND && !t->silent)
		return answer_error(skb, &s->packet, err);
	if (err)
		return drop(skb, &s->packet, DIRECTION_INGRESS, err);
	ep = bpf_map_lookup_elem(&weft_endpoints, &s->packet.dst);
	if (ep)
		return to_local_pod(skb, s, ep, FORWARD_FROM_WIRE);
	to = ipcache_lookup(&s->packet.dst);
	if (to && to->flags & IPCACHE_LOCAL_NODE)
		return pass_up(skb, s);
	return pass_on(skb, s, to);
}

static __always_inline bool is_ip(const struct __sk_buff *skb)
{
	return skb->protocol == bpf_htons(ETH_P_IP) || skb->protocol == bpf_htons(ETH_P_IPV6);
}

/* Frames of a VLAN, or for another machine, are not for this device. */
static __always_inline bool is_for_uplink(const struct __sk_buff *skb)
{
	return skb->pkt_type != PACKET_OTHERHOST && !(skb->vlan_present && skb->vlan_tci & 0xfff);
}

SEC("tcx/ingress")
int from_uplink(struct __sk_buff *skb)
{
	struct scratch *s = new_scratch();
	struct ipcache_entry *to, *from;
	struct endpoint *ep;
	struct packet *p;
	int err;

	if (!s)
		return TCX_DROP;
	p = &s->packet;
	if (!is_ip(skb) || !is_for_uplink(skb))
		return TCX_NEXT;
	err = restore_ethernet(skb);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	err = parse(skb, p);
	/* XDP has done this where it is in force */
	if (denied(&p->src, skb->len))
		return TCX_DROP;
	/* what cannot be read is not for a pod as far as we can tell */
	if (err || is_multicast(p))
		return TCX_NEXT;
	err = maybe_unmasquerade(skb, p);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	ep = bpf_map_lookup_elem(&weft_endpoints, &p->dst);
	if (!ep) {
		to = ipcache_lookup(&p->dst);
		if (to && to->flags & IPCACHE_LOCAL_CIDR)
			return drop(skb, p, DIRECTION_INGRESS, DROP_UNKNOWN_POD);
		return serve(skb, s, false);
	}
	from = ipcache_lookup(&p->src);
	/* pods of other nodes come through the tunnel, where there is one */
	if (tunnel_ifindex && from && from->flags & IPCACHE_POD)
		return drop(skb, p, DIRECTION_INGRESS, DROP_SPOOFED_ADDRESS);
	return arrive(skb, s, ep, from);
}

/* Whether the outer header is that of the node that holds the inner source. */
static __always_inline bool tunnel_is_true(struct __sk_buff *skb, const struct ipcache_entry *from)
{
	struct bpf_tunnel_key key = {};

	if (!from || !(from->flags & IPCACHE_POD))
		return false;
	if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0))
		return key.tunnel_id == TUNNEL_VNI && from->next_hop4 &&
		       key.remote_ipv4 == bpf_ntohl(from->next_hop4);
	if (bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6))
		return false;
	return key.tunnel_id == TUNNEL_VNI &&
	       !__builtin_memcmp(key.remote_ipv6, &from->next_hop6, sizeof(key.remote_ipv6));
}

/* Whether p is for the address that this node has on the tunnel device. */
static __always_inline bool is_to_gateway(const struct packet *p)
{
	struct addr gateway;

	load_const_addr(&gateway, p->v4 ? &gateway_v4 : &gateway_v6);
	return addr_equal(&p->dst, &gateway);
}

SEC("tcx/ingress")
int from_tunnel(struct __sk_buff *skb)
{
	struct scratch *s = new_scratch();
	struct ipcache_entry *from;
	struct endpoint *ep;
	struct packet *p;
	int err;

	if (!s)
		return TCX_DROP;
	p = &s->packet;
	err = parse(skb, p);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	from = ipcache_lookup(&p->src);
	if (!tunnel_is_true(skb, from))
		return drop(skb, p, DIRECTION_INGRESS, DROP_TUNNEL);
	ep = bpf_map_lookup_elem(&weft_endpoints, &p->dst);
	if (ep)
		return arrive(skb, s, ep, from);
	if (!is_to_gateway(p))
		return drop(skb, p, DIRECTION_INGRESS, DROP_UNKNOWN_POD);
	/* the inner MAC addresses mean nothing, also not to the node's own stack */
	bpf_skb_change_type(skb, PACKET_HOST);
	return serve(skb, s, true);
}

SEC("tcx/egress")
int to_tunnel(struct __sk_buff *skb)
{
	struct scratch *s = new_scratch();
	struct ipcache_entry *to;
	struct packet *p;
	int err;

	if (!s)
		return TCX_DROP;
	p = &s->packet;
	if (skb->mark == MARK_ENCAPSULATED) {
		skb->mark = 0;
		return TCX_NEXT;
	}
	if (!is_ip(skb) || parse(skb, p) || is_multicast(p)) {
		count(FORWARD_MULTICAST, skb->len);
		return TCX_DROP;
	}
	to = ipcache_lookup(&p->dst);
	err = to && to->flags & IPCACHE_POD ? tunnel_key(skb, to) : DROP_NO_NEXT_HOP;
	if (err)
		return drop(skb, p, DIRECTION_EGRESS, err);
	count(FORWARD_FROM_NODE, skb->len);
	return TCX_NEXT;
}

/* Whether the packet has this node's address, which tells what processes send
 * from what pods do: skb->sk may be the socket of either. */
static __always_inline bool is_from_node(const struct __sk_buff *skb)
{
	struct ipv6hdr *ip6 = packet_data(skb) + ETH_HLEN;
	struct iphdr *ip = packet_data(skb) + ETH_HLEN;
	struct addr node, src;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if ((void *)(ip + 1) > packet_end(skb))
			return true;
		return ip->saddr == node_v4.w[3];
	}
	if ((void *)(ip6 + 1) > packet_end(skb))
		return true;
	load_const_addr(&node, &node_v6);
	addr_from_v6(&src, &ip6->saddr);
	return addr_equal(&src, &node);
}

/* What processes of this node send: a backend among them answers with the
 * address that its client asked. */
SEC("tcx/egress")
int to_uplink(struct __sk_buff *skb)
{
	struct scratch *s;
	int err;

	if (!skb->sk || !is_ip(skb) || !is_from_node(skb))
		return TCX_NEXT;
	s = new_scratch();
	if (!s || parse(skb, &s->packet))
		return TCX_NEXT;
	err = translate_own(skb, s);
	if (!err)
		err = rewrite(skb, s);
	if (err)
		return drop(skb, &s->packet, DIRECTION_EGRESS, err);
	return TCX_NEXT;
}
