// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* The last steps of a packet: headers of the next hop, redirect, counters. */

/* Set at load time by internal/datapath; addresses are zero where the node has
 * none of the family. */
volatile const __u32 uplink_ifindex = 0;
volatile const __u32 tunnel_ifindex = 0; /* 0: native routing */
volatile const __u32 uplink_mtu = 1500;  /* bytes, of an L3 packet on the uplink */
volatile const __u32 tunnel_mtu = 1450;  /* bytes, of an inner L3 packet */
volatile const __be16 tunnel_port = 0;   /* UDP, network order */
volatile const struct addr node_v4 = {};
volatile const struct addr node_v6 = {};
volatile const struct addr gateway_v4 = {}; /* what pods have as their gateway */
volatile const struct addr gateway_v6 = {};

/* Marks packets that carry their tunnel key already. */
#define MARK_ENCAPSULATED 0x77ef0001

static __always_inline void load_const_addr(struct addr *to, const volatile struct addr *from)
{
	to->d[0] = from->d[0];
	to->d[1] = from->d[1];
}

static __always_inline void node_addr(struct addr *to, bool v4)
{
	load_const_addr(to, v4 ? &node_v4 : &node_v6);
}

/* Decrements the TTL or hop limit, which must be above 1, and writes the MAC
 * addresses where dst_mac is not NULL. */
static __always_inline int next_hop_header(struct __sk_buff *skb, const struct packet *p,
					   const __u8 *dst_mac, const __u8 *src_mac)
{
	void *data = packet_data(skb);
	struct ethhdr *eth = data;

	if (data + ETH_HLEN + sizeof(struct ipv6hdr) > packet_end(skb)) {
		/* an IPv4 packet may be shorter than an IPv6 header */
		if (!p->v4 || data + ETH_HLEN + sizeof(struct iphdr) > packet_end(skb))
			return DROP_REWRITE;
	}
	if (dst_mac) {
		__builtin_memcpy(eth->h_dest, dst_mac, ETH_ALEN);
		__builtin_memcpy(eth->h_source, src_mac, ETH_ALEN);
	}
	if (p->v4) {
		struct iphdr *ip = data + ETH_HLEN;
		/* RFC 1624: the TTL is the upper byte of its word */
		__u32 check = ip->check;

		check += bpf_htons(0x0100);
		ip->check = check + (check >= 0xffff);
		ip->ttl--;
	} else {
		struct ipv6hdr *ip = data + ETH_HLEN;

		if ((void *)(ip + 1) > packet_end(skb))
			return DROP_REWRITE;
		ip->hop_limit--;
	}
	return 0;
}

/* Hands the packet to a pod of this node, past the host side of its veth. */
static __always_inline int deliver(struct __sk_buff *skb, const struct packet *p,
				   const struct endpoint *ep, __u8 direction, __u32 way)
{
	int err = next_hop_header(skb, p, ep->mac, ep->host_mac);

	if (err)
		return drop(skb, p, direction, err);
	count(way, skb->len);
	return bpf_redirect_peer(ep->ifindex, 0);
}
