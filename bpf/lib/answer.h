// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Answers that the datapath itself sends to a pod, or to who sent a packet for a
 * service to this node. */

#define ICMP_DEST_UNREACH 3
#define ICMP_PORT_UNREACH 3
#define ICMP_FRAG_NEEDED 4
#define ICMP_TIME_EXCEEDED 11
#define ICMPV6_DEST_UNREACH 1
#define ICMPV6_PORT_UNREACH 4
#define ICMPV6_PKT_TOOBIG 2
#define ICMPV6_TIME_EXCEED 3

/* Quoted bytes: the IP header and 20 bytes behind it (a whole TCP header, which
 * also holds the checksum that the kernel may still have to fill in), or 8 of a
 * shorter packet. */
#define QUOTE_LONG 20
#define QUOTE_SHORT 8

static __always_inline int swap_macs(struct __sk_buff *skb)
{
	__u8 macs[2 * ETH_ALEN], swapped[2 * ETH_ALEN];

	if (bpf_skb_load_bytes(skb, 0, macs, sizeof(macs)))
		return DROP_MALFORMED;
	__builtin_memcpy(swapped, macs + ETH_ALEN, ETH_ALEN);
	__builtin_memcpy(swapped + ETH_ALEN, macs, ETH_ALEN);
	return bpf_skb_store_bytes(skb, 0, swapped, sizeof(swapped), 0) ? DROP_REWRITE : 0;
}

/* Sends the frame, an answer to who sent the skb, back there. */
static __always_inline int answer(struct __sk_buff *skb)
{
	count(FORWARD_REPLY, skb->len);
	if (skb->ifindex == uplink_ifindex)
		return bpf_redirect(uplink_ifindex, 0);
	bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(skb->ifindex, 0);
}

struct icmp4_error {
	struct iphdr ip;
	struct icmphdr icmp;
};

struct icmp6_error {
	struct ipv6hdr ip;
	struct icmp6hdr icmp;
};

static __always_inline int answer_icmp4(struct __sk_buff *skb, const struct packet *p,
					const struct addr *from, __u8 type, __u8 code, __u16 mtu)
{
	__u8 quote[sizeof(struct iphdr) + QUOTE_LONG] = {};
	struct icmp4_error h = {};
	__u32 len = sizeof(struct iphdr) + QUOTE_SHORT;

	if (skb->len >= ETH_HLEN + sizeof(quote)) {
		len = sizeof(quote);
		if (bpf_skb_load_bytes(skb, ETH_HLEN, quote, sizeof(quote)))
			return DROP_MALFORMED;
	} else if (bpf_skb_load_bytes(skb, ETH_HLEN, quote, sizeof(struct iphdr) + QUOTE_SHORT)) {
		return DROP_MALFORMED;
	}
	h.ip.version = 4;
	h.ip.ihl = 5;
	h.ip.tot_len = bpf_htons(sizeof(h) + len);
	h.ip.ttl = 64;
	h.ip.protocol = IPPROTO_ICMP;
	h.ip.saddr = from->w[3];
	h.ip.daddr = p->src.w[3];
	h.ip.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&h.ip, sizeof(h.ip), 0));
	h.icmp.type = type;
	h.icmp.code = code;
	h.icmp.un.frag.mtu = bpf_htons(mtu);
	/* the zero bytes behind a short quote do not change the sum */
	h.icmp.checksum = csum_fold(
		bpf_csum_diff(NULL, 0, (__be32 *)quote, sizeof(quote),
			      bpf_csum_diff(NULL, 0, (__be32 *)&h.icmp, sizeof(h.icmp), 0)));
	if (bpf_skb_change_tail(skb, ETH_HLEN + len, 0) ||
	    bpf_skb_adjust_room(skb, sizeof(h), BPF_ADJ_ROOM_MAC, 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &h, sizeof(h), 0))
		return DROP_REWRITE;
	return swap_macs(skb);
}

