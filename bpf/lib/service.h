// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Services: what is where, and which backend a connection gets. The agent
 * (internal/services) writes all maps of this file but affinity and the hits of
 * backends: backends first, then slots, then the service that counts them. */

struct service_key {
	struct addr addr;
	__be16 port;
	__u8 protocol;
	__u8 pad[5];
};

/* Backends that clients of one kind choose from; count 0: none is there. */
struct backend_set {
	__u32 id;
	__u32 count;
};

enum service_flag {
	SERVICE_EXTERNAL = 1 << 0,      /* also for clients from outside of the cluster */
	SERVICE_LOCAL = 1 << 1,         /* far clients get backends of this node only */
	SERVICE_SOURCE_RANGES = 1 << 2, /* only for the clients in weft_source_ranges */
};

struct service {
	struct backend_set near; /* for pods and processes of this node */
	struct backend_set far;  /* for what arrives from elsewhere */
	__u32 id;                /* of the service port */
	__u32 affinity;          /* seconds that a client stays with its backend; 0: not at all */
	__u32 flags;
	__u32 maglev; /* entries of the far set's table; 0: it has none */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct service);
} weft_services SEC(".maps");

struct slot_key {
	__u32 set;
	__u32 slot; /* from 0 */
};

/* Values are numbers of backends. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 524288);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct slot_key);
	__type(value, __u32);
} weft_slots SEC(".maps");

/* Only the hits ever change. */
struct backend {
	struct addr addr;
	__be16 port;
	__u8 protocol;
	__u8 pad[5];
	__u64 hits; /* connections that were given to it */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct backend);
} weft_backends SEC(".maps");

/* Maglev tables of far sets: an array of backends for each. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, __u32);
	__array(
		values, struct {
			__uint(type, BPF_MAP_TYPE_ARRAY);
			__uint(map_flags, BPF_F_INNER_MAP);
			__uint(max_entries, 251);
			__type(key, __u32);
			__type(value, __u32);
		});
} weft_maglev SEC(".maps");

struct affinity_key {
	struct addr client; /* at the socket: 1 for IPv6, or 0; cookie of its network namespace */
	__u32 service;
	__u32 pad;
};

struct affinity {
	__u32 backend;
	__u32 last; /* CLOCK_MONOTONIC, s */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} weft_affinity SEC(".maps");

/* Which backends are in the sets of services with affinity: a client leaves a
 * backend that its set has no more. Values mean nothing. */
struct member_key {
	__u32 set;
	__u32 backend;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct member_key);
	__type(value, __u8);
} weft_members SEC(".maps");

/* Clients of services with SERVICE_SOURCE_RANGES. Values mean nothing. */
struct range_key {
	__u32 prefixlen; /* 32 more than that of the address */
	__u32 service;
	__be32 addr[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct range_key);
	__type(value, __u8);
} weft_source_ranges SEC(".maps");

/* Connected UDP sockets whose peer is a backend, by socket cookie; the agent
 * cuts them when it goes. */
struct service_socket {
	__u32 service;
	__u32 backend;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct service_socket);
} weft_service_sockets SEC(".maps");

/* A translation of packets, found by what a packet is as it arrives. Each
 * connection has two, that of requests and that of answers. */
struct flow_key {
	struct addr src, dst;
	__be16 sport, dport;
	__u8 protocol;
	__u8 pad[3];
};

enum service_flow_flag {
	FLOW_REPLY = 1 << 0,    /* of the answers */
	FLOW_SNAT = 1 << 1,     /* the client's address is changed too */
	FLOW_DSR = 1 << 2,      /* the backend's node answers by itself: there is one half only */
	FLOW_HAIRPIN = 1 << 3,  /* the client is the backend */
	FLOW_FIN = 1 << 4,      /* seen in this direction */
	FLOW_RST = 1 << 5,
	FLOW_FIN_BACK = 1 << 6, /* seen in the other direction: the other half has FLOW_FIN */
	FLOW_RST_BACK = 1 << 7,
	FLOW_ANSWERED = 1 << 8,    /* a packet of the backend was seen */
	FLOW_ESTABLISHED = 1 << 9, /* TCP: the client answered the SYN+ACK */
	FLOW_FAR = 1 << 10,        /* the client is not of this node */
};

struct service_flow {
	struct addr src, dst; /* what the packet becomes */
	__be16 sport, dport;
	__u32 flags;
	__u32 service, backend;
	__u32 last_seen;    /* CLOCK_MONOTONIC, s */
	__u8 mac[ETH_ALEN]; /* of the client's next hop, where it came from outside */
	__u8 hop[ETH_ALEN]; /* of the backend's, in the last second that XDP needed it */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct service_flow);
} weft_service_flows SEC(".maps");

