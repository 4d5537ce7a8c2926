// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* VXLAN between nodes: one network identifier, the outer addresses are the
 * nodes' own, the inner Ethernet addresses mean nothing. */

#define TUNNEL_VNI 1

/* Locally administered, the same on every node. */
static const __u8 tunnel_mac[ETH_ALEN] = {0x02, 0x77, 0x65, 0x66, 0x74, 0x01};

/* Sets the outer header for a packet to the node of *to. IPv4 is preferred. */
static __always_inline int tunnel_key(struct __sk_buff *skb, const struct ipcache_entry *to)
{
	struct bpf_tunnel_key key = {.tunnel_id = TUNNEL_VNI, .tunnel_ttl = 64};
	__u64 flags = BPF_F_ZERO_CSUM_TX;

	if (to->next_hop4) {
		key.remote_ipv4 = bpf_ntohl(to->next_hop4);
	} else if (!addr_is_zero(&to->next_hop6)) {
		__builtin_memcpy(key.remote_ipv6, &to->next_hop6, sizeof(key.remote_ipv6));
		flags = BPF_F_TUNINFO_IPV6;
	} else {
		return DROP_NO_NEXT_HOP;
	}
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), flags) ? DROP_REWRITE : 0;
}
