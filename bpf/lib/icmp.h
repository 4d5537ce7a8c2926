// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* The packets quoted in ICMP errors. */

#define ICMP_HLEN 8

/* Reads the packet quoted in the ICMP error p into *q, which must be zero:
 * addresses, protocol, ports, and l4_off in this frame. Returns false where it
 * is cut off, or a later fragment whose first was not seen. */
static __always_inline bool parse_quoted(struct __sk_buff *skb, const struct packet *p,
					 struct packet *q)
{
	__u32 off = p->l4_off + ICMP_HLEN;
	__be16 head[4];

	q->v4 = p->v4;
	if (p->v4) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
			return false;
		addr_from_v4(&q->src, ip.saddr);
		addr_from_v4(&q->dst, ip.daddr);
		q->protocol = ip.protocol;
		q->l4_off = off + ip.ihl * 4;
		q->later_fragment = bpf_ntohs(ip.frag_off) & IP_OFFSET;
		q->fragment_id = (__u32)ip.id << 16;
	} else {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)) || ip.version != 6)
			return false;
		addr_from_v6(&q->src, &ip.saddr);
		addr_from_v6(&q->dst, &ip.daddr);
		q->protocol = ip.nexthdr;
		q->l4_off = off + sizeof(ip);
		if (skip_extensions(skb, q))
			return false;
	}
	if (q->later_fragment)
		return fragment_ports(q);
	if (bpf_skb_load_bytes(skb, q->l4_off, head, sizeof(head)))
		return false;
	switch (q->protocol) {
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		q->sport = head[2];
		q->dport = head[2];
		break;
	case IPPROTO_TCP:
	case IPPROTO_UDP:
	case IPPROTO_SCTP:
		q->sport = head[0];
		q->dport = head[1];
	}
	return true;
}

/* Whether the quoted packet belongs to who sends the error, or gets it. */
static __always_inline bool quotes_own(const struct packet *p, const struct packet *q,
				       __u8 direction)
{
	return direction == DIRECTION_EGRESS ? addr_equal(&q->dst, &p->src)
					     : addr_equal(&q->src, &p->dst);
}

/* Replaces the source (or destination) of the quoted packet q, its port
 * included, and keeps the quoted IPv4 header's and the ICMP checksum right.
 * The quoted L4 checksum stays as it was: its coverage is cut off. */
static __always_inline int replace_quoted(struct __sk_buff *skb, const struct packet *p,
					  const struct packet *q, bool source,
					  const struct addr *to, __be16 to_port)
{
	const struct addr *from = source ? &q->src : &q->dst;
	__be16 from_port = source ? q->sport : q->dport;
	__u32 ip_off = p->l4_off + ICMP_HLEN, port_off = q->l4_off + (source ? 0 : 2);
	__u32 icmp_csum = p->l4_off + 2;

	if (q->protocol == IPPROTO_ICMP || q->protocol == IPPROTO_ICMPV6)
		port_off = q->l4_off + 4;
	if (p->v4) {
		/* the quoted header's sum does not change, so neither does ICMP's */
		if (bpf_l3_csum_replace(skb, ip_off + offsetof(struct iphdr, check), from->w[3],
					to->w[3], 4) ||
		    bpf_skb_store_bytes(skb,
					ip_off + (source ? offsetof(struct iphdr, saddr)
							 : offsetof(struct iphdr, daddr)),
					&to->w[3], 4, 0))
			return DROP_REWRITE;
	} else {
		__s64 diff = bpf_csum_diff((__be32 *)from->b, 16, (__be32 *)to->b, 16, 0);

		if (bpf_l4_csum_replace(skb, icmp_csum, 0, diff, 0) ||
		    bpf_skb_store_bytes(skb,
					ip_off + (source ? offsetof(struct ipv6hdr, saddr)
							 : offsetof(struct ipv6hdr, daddr)),
					to->b, 16, 0))
			return DROP_REWRITE;
	}
	if (q->later_fragment || from_port == to_port)
		return 0;
	if (bpf_l4_csum_replace(skb, icmp_csum, from_port, to_port, 2) ||
	    bpf_skb_store_bytes(skb, port_off, &to_port, 2, 0))
		return DROP_REWRITE;
	return 0;
}