static __always_inline struct service *service_lookup(const struct addr *a, __be16 port,
						      __u8 protocol)
{
	struct service_key key = {.addr = *a, .port = port, .protocol = protocol};

	return bpf_map_lookup_elem(&weft_services, &key);
}

static __always_inline bool service_allows(const struct service *s, const struct addr *client)
{
	struct range_key key = {
		.prefixlen = 160,
		.service = s->id,
		.addr = {client->w[0], client->w[1], client->w[2], client->w[3]},
	};

	return !(s->flags & SERVICE_SOURCE_RANGES) ||
	       bpf_map_lookup_elem(&weft_source_ranges, &key);
}

/* The same on every node for the packets of a connection. A multiply and a fold
 * for each word (Thomas Wang's and Murmur's finalizers have the same shape). */
static __always_inline __u32 connection_hash(const struct addr *client, __be16 client_port,
					     const struct addr *addr, __be16 port, __u8 protocol)
{
	const __u64 k = 0x9e3779b97f4a7c15ULL;
	__u64 h = (__u64)client_port << 32 | (__u64)port << 8 | protocol;

	h = (h ^ client->d[0]) * k;
	h = (h ^ h >> 29 ^ client->d[1]) * k;
	h = (h ^ h >> 31 ^ addr->d[0]) * k;
	h = (h ^ h >> 30 ^ addr->d[1]) * k;
	h ^= h >> 32;
	return h;
}

static __always_inline __u32 *maglev_slot(const struct service *s, __u32 hash)
{
	void *table = bpf_map_lookup_elem(&weft_maglev, &s->far.id);
	__u32 slot = hash % (s->maglev ?: 1);

	return table ? bpf_map_lookup_elem(table, &slot) : NULL;
}

/* Slots tried: one may be on its way while the set shrinks. */
#define BACKEND_TRIES 4

static __always_inline struct backend *any_backend(const struct backend_set *set, __u32 random,
						   __u32 *id)
{
	struct slot_key key = {.set = set->id};
	__u32 count = set->count;
	struct backend *b;
	__u32 *slot;

	for (int i = 0; i < BACKEND_TRIES && count; i++) {
		key.slot = (random + i) % count;
		slot = bpf_map_lookup_elem(&weft_slots, &key);
		if (!slot)
			continue;
		*id = *slot;
		b = bpf_map_lookup_elem(&weft_backends, id);
		if (b)
			return b;
	}
	return NULL;
}

static __always_inline struct backend *affine_backend(const struct service *s,
						      const struct backend_set *set,
						      const struct affinity_key *key, __u32 now,
						      __u32 *id)
{
	struct affinity *a = bpf_map_lookup_elem(&weft_affinity, key);
	struct member_key member = {.set = set->id};

	if (!a || (__s32)(now - a->last) > (__s32)s->affinity)
		return NULL;
	member.backend = a->backend;
	if (!bpf_map_lookup_elem(&weft_members, &member))
		return NULL;
	*id = a->backend;
	return bpf_map_lookup_elem(&weft_backends, id);
}

/* Who asks for a backend. */
struct service_client {
	struct addr addr; /* for affinity */
	__u32 hash;       /* of far clients: of the connection */
	bool far;
};

/* The backend of a new connection, counted as its hit, and its number; NULL
 * where there is none. now is in seconds. */
static __always_inline struct backend *
service_backend(const struct service *s, const struct service_client *c, __u32 now, __u32 *id)
{
	struct backend_set set = c->far ? s->far : s->near;
	struct affinity_key key = {.client = c->addr, .service = s->id};
	struct affinity kept = {.last = now};
	struct backend *b = NULL;
	__u32 *slot;

	if (!set.count)
		return NULL;
	if (s->affinity)
		b = affine_backend(s, &set, &key, now, id);
	if (!b && c->far && s->maglev) {
		slot = maglev_slot(s, c->hash);
		if (slot) {
			*id = *slot;
			b = bpf_map_lookup_elem(&weft_backends, id);
		}
	}
	if (!b)
		/* XDP leaves local backends to tcx, which must come to the same */
		b = any_backend(&set, c->far ? c->hash : bpf_get_prandom_u32(), id);
	if (!b)
		return NULL;
	if (s->affinity) {
		kept.backend = *id;
		bpf_map_update_elem(&weft_affinity, &key, &kept, BPF_ANY);
	}
	__sync_fetch_and_add(&b->hits, 1);
	return b;
}
