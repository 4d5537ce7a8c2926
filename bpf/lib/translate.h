// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Services, packet by packet: which connection a packet belongs to, and what it
 * becomes. The ends in struct packet change first, so that policy and conntrack
 * see the backend; the buffer follows (rewrite) when nothing can refuse the
 * packet any more, for an answer to its sender quotes it as it was sent. */

static __always_inline bool is_translatable(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP;
}

/* Gives the packet the ends that its flow says; the buffer keeps t->key's. */
static __always_inline void packet_becomes(struct packet *p, struct translation *t)
{
	p->src = t->to.src;
	p->dst = t->to.dst;
	p->sport = t->to.sport;
	p->dport = t->to.dport;
	t->moved = true;
}

/* Takes it back. */
static __always_inline void packet_was(struct packet *p, struct translation *t)
{
	if (!t->moved)
		return;
	p->src = t->key.src;
	p->dst = t->key.dst;
	p->sport = t->key.sport;
	p->dport = t->key.dport;
	t->moved = false;
}

/* Writes the ends of p into the buffer, which has those of *from. */
static SUBPROGRAM int rewrite_ends(struct __sk_buff *skb, const struct packet *p,
				   const struct flow_key *from)
{
	__u64 flags;
	__be32 was[2], is[2];
	__s64 diff;
	int csum;

	if (!p || !from)
		return DROP_REWRITE;
	csum = p->later_fragment ? -1 : l4_csum_off(p->protocol);
	flags = l4_csum_flags(p->protocol);
	if (p->v4) {
		was[0] = from->src.w[3];
		was[1] = from->dst.w[3];
		is[0] = p->src.w[3];
		is[1] = p->dst.w[3];
		diff = bpf_csum_diff(was, sizeof(was), is, sizeof(is), 0);
		if (bpf_l3_csum_replace(skb, IP_CSUM_OFF, 0, diff, 0) ||
		    bpf_skb_store_bytes(skb, IP_SRC_OFF, is, sizeof(is), 0))
			return DROP_REWRITE;
	} else {
		diff = bpf_csum_diff((__be32 *)from->src.b, 32, (__be32 *)p->src.b, 32, 0);
		if (bpf_skb_store_bytes(skb, IP6_SRC_OFF, p->src.b, 32, 0))
			return DROP_REWRITE;
	}
	if (csum < 0)
		return 0;
	if (p->protocol != IPPROTO_ICMP &&
	    bpf_l4_csum_replace(skb, p->l4_off + csum, 0, diff,
				BPF_F_PSEUDO_HDR | flags | (p->v4 ? 0 : ipv6_csum_flag)))
		return DROP_REWRITE;
	if (!is_translatable(p->protocol))
		return 0;
	was[0] = (__u32)from->dport << 16 | from->sport;
	is[0] = (__u32)p->dport << 16 | p->sport;
	if (bpf_l4_csum_replace(skb, p->l4_off + csum, was[0], is[0], flags | 4) ||
	    bpf_skb_store_bytes(skb, p->l4_off, is, 4, 0))
		return DROP_REWRITE;
	return 0;
}

static __always_inline int rewrite(struct __sk_buff *skb, struct scratch *s)
{
	if (!s->translation.moved)
		return 0;
	s->translation.moved = false;
	return rewrite_ends(skb, &s->packet, &s->translation.key);
}

/* Answers to others than the backend itself are translated behind conntrack. */
static __always_inline bool is_answer_to_other(const struct service_flow *f)
{
	return (f->flags & (FLOW_REPLY | FLOW_HAIRPIN)) == FLOW_REPLY;
}

/* Where the error is about a packet of a translated connection, makes it one
 * about that packet as its sender knows it, buffer included. Such an error goes
 * to the other end of the flow that answers to what it quotes. early: conntrack
 * has still to see the error, and knows the ends of answers as they are. Returns
 * 0, with t->active where it did that, or a drop reason. */
static SUBPROGRAM int translate_error(struct __sk_buff *skb, struct scratch *s, __u8 direction,
				      bool early)
{
	struct translation *t;
	struct service_flow *f;
	struct packet *p, *q;
	int err;

	if (!s)
		return 0;
	p = &s->packet;
	q = &s->quoted;
	t = &s->translation;
	__builtin_memset(q, 0, sizeof(*q));
	if (!parse_quoted(skb, p, q) || !quotes_own(p, q, direction) ||
	    !is_translatable(q->protocol))
		return 0;
	flow_key_back(&t->key, q);
	f = bpf_map_lookup_elem(&weft_service_flows, &t->key);
	if (!f || flow_expired(f, q->protocol, now_seconds()) || (early && is_answer_to_other(f)))
		return 0;
	t->to = *f;
	err = replace_quoted(skb, p, q, true, &t->to.dst, t->to.dport);
	if (!err)
		err = replace_quoted(skb, p, q, false, &t->to.src, t->to.sport);
	if (err)
		return err;
	/* a router in between keeps its own address, but not behind a translated one */
	t->back_key.src = p->src;
	t->back_key.dst = p->dst;
	if (addr_equal(&p->src, &t->key.src) ||
	    (t->to.flags & (FLOW_SNAT | FLOW_REPLY)) == FLOW_SNAT)
		p->src = t->to.src;
	p->dst = t->to.dst;
	t->active = true;
	return rewrite_ends(skb, p, &t->back_key);
}

