// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* The deny list: what its networks send to this node is dropped before anything
 * else looks at it. The map is the list; the agent changes and shows it. */

struct deny_key {
	__u32 prefixlen; /* bits, 0 to 128 */
	__be32 addr[4];
};

struct deny_entry {
	__u32 counter;   /* place in weft_denied */
	__u32 prefixlen; /* as in the key */
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct deny_key);
	__type(value, struct deny_entry);
} weft_deny SEC(".maps");

/* What each entry of the list dropped. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct counter);
} weft_denied SEC(".maps");

/* Bits of an address in front of an IPv4 one: a shorter prefix is of IPv6 alone. */
#define V4_PREFIX 96

/* Whether the list has the sender of a packet of len bytes, which is counted
 * then. */
static __always_inline bool denied(const struct addr *src, __u64 len)
{
	struct deny_key key = {
		.prefixlen = 128,
		.addr = {src->w[0], src->w[1], src->w[2], src->w[3]},
	};
	struct deny_entry *e = bpf_map_lookup_elem(&weft_deny, &key);
	struct counter *c;
	__u32 at;

	if (!e || (e->prefixlen < V4_PREFIX && is_v4(src)))
		return false;
	at = e->counter;
	c = bpf_map_lookup_elem(&weft_denied, &at);
	if (c) {
		c->packets++;
		c->bytes += len;
	}
	count(DROP_DENIED, len);
	return true;
}
