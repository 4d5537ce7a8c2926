// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Other nodes, by their addresses: where on the uplink a frame to them goes.
 * (bpf_fib_lookup wants forwarding to be on, which it is not on a node.) The
 * agent keeps it like the kernel's neighbour table; who is not in it is left to
 * tcx. */

struct neighbor {
	__u8 mac[ETH_ALEN]; /* of the node, or of the router before it */
	__u8 pad[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct neighbor);
} weft_neighbors SEC(".maps");

/* The next hop towards a pod of another node, or towards the node; NULL where
 * it is not known. */
static __always_inline struct neighbor *neighbor_to(const struct addr *dst, bool v4)
{
	struct ipcache_entry *to = ipcache_lookup(dst);
	struct addr hop;

	if (!to)
		return NULL;
	if (to->flags & IPCACHE_REMOTE_NODE)
		return bpf_map_lookup_elem(&weft_neighbors, dst);
	if (!(to->flags & IPCACHE_POD))
		return NULL;
	if (v4)
		addr_from_v4(&hop, to->next_hop4);
	else
		hop = to->next_hop6;
	return bpf_map_lookup_elem(&weft_neighbors, &hop);
}