/* A new connection of a pod of this node. */
static SUBPROGRAM int near_begin(struct translation *t, bool v4, __u32 now)
{
	int err;

	if (!t)
		return 0;
	err = flow_choose(t, false, now);
	if (err || !t->active)
		return err;
	__builtin_memset(t->to.mac, 0, sizeof(t->to.mac));
	if (addr_equal(&t->to.dst, &t->key.src)) {
		t->to.flags = FLOW_SNAT | FLOW_HAIRPIN;
		load_const_addr(&t->to.src, v4 ? &gateway_v4 : &gateway_v6);
	}
	return flow_make(t, now);
}

/* What a pod of this node sends to an address that is no pod's: a request to a
 * service, or an answer to itself. Returns 0, with t->active where it is one of
 * these, or a drop reason. */
static SUBPROGRAM int translate_near(struct __sk_buff *skb, struct scratch *s)
{
	struct translation *t;
	struct service_flow *f;
	struct packet *p;
	__u32 now;
	int err;

	if (!s)
		return 0;
	p = &s->packet;
	t = &s->translation;
	if (p->icmp_error)
		return translate_error(skb, s, DIRECTION_EGRESS, true);
	if (!is_translatable(p->protocol) ||
	    ((p->first_fragment || p->later_fragment) && !fragment_ports(p)))
		return 0;
	now = now_seconds();
	flow_key_of(&t->key, p);
	f = flow_find(t, p, now);
	if (f) {
		if (is_answer_to_other(f))
			return 0;
		t->to = *f;
		t->active = true;
		flow_touch(&t->key, f, p, now);
	} else {
		err = near_begin(t, p->v4, now);
		if (err || !t->active)
			return err;
	}
	if (!(t->to.flags & FLOW_REPLY))
		packet_becomes(p, t);
	return 0;
}

/* Decides with which address a client from elsewhere goes to the backend in
 * t->to: its own where the answers pass here anyway, or go out directly. dsr:
 * the packet could carry what that takes. Returns 0 or a drop reason. */
static __always_inline int far_source(struct translation *t, bool v4, bool dsr)
{
	struct ipcache_entry *to, *from;

	if (bpf_map_lookup_elem(&weft_endpoints, &t->to.dst))
		return 0;
	to = ipcache_lookup(&t->to.dst);
	if (to && to->flags & IPCACHE_LOCAL_NODE)
		return 0;
	if (to && to->flags & IPCACHE_LOCAL_CIDR)
		return DROP_UNKNOWN_POD;
	if (to && to->flags & IPCACHE_POD && dsr) {
		from = ipcache_lookup(&t->key.src);
		if (!from || !(from->flags & (IPCACHE_POD | IPCACHE_REMOTE_NODE))) {
			t->to.flags |= FLOW_DSR;
			return 0;
		}
	}
	t->to.flags |= FLOW_SNAT;
	if (to && to->flags & IPCACHE_POD && tunnel_ifindex)
		load_const_addr(&t->to.src, v4 ? &gateway_v4 : &gateway_v6);
	else
		node_addr(&t->to.src, v4);
	return addr_is_zero(&t->to.src) ? DROP_MASQUERADE_ADDRESS : 0;
}

/* Whether nobody elsewhere has the source address: such packets never leave the
 * node, or come another way. */
static __always_inline bool is_forged(const struct packet *p, bool tunnel)
{
	struct ipcache_entry *from = ipcache_lookup(&p->src);

	if (from && (from->flags & (IPCACHE_LOCAL_NODE | IPCACHE_LOCAL_CIDR) ||
		     (!tunnel && tunnel_ifindex && from->flags & IPCACHE_POD)))
		return true;
	return is_unroutable(&p->src) || is_group(&p->src) ||
	       bpf_map_lookup_elem(&weft_endpoints, &p->src);
}

/* A new connection of a client elsewhere. */
static SUBPROGRAM int far_begin(struct translation *t, const struct packet *p, bool dsr, __u32 now)
{
	int err;

	if (!t || !p || is_reset(p))
		return 0;
	err = flow_choose(t, true, now);
	if (err || !t->active)
		return err;
	if (is_forged(p, false))
		return DROP_SPOOFED_ADDRESS;
	err = far_source(t, p->v4, dsr);
	return err ? err : flow_make(t, now);
}

/* Whether packets of the flow come from elsewhere: those that pods and processes
 * of this node send do not. Through the tunnel comes what its pods answer. */
static __always_inline bool may_arrive(const struct service_flow *f, const struct packet *p,
				       bool tunnel)
{
	if (!(f->flags & FLOW_FAR) || (f->flags & (FLOW_REPLY | FLOW_SNAT)) == FLOW_REPLY)
		return false;
	return !tunnel_ifindex || tunnel || !is_forged(p, false);
}

