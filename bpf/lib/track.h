// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Conntrack for every kind of packet: whole ones, fragments, ICMP errors. */

/* The connection that an ICMP error is about; NULL where there is none. */
static SUBPROGRAM struct ct_entry *quoted_connection(struct __sk_buff *skb, struct scratch *s)
{
	struct packet *p, *q;

	if (!s)
		return NULL;
	p = &s->packet;
	q = &s->quoted;
	__builtin_memset(q, 0, sizeof(*q));
	if (!parse_quoted(skb, p, q) || !quotes_own(p, q, s->lookup.direction))
		return NULL;
	return ct_find(q);
}

/* Finds the connection of the packet, or makes it; the caller has filled in
 * direction and subjects of s->lookup. *ct stays NULL for a later fragment whose
 * first was not seen, which the caller may let pass where no port matters; to
 * policy it does. For an ICMP error it is the connection that the error is about.
 * Returns 0 or a drop reason. */
static __always_inline int track(struct __sk_buff *skb, struct scratch *s, struct ct_entry **ct)
{
	struct packet *p = &s->packet;
	struct lookup *l = &s->lookup;

	*ct = NULL;
	if ((p->first_fragment || p->later_fragment) && !fragment_ports(p))
		return l->src_subject | l->dst_subject ? DROP_FRAGMENT_UNKNOWN : 0;
	if (!p->icmp_error)
		return conntrack(skb, p, l, ct);
	*ct = quoted_connection(skb, s);
	if (!*ct)
		return DROP_ICMP_UNMATCHED;
	return (*ct)->flags & CT_DENIED ? DROP_POLICY : 0;
}

/* A packet that arrived for a pod of this node from elsewhere. */
static SUBPROGRAM int to_local_pod(struct __sk_buff *skb, struct scratch *s,
				   const struct endpoint *ep, __u32 way)
{
	struct ct_entry *ct = NULL;
	struct packet *p;
	int err;

	if (!s || !ep)
		return TCX_DROP;
	p = &s->packet;
	s->lookup.direction = DIRECTION_INGRESS;
	s->lookup.dst_subject = ep->subject;
	err = p->ttl <= 1 ? DROP_TTL_EXPIRED : track(skb, s, &ct);
	if (!err)
		err = translate_tracked(skb, s, ct, DIRECTION_INGRESS);
	if (!err)
		err = rewrite(skb, s);
	if (err) {
		flow_undo(&s->translation);
		return drop(skb, p, DIRECTION_INGRESS, err);
	}
	return deliver(skb, p, ep, DIRECTION_INGRESS, way);
}
