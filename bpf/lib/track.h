// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Conntrack for every kind of packet: whole ones, fragments, ICMP errors. */

/* What a program knows of its packet. Off the stack, which has 512 bytes for a
 * whole chain of calls; these programs run with bottom halves off, so that none
 * interrupts another on its CPU. */
struct scratch {
	struct packet packet;
	struct lookup lookup;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratch_map SEC(".maps");

static __always_inline struct scratch *new_scratch(void)
{
	__u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratch_map, &zero);

	if (s)
		__builtin_memset(s, 0, sizeof(*s));
	return s;
}

/* Whether the quoted packet belongs to the pod that the error comes from or
 * goes to. */
static __always_inline bool quotes_pod(const struct packet *p, const struct packet *q,
				       __u8 direction)
{
	return direction == DIRECTION_EGRESS ? addr_equal(&q->dst, &p->src)
					     : addr_equal(&q->src, &p->dst);
}

/* The connection that an ICMP error is about; NULL where there is none. In a
 * frame of its own: the quoted packet would not fit beside the caller's. */
static SUBPROGRAM struct ct_entry *quoted_connection(struct __sk_buff *skb, const struct packet *p,
						     __u8 direction)
{
	struct packet q = {};

	if (!parse_quoted(skb, p, &q) || !quotes_pod(p, &q, direction))
		return NULL;
	return ct_find(&q);
}

/* Finds the connection of p, or makes it; the caller has filled in direction
 * and subjects of *l. *ct stays NULL for a later fragment whose first was not
 * seen, which the caller may let pass where no port matters; to policy it does.
 * For an ICMP error it is the connection that the error is about. Returns 0 or
 * a drop reason. */
static __always_inline int track(struct __sk_buff *skb, struct packet *p, struct lookup *l,
				 struct ct_entry **ct)
{
	*ct = NULL;
	if ((p->first_fragment || p->later_fragment) && !fragment_ports(p))
		return l->src_subject | l->dst_subject ? DROP_FRAGMENT_UNKNOWN : 0;
	if (!p->icmp_error)
		return conntrack(skb, p, l, ct);
	*ct = quoted_connection(skb, p, l->direction);
	if (!*ct)
		return DROP_ICMP_UNMATCHED;
	return (*ct)->flags & CT_DENIED ? DROP_POLICY : 0;
}

/* A packet that arrived for a pod of this node from elsewhere. */
static __always_inline int to_local_pod(struct __sk_buff *skb, struct scratch *s,
					const struct endpoint *ep, __u32 way)
{
	struct packet *p = &s->packet;
	struct ct_entry *ct;
	int err;

	s->lookup.direction = DIRECTION_INGRESS;
	s->lookup.dst_subject = ep->subject;
	err = p->ttl <= 1 ? DROP_TTL_EXPIRED : track(skb, p, &s->lookup, &ct);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	return deliver(skb, p, ep, DIRECTION_INGRESS, way);
}
