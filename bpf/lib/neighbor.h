// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* ARP (RFC 826) and neighbour discovery (RFC 4861) for the pods' gateway, which
 * no device of the node has: the host side of the pod's own veth answers. */

#define ARP_REQUEST 1
#define ARP_REPLY 2
#define ND_SOLICIT 135
#define ND_ADVERT 136
#define ND_TARGET_LLADDR 2
#define ND_FLAGS_ROUTER_SOLICITED_OVERRIDE 0xe0000000

struct arp {
	__be16 hardware, protocol;
	__u8 hardware_len, protocol_len;
	__be16 operation;
	__u8 sender_mac[ETH_ALEN];
	__u8 sender_ip[4];
	__u8 target_mac[ETH_ALEN];
	__u8 target_ip[4];
};

static __always_inline struct endpoint *own_endpoint(struct __sk_buff *skb, const struct addr *a)
{
	struct endpoint *ep = bpf_map_lookup_elem(&weft_endpoints, a);

	return ep && ep->ifindex == skb->ifindex ? ep : NULL;
}

static __always_inline int write_eth(struct __sk_buff *skb, const __u8 *dst, const __u8 *src)
{
	__u8 macs[2 * ETH_ALEN];

	__builtin_memcpy(macs, dst, ETH_ALEN);
	__builtin_memcpy(macs + ETH_ALEN, src, ETH_ALEN);
	return bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0) ? DROP_REWRITE : 0;
}

static SUBPROGRAM int from_pod_arp(struct __sk_buff *skb)
{
	struct packet p = {.v4 = true};
	struct addr gateway;
	struct endpoint *ep;
	struct arp arp;
	__be32 ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &arp, sizeof(arp)))
		return drop(skb, &p, DIRECTION_EGRESS, DROP_MALFORMED);
	__builtin_memcpy(&ip, arp.sender_ip, 4);
	addr_from_v4(&p.src, ip);
	__builtin_memcpy(&ip, arp.target_ip, 4);
	addr_from_v4(&p.dst, ip);
	load_const_addr(&gateway, &gateway_v4);
	if (arp.operation != bpf_htons(ARP_REQUEST) || !addr_equal(&p.dst, &gateway)) {
		count(FORWARD_MULTICAST, skb->len);
		return TCX_DROP;
	}
	ep = own_endpoint(skb, &p.src);
	if (!ep)
		return drop(skb, &p, DIRECTION_EGRESS, DROP_SPOOFED_ADDRESS);
	arp.operation = bpf_htons(ARP_REPLY);
	__builtin_memcpy(arp.target_ip, arp.sender_ip, 4);
	__builtin_memcpy(arp.target_mac, arp.sender_mac, ETH_ALEN);
	__builtin_memcpy(arp.sender_ip, &gateway.w[3], 4);
	__builtin_memcpy(arp.sender_mac, ep->host_mac, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, ETH_HLEN, &arp, sizeof(arp), 0) ||
	    write_eth(skb, ep->mac, ep->host_mac))
		return drop(skb, &p, DIRECTION_EGRESS, DROP_REWRITE);
	return answer(skb);
}

struct nd_advert {
	struct ipv6hdr ip;
	__u8 type, code;
	__be16 check;
	__be32 flags;
	struct addr target;
	__u8 option, option_len; /* in units of 8 bytes */
	__u8 mac[ETH_ALEN];
};

#define ND_MESSAGE_LEN (sizeof(struct nd_advert) - sizeof(struct ipv6hdr))

/* Finds the MAC addresses for the answer to a solicitation: of the pod whose
 * address the sender is, or, for a link-local sender, as the frame has them
 * where it came by unicast: that is how Linux probes a neighbour it knows.
 * Returns 0, FORWARD_MULTICAST to ignore it, or a drop reason. */
static __always_inline int nd_macs(struct __sk_buff *skb, const struct packet *p, __u8 *pod,
				   __u8 *host)
{
	struct endpoint *ep = own_endpoint(skb, &p->src);
	struct ethhdr eth;

	if (ep) {
		__builtin_memcpy(pod, ep->mac, ETH_ALEN);
		__builtin_memcpy(host, ep->host_mac, ETH_ALEN);
		return 0;
	}
	if (!is_link_local(&p->src))
		return DROP_SPOOFED_ADDRESS;
	if (bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)))
		return DROP_MALFORMED;
	if (eth.h_dest[0] & 1)
		return FORWARD_MULTICAST;
	__builtin_memcpy(pod, eth.h_source, ETH_ALEN);
	__builtin_memcpy(host, eth.h_dest, ETH_ALEN);
	return 0;
}

/* Handles a neighbour solicitation of a pod; any other than for the gateway is
 * ignored (duplicate address detection among them). */
static SUBPROGRAM int from_pod_nd(struct __sk_buff *skb, const struct packet *p)
{
	struct nd_advert a = {};
	struct addr target, gateway;
	__u8 pod[ETH_ALEN];
	__be32 pseudo[2];
	__s64 sum;
	int err;

	if (!p)
		return TCX_DROP;
	load_const_addr(&gateway, &gateway_v6);
	if (bpf_skb_load_bytes(skb, p->l4_off + 8, &target, sizeof(target)))
		return drop(skb, p, DIRECTION_EGRESS, DROP_MALFORMED);
	if (!addr_equal(&target, &gateway) || addr_is_zero(&p->src)) {
		count(FORWARD_MULTICAST, skb->len);
		return TCX_DROP;
	}
	err = nd_macs(skb, p, pod, a.mac);
	if (err == FORWARD_MULTICAST) {
		count(FORWARD_MULTICAST, skb->len);
		return TCX_DROP;
	}
	if (err)
		return drop(skb, p, DIRECTION_EGRESS, err);
	a.ip.version = 6;
	a.ip.payload_len = bpf_htons(ND_MESSAGE_LEN);
	a.ip.nexthdr = IPPROTO_ICMPV6;
	a.ip.hop_limit = 255;
	__builtin_memcpy(&a.ip.saddr, &gateway, sizeof(gateway));
	__builtin_memcpy(&a.ip.daddr, &p->src, sizeof(p->src));
	a.type = ND_ADVERT;
	a.flags = bpf_htonl(ND_FLAGS_ROUTER_SOLICITED_OVERRIDE);
	a.target = gateway;
	a.option = ND_TARGET_LLADDR;
	a.option_len = 1;
	pseudo[0] = bpf_htonl(ND_MESSAGE_LEN);
	pseudo[1] = bpf_htonl(IPPROTO_ICMPV6);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&a.ip.saddr, 32, 0);
	sum = bpf_csum_diff(NULL, 0, pseudo, sizeof(pseudo), sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&a.type, ND_MESSAGE_LEN, sum);
	a.check = csum_fold(sum);
	if (bpf_skb_change_tail(skb, ETH_HLEN + sizeof(a), 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &a, sizeof(a), 0) || write_eth(skb, pod, a.mac))
		return drop(skb, p, DIRECTION_EGRESS, DROP_REWRITE);
	return answer(skb);
}
