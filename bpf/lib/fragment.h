// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Ports of fragmented datagrams, remembered from their first fragment. */

struct fragment_key {
	struct addr src, dst;
	__u32 id;
	__u8 protocol;
	__u8 pad[3];
};

struct fragment_ports {
	__be16 sport, dport;
	__u32 seen; /* s; see clock.h */
};

/* How long a receiver waits for the rest of a datagram at most: half of what
 * Linux does, for identifiers come round. */
#define FRAGMENT_SECONDS 15

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct fragment_key);
	__type(value, struct fragment_ports);
} weft_fragments SEC(".maps");

/* Remembers the ports of a first fragment and fills in those of a later one.
 * Returns false where a later fragment's first was not seen. */
static __always_inline bool fragment_ports(struct packet *p)
{
	struct fragment_key key = {
		.src = p->src,
		.dst = p->dst,
		.id = p->fragment_id,
		.protocol = p->protocol,
	};
	struct fragment_ports ports = {
		.sport = p->sport,
		.dport = p->dport,
		.seen = now_seconds(),
	};
	struct fragment_ports *known;

	if (p->first_fragment) {
		bpf_map_update_elem(&weft_fragments, &key, &ports, BPF_ANY);
		return true;
	}
	known = bpf_map_lookup_elem(&weft_fragments, &key);
	if (!known || ports.seen - known->seen > FRAGMENT_SECONDS)
		return false;
	p->sport = known->sport;
	p->dport = known->dport;
	return true;
}