/* The MAC address that the frame came from is that of the client's next hop. */
static __always_inline void load_sender(struct __sk_buff *skb, __u8 *mac)
{
	struct ethhdr *eth = packet_data(skb);

	if ((void *)(eth + 1) <= packet_end(skb))
		__builtin_memcpy(mac, eth->h_source, ETH_ALEN);
}

/* What arrives from elsewhere for no pod: a request to a service, or an answer
 * to one that was sent on; through the tunnel come answers only. Returns 0, with
 * t->active where it is one of these, or a drop reason. */
static SUBPROGRAM int translate_far(struct __sk_buff *skb, struct scratch *s, bool tunnel)
{
	struct translation *t;
	struct service_flow *f;
	struct packet *p;
	__u32 now;
	int err;

	if (!s)
		return 0;
	p = &s->packet;
	t = &s->translation;
	if (p->icmp_error)
		return translate_error(skb, s, DIRECTION_INGRESS, false);
	if (!is_translatable(p->protocol) ||
	    ((p->first_fragment || p->later_fragment) && !fragment_ports(p)))
		return 0;
	now = now_seconds();
	flow_key_of(&t->key, p);
	f = flow_find(t, p, now);
	if (f && !may_arrive(f, p, tunnel))
		return DROP_SPOOFED_ADDRESS;
	if (f) {
		t->to = *f;
		t->active = true;
		flow_touch(&t->key, f, p, now);
	} else if (!tunnel) {
		load_sender(skb, t->to.mac);
		err = far_begin(t, p, dsr_fits(skb, p), now);
		if (err || !t->active)
			return err;
	} else {
		return 0;
	}
	packet_becomes(p, t);
	return 0;
}

/* Gives an answer of a connection with CT_SERVICE, whose tuple conntrack knows,
 * the ends that the client knows. */
static SUBPROGRAM int translate_answer(struct scratch *s)
{
	struct translation *t;
	struct service_flow *f;
	__u32 now = now_seconds();

	if (!s)
		return 0;
	t = &s->translation;
	flow_key_of(&t->key, &s->packet);
	f = flow_find(t, &s->packet, now);
	if (!f || !(f->flags & FLOW_REPLY))
		return 0;
	t->to = *f;
	t->active = true;
	flow_touch(&t->key, f, &s->packet, now);
	packet_becomes(&s->packet, t);
	return 0;
}

/* What a process of this node sends, where it answers for a service. */
static SUBPROGRAM int translate_own(struct __sk_buff *skb, struct scratch *s)
{
	struct packet *p;

	if (!s)
		return 0;
	p = &s->packet;
	if (p->icmp_error)
		return translate_error(skb, s, DIRECTION_EGRESS, false);
	if (!is_translatable(p->protocol) ||
	    ((p->first_fragment || p->later_fragment) && !fragment_ports(p)))
		return 0;
	return translate_answer(s);
}

/* The client of a connection that is answered directly has answered the SYN+ACK
 * for the first time; its packets do not meet the flow otherwise. */
static SUBPROGRAM int dsr_established(struct scratch *s)
{
	struct service_flow *f;
	struct flow_key *key;

	if (!s)
		return 0;
	key = &s->translation.back_key;
	flow_key_back(key, &s->packet);
	f = bpf_map_lookup_elem(&weft_service_flows, key);
	if (f && f->flags & FLOW_DSR)
		__sync_fetch_and_or(&f->flags, FLOW_ESTABLISHED);
	return 0;
}

/* The client's packets among which the one is that answers the SYN+ACK. */
#define HANDSHAKE_PACKETS 4

/* Whether the entry was made for this packet. */
static __always_inline bool is_first(const struct ct_entry *ct)
{
	return ct->packets[0] + ct->packets[1] <= 1;
}

/* What follows when conntrack has let the packet pass as one of *ct: answers are
 * translated, and the entries of translated connections say that they are. */
static __always_inline int translate_tracked(struct __sk_buff *skb, struct scratch *s,
					     struct ct_entry *ct, __u8 direction)
{
	struct translation *t = &s->translation;

	if (!ct)
		return 0;
	if (t->moved || t->dsr) {
		if (!(ct->flags & CT_SERVICE))
			__sync_fetch_and_or(&ct->flags, CT_SERVICE);
		return 0;
	}
	if (s->packet.icmp_error)
		return ct->flags & CT_SERVICE ? translate_error(skb, s, direction, false) : 0;
	if (!(ct->flags & CT_SERVICE) && !is_first(ct))
		return 0;
	/* who answers may have been first where conntrack had forgotten */
	translate_answer(s);
	if (t->active) {
		if (!(ct->flags & CT_SERVICE))
			__sync_fetch_and_or(&ct->flags, CT_SERVICE);
		return 0;
	}
	if (ct->packets[0] <= HANDSHAKE_PACKETS && ct->flags & CT_ESTABLISHED)
		return dsr_established(s);
	return 0;
}
