// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Pods of this node and what is known of every other address. */

struct endpoint {
	__u32 ifindex; /* host side of the pod's veth pair */
	__u32 subject; /* of policy; 0: none selects the pod */
	__u64 identity;
	__u8 mac[ETH_ALEN];      /* pod side */
	__u8 host_mac[ETH_ALEN]; /* host side */
	__u8 pad2[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct addr);
	__type(value, struct endpoint);
} weft_endpoints SEC(".maps");

/* Identities below 256 are reserved; internal/identity names them. */
#define IDENTITY_NODE 1
#define IDENTITY_REMOTE_NODE 2
#define IDENTITY_WORLD 3
#define IDENTITY_UNKNOWN 4

enum ipcache_flag {
	IPCACHE_LOCAL_NODE = 1 << 0,    /* an address of this node itself */
	IPCACHE_LOCAL_CIDR = 1 << 1,    /* this node's pod CIDR: a pod, or nothing */
	IPCACHE_POD = 1 << 2,           /* a pod (or pod CIDR) of another node */
	IPCACHE_REMOTE_NODE = 1 << 3,   /* an address of another node */
	IPCACHE_NO_MASQUERADE = 1 << 4, /* outside, but reached with the pod's own address */
};

struct ipcache_key {
	__u32 prefixlen; /* bits, 0 to 128 */
	__be32 addr[4];  /* not struct addr: no padding before it */
};

struct ipcache_entry {
	__u64 identity;
	struct addr next_hop6; /* underlay addresses of the node that holds it; zero: none */
	__be32 next_hop4;
	__u32 flags;
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ipcache_key);
	__type(value, struct ipcache_entry);
} weft_ipcache SEC(".maps");

static __always_inline struct ipcache_entry *ipcache_lookup(const struct addr *a)
{
	struct ipcache_key key = {
		.prefixlen = 128,
		.addr = {a->w[0], a->w[1], a->w[2], a->w[3]},
	};

	return bpf_map_lookup_elem(&weft_ipcache, &key);
}

/* The identity of an address, local pods first. */
static __always_inline __u64 identity_of(const struct addr *a)
{
	struct endpoint *ep = bpf_map_lookup_elem(&weft_endpoints, a);
	struct ipcache_entry *e;

	if (ep)
		return ep->identity;
	e = ipcache_lookup(a);
	return e ? e->identity : IDENTITY_WORLD;
}
