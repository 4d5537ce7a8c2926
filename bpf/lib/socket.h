// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* What sockets know of the services that they talk to. Both kinds of memory go
 * with their socket, so that no pod can push another's out. Nothing can copy
 * them to another layout: a new field takes the place of reserved bytes, where
 * 0 means that it is not known. */

/* A service and the backend that stands for it. */
struct socket_service {
	struct addr service, backend;
	__be16 service_port, backend_port;
	__u32 service_id, backend_id;
	__u32 used; /* by socket_services.clock; 0: this place is empty */
	__u32 reserved[4];
};

/* Of sockets that connected to a service. After a disconnect (AF_UNSPEC, which
 * no program sees) it stays until the next connect. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_service);
} weft_socket_peer SEC(".maps");

/* Services that a UDP socket remembers; the one that it sent to least recently
 * makes place for another. */
#define SOCKET_SERVICES 8

struct socket_services {
	struct socket_service seen[SOCKET_SERVICES];
	__u32 clock; /* datagrams sent to services */
	__u32 reserved[3];
};

/* Of UDP sockets that send to services without being connected. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_services);
} weft_socket_services SEC(".maps");

enum socket_count {
	SOCKET_NO_BACKEND, /* connect or sendmsg refused: ECONNREFUSED */
	SOCKET_NO_MEMORY,  /* connect or sendmsg refused: ENOMEM */
	SOCKET_UNTRACKED,  /* connected UDP socket that weft_service_sockets had no room for: it
			      will not be cut when its backend goes */
	SOCKET_BIND,       /* bind to a service's port of the node refused: EADDRINUSE */
	SOCKET_COUNT_MAX,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SOCKET_COUNT_MAX);
	__type(key, __u32);
	__type(value, __u64);
} weft_socket_counts SEC(".maps");

/* Programs of cgroups can be preempted: hence atomic. */
static __always_inline void socket_count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&weft_socket_counts, &what);

	if (n)
		__sync_fetch_and_add(n, 1);
}
