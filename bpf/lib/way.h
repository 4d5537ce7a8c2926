// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Ways off this node: to another node by its address, through the tunnel, or
 * wherever the kernel's routes lead. */

/* The largest L3 packet, in bytes, on the way to an address of which the ipcache
 * says *to. */
static __always_inline __u32 way_mtu(const struct ipcache_entry *to)
{
	return tunnel_ifindex && to && to->flags & IPCACHE_POD ? tunnel_mtu : uplink_mtu;
}

/* Whether the packet does not fit a way of this MTU, which p then holds. */
static __always_inline bool is_too_big(struct __sk_buff *skb, struct packet *p, __u32 mtu)
{
	p->mtu = mtu;
	return wire_len(skb, p) > mtu && p->dont_fragment;
}

/* To a pod or process of another node: by the node's own address as next hop. */
static __always_inline int forward_native(struct __sk_buff *skb, const struct packet *p,
					  const struct ipcache_entry *to, __u8 direction, __u32 way)
{
	struct bpf_redir_neigh next = {};

	if (p->v4) {
		next.nh_family = AF_INET;
		next.ipv4_nh = to->next_hop4;
		if (!next.ipv4_nh)
			return drop(skb, p, direction, DROP_NO_NEXT_HOP);
	} else {
		next.nh_family = AF_INET6;
		__builtin_memcpy(next.ipv6_nh, &to->next_hop6, sizeof(next.ipv6_nh));
		if (addr_is_zero(&to->next_hop6))
			return drop(skb, p, direction, DROP_NO_NEXT_HOP);
	}
	if (next_hop_header(skb, p, NULL, NULL))
		return drop(skb, p, direction, DROP_REWRITE);
	count(way, skb->len);
	return bpf_redirect_neigh(uplink_ifindex, &next, sizeof(next), 0);
}

static __always_inline int forward_tunnel(struct __sk_buff *skb, const struct packet *p,
					  const struct ipcache_entry *to, __u8 direction, __u32 way)
{
	int err = tunnel_key(skb, to);

	if (err)
		return drop(skb, p, direction, err);
	if (next_hop_header(skb, p, tunnel_mac, tunnel_mac))
		return drop(skb, p, direction, DROP_REWRITE);
	skb->mark = MARK_ENCAPSULATED;
	count(way, skb->len);
	return bpf_redirect(tunnel_ifindex, 0);
}

/* Where the kernel's routes lead. */
static __always_inline int forward_routed(struct __sk_buff *skb, const struct packet *p,
					  __u8 direction, __u32 way)
{
	int err = next_hop_header(skb, p, NULL, NULL);

	if (err)
		return drop(skb, p, direction, err);
	count(way, skb->len);
	return bpf_redirect_neigh(uplink_ifindex, NULL, 0, 0);
}
