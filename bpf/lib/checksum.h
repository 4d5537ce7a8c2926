// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Changing header fields with their checksums. */

#define IP_CSUM_OFF (ETH_HLEN + offsetof(struct iphdr, check))
#define IP_SRC_OFF (ETH_HLEN + offsetof(struct iphdr, saddr))
#define IP_DST_OFF (ETH_HLEN + offsetof(struct iphdr, daddr))
#define IP6_SRC_OFF (ETH_HLEN + offsetof(struct ipv6hdr, saddr))
#define IP6_DST_OFF (ETH_HLEN + offsetof(struct ipv6hdr, daddr))

static __always_inline __u16 csum_fold(__s64 sum)
{
	__u32 s = (__u32)sum;

	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return ~s;
}

/* Offset of the checksum in an L4 header, or -1 where none covers addresses or
 * ports. ICMP's covers no pseudo header. */
static __always_inline int l4_csum_off(__u8 protocol)
{
	switch (protocol) {
	case IPPROTO_TCP:
		return offsetof(struct tcphdr, check);
	case IPPROTO_UDP:
		return offsetof(struct udphdr, check);
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return 2;
	}
	return -1;
}

static __always_inline __u64 l4_csum_flags(__u8 protocol)
{
	return protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
}

/* BPF_F_IPV6 where the kernel has it (6.16): without it the sum that a device
 * computed over an IPv6 packet (CHECKSUM_COMPLETE) goes wrong. */
volatile const __u64 ipv6_csum_flag = 0;

/* Replaces the source (or destination) address and L4 port of the packet.
 * port_off is the port's offset in the L4 header, or -1 for none. A later
 * fragment has only its address replaced. */
static __always_inline int replace_endpoint(struct __sk_buff *skb, const struct packet *p,
					    bool source, const struct addr *to, __be16 from_port,
					    __be16 to_port, int port_off)
{
	const struct addr *from = source ? &p->src : &p->dst;
	int csum = l4_csum_off(p->protocol);
	__u64 flags = l4_csum_flags(p->protocol);
	__s64 diff;

	if (p->later_fragment)
		csum = -1;
	if (p->v4) {
		__u32 off = source ? IP_SRC_OFF : IP_DST_OFF;

		if (bpf_l3_csum_replace(skb, IP_CSUM_OFF, from->w[3], to->w[3], 4))
			return DROP_REWRITE;
		if (csum >= 0 && p->protocol != IPPROTO_ICMP &&
		    bpf_l4_csum_replace(skb, p->l4_off + csum, from->w[3], to->w[3],
					BPF_F_PSEUDO_HDR | flags | 4))
			return DROP_REWRITE;
		if (bpf_skb_store_bytes(skb, off, &to->w[3], 4, 0))
			return DROP_REWRITE;
	} else {
		__u32 off = source ? IP6_SRC_OFF : IP6_DST_OFF;

		diff = bpf_csum_diff((__be32 *)from->b, 16, (__be32 *)to->b, 16, 0);
		if (csum >= 0 && bpf_l4_csum_replace(skb, p->l4_off + csum, 0, diff,
						     BPF_F_PSEUDO_HDR | flags | ipv6_csum_flag))
			return DROP_REWRITE;
		if (bpf_skb_store_bytes(skb, off, to->b, 16, 0))
			return DROP_REWRITE;
	}
	if (port_off < 0 || p->later_fragment || from_port == to_port)
		return 0;
	if (bpf_l4_csum_replace(skb, p->l4_off + csum, from_port, to_port, flags | 2))
		return DROP_REWRITE;
	if (bpf_skb_store_bytes(skb, p->l4_off + port_off, &to_port, 2, 0))
		return DROP_REWRITE;
	return 0;
}
