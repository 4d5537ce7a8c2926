// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Conntrack for every kind of packet: whole ones, fragments, ICMP errors. */

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

/* Finds the connection of p, or makes it. *ct stays NULL for a later fragment
 * whose first was not seen, which the caller may let pass where no port
 * matters. For an ICMP error it is the connection that the error is about.
 * Returns 0 or a drop reason. */
static __always_inline int track(struct __sk_buff *skb, struct packet *p, __u8 direction,
				 struct ct_entry **ct, bool *reply)
{
	*ct = NULL;
	*reply = false;
	if ((p->first_fragment || p->later_fragment) && !fragment_ports(p))
		return 0;
	if (!p->icmp_error)
		return conntrack(skb, p, direction, ct, reply);
	*ct = quoted_connection(skb, p, direction);
	return *ct ? 0 : DROP_ICMP_UNMATCHED;
}

/* A packet that arrived for a pod of this node from elsewhere. */
static __always_inline int to_local_pod(struct __sk_buff *skb, struct packet *p,
					const struct endpoint *ep, __u32 way)
{
	struct ct_entry *ct;
	bool reply;
	int err;

	err = p->ttl <= 1 ? DROP_TTL_EXPIRED : track(skb, p, DIRECTION_INGRESS, &ct, &reply);
	if (err)
		return drop(skb, p, DIRECTION_INGRESS, err);
	return deliver(skb, p, ep, DIRECTION_INGRESS, way);
}