static __always_inline int answer_icmp6(struct __sk_buff *skb, const struct packet *p,
					const struct addr *from, __u8 type, __u8 code, __u32 mtu)
{
	__u8 quote[sizeof(struct ipv6hdr) + QUOTE_LONG] = {};
	struct icmp6_error h = {};
	__u32 len = sizeof(struct ipv6hdr) + QUOTE_SHORT;
	__be32 pseudo[2];
	__s64 sum;

	if (skb->len >= ETH_HLEN + sizeof(quote)) {
		len = sizeof(quote);
		if (bpf_skb_load_bytes(skb, ETH_HLEN, quote, sizeof(quote)))
			return DROP_MALFORMED;
	} else if (bpf_skb_load_bytes(skb, ETH_HLEN, quote, sizeof(struct ipv6hdr) + QUOTE_SHORT)) {
		return DROP_MALFORMED;
	}
	h.ip.version = 6;
	h.ip.payload_len = bpf_htons(sizeof(h.icmp) + len);
	h.ip.nexthdr = IPPROTO_ICMPV6;
	h.ip.hop_limit = 64;
	__builtin_memcpy(&h.ip.saddr, from, sizeof(*from));
	__builtin_memcpy(&h.ip.daddr, &p->src, sizeof(p->src));
	h.icmp.icmp6_type = type;
	h.icmp.icmp6_code = code;
	h.icmp.icmp6_dataun.un_data32[0] = bpf_htonl(mtu);
	pseudo[0] = bpf_htonl(sizeof(h.icmp) + len);
	pseudo[1] = bpf_htonl(IPPROTO_ICMPV6);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&h.ip.saddr, 32, 0);
	sum = bpf_csum_diff(NULL, 0, pseudo, sizeof(pseudo), sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&h.icmp, sizeof(h.icmp), sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)quote, sizeof(quote), sum);
	h.icmp.icmp6_cksum = csum_fold(sum);
	if (bpf_skb_change_tail(skb, ETH_HLEN + len, 0) ||
	    bpf_skb_adjust_room(skb, sizeof(h), BPF_ADJ_ROOM_MAC, 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &h, sizeof(h), 0))
		return DROP_REWRITE;
	return swap_macs(skb);
}

static __always_inline int answer_reason4(struct __sk_buff *skb, const struct packet *p,
					  const struct addr *from, __u8 reason)
{
	__u8 type = ICMP_DEST_UNREACH, code = ICMP_PORT_UNREACH;
	__u16 mtu = 0;

	if (reason == DROP_TOO_BIG) {
		code = ICMP_FRAG_NEEDED;
		mtu = p->mtu;
	} else if (reason == DROP_TTL_EXPIRED) {
		type = ICMP_TIME_EXCEEDED;
		code = 0;
	}
	return answer_icmp4(skb, p, from, type, code, mtu);
}

static __always_inline int answer_reason6(struct __sk_buff *skb, const struct packet *p,
					  const struct addr *from, __u8 reason)
{
	__u8 type = ICMPV6_DEST_UNREACH, code = ICMPV6_PORT_UNREACH;
	__u32 mtu = 0;

	if (reason == DROP_TOO_BIG) {
		type = ICMPV6_PKT_TOOBIG;
		code = 0;
		mtu = p->mtu;
	} else if (reason == DROP_TTL_EXPIRED) {
		type = ICMPV6_TIME_EXCEED;
		code = 0;
	}
	return answer_icmp6(skb, p, from, type, code, mtu);
}

/* Drops a packet for reason and answers its sender with the ICMP error of its
 * family; what has no backend is refused by the address that it was sent to. No
 * error is sent about an error or a later fragment, or what came to more than
 * one machine (RFC 1122, 3.2.2), or where the node has no address to send it
 * from. DROP_TOO_BIG wants p->mtu. */
static SUBPROGRAM int answer_error(struct __sk_buff *skb, const struct packet *p, __u8 reason)
{
	bool uplink = skb->ifindex == uplink_ifindex;
	struct addr from;
	int err;

	if (!p)
		return TCX_DROP;
	count(reason, skb->len);
	emit(skb, p, EVENT_DROP, uplink ? DIRECTION_INGRESS : DIRECTION_EGRESS, reason,
	     identity_of(&p->src), identity_of(&p->dst), 1, skb->len);
	node_addr(&from, p->v4);
	if (reason == DROP_NO_BACKEND)
		from = p->dst;
	if (p->icmp_error || p->later_fragment || addr_is_zero(&from) ||
	    (uplink && skb->pkt_type != PACKET_HOST))
		return TCX_DROP;
	err = p->v4 ? answer_reason4(skb, p, &from, reason) : answer_reason6(skb, p, &from, reason);
	if (err)
		return TCX_DROP;
	return answer(skb);
}
