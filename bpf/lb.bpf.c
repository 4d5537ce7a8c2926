// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* Services at the socket, for all pods and processes of the node: connect and
 * sendmsg turn the address of a service into that of a backend, getpeername and
 * recvmsg turn it back. A connection costs this once, and none of its packets
 * is touched. What is not translated here (other protocols, services that admit
 * only some clients, sockets of other cgroups) is as packets. */
#include "vmlinux.h"
#include "bpf_helpers.h"
#include "bpf_endian.h"
#include "lib/addr.h"
#include "lib/reason.h"
#include "lib/packet.h"
#include "lib/clock.h"
#include "lib/service.h"
#include "lib/socket.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Set at load time by internal/datapath/lb. The addresses are those of forward.h,
 * zero where the node has none of the family. */
volatile const struct addr node_v4 = {};
volatile const struct addr node_v6 = {};
volatile const __u64 node_netns_cookie = 0;

#define REFUSE 0
#define PROCEED 1

#define ENOMEM 12
#define EADDRINUSE 98
#define ECONNREFUSED 111

static __always_inline int refuse(int err, enum socket_count why)
{
	socket_count(why);
	bpf_set_retval(-err);
	return REFUSE;
}

/* The protocol of services that a socket's is; 0 for none. Of MPTCP the
 * subflows are seen, which are TCP. */
static __always_inline __u8 service_protocol(__u32 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP ? protocol : 0;
}

static __always_inline void read_addr(const struct bpf_sock_addr *ctx, bool v6, struct addr *a)
{
	if (!v6) {
		addr_from_v4(a, ctx->user_ip4);
		return;
	}
	a->w[0] = ctx->user_ip6[0];
	a->w[1] = ctx->user_ip6[1];
	a->w[2] = ctx->user_ip6[2];
	a->w[3] = ctx->user_ip6[3];
}

static __always_inline void write_addr(struct bpf_sock_addr *ctx, bool v6, const struct addr *a,
				       __be16 port)
{
	ctx->user_port = port;
	if (!v6) {
		ctx->user_ip4 = a->w[3];
		return;
	}
	ctx->user_ip6[0] = a->w[0];
	ctx->user_ip6[1] = a->w[1];
	ctx->user_ip6[2] = a->w[2];
	ctx->user_ip6[3] = a->w[3];
}

/* The service at the address and port in m. */
static __always_inline struct service *socket_lookup(const struct socket_service *m, __u8 protocol)
{
	struct service *s = service_lookup(&m->service, m->service_port, protocol);

	return s && !(s->flags & SERVICE_SOURCE_RANGES) ? s : NULL;
}

static __always_inline bool is_at(const struct socket_service *m, const struct socket_service *want)
{
	return m->service_port == want->service_port && addr_equal(&m->service, &want->service);
}

/* Takes the backend of an earlier use of the service, while it is there. */
static __always_inline bool keep(struct socket_service *to, const struct socket_service *earlier,
				 const struct service *s)
{
	__u32 id = earlier->backend_id;
	struct backend *b;

	if (earlier->service_id != s->id || !is_at(earlier, to) || !s->near.count)
		return false;
	b = bpf_map_lookup_elem(&weft_backends, &id);
	if (!b || b->port != earlier->backend_port || !addr_equal(&b->addr, &earlier->backend))
		return false;
	to->backend = earlier->backend;
	to->backend_port = earlier->backend_port;
	to->backend_id = id;
	return true;
}

static __always_inline bool choose(struct bpf_sock_addr *ctx, struct socket_service *to,
				   const struct service *s)
{
	struct service_client client = {
		.addr.d = {!is_v4(&to->service), bpf_get_netns_cookie(ctx)},
	};
	struct backend *b = service_backend(s, &client, now_seconds(), &to->backend_id);

	if (!b)
		return false;
	to->backend = b->addr;
	to->backend_port = b->port;
	return true;
}

static __always_inline void track(struct bpf_sock_addr *ctx, const struct socket_service *m)
{
	struct service_socket value = {.service = m->service_id, .backend = m->backend_id};
	__u64 cookie = bpf_get_socket_cookie(ctx);

	if (bpf_map_update_elem(&weft_service_sockets, &cookie, &value, BPF_ANY))
		socket_count(SOCKET_UNTRACKED);
}

static __always_inline void forget_peer(struct bpf_sock_addr *ctx, __u8 protocol)
{
	__u64 cookie;

	if (bpf_sk_storage_delete(&weft_socket_peer, ctx->sk) || protocol != IPPROTO_UDP)
		return;
	cookie = bpf_get_socket_cookie(ctx);
	bpf_map_delete_elem(&weft_service_sockets, &cookie);
}

/* A connect that is refused leaves a connected UDP socket, and what is known of
 * it, as it was. */
static __always_inline int connect(struct bpf_sock_addr *ctx, bool v6)
{
	__u8 protocol = service_protocol(ctx->protocol);
	struct socket_service to = {.service_port = ctx->user_port};
	struct socket_service *peer;
	struct service *s;

	if (!protocol)
		return PROCEED;
	read_addr(ctx, v6, &to.service);
	s = socket_lookup(&to, protocol);
	if (!s) {
		forget_peer(ctx, protocol);
		return PROCEED;
	}
	to.service_id = s->id;
	peer = bpf_sk_storage_get(&weft_socket_peer, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!peer)
		return refuse(ENOMEM, SOCKET_NO_MEMORY);
	if (!(protocol == IPPROTO_UDP && keep(&to, peer, s)) && !choose(ctx, &to, s))
		return refuse(ECONNREFUSED, SOCKET_NO_BACKEND);
	*peer = to;
	if (protocol == IPPROTO_UDP)
		track(ctx, &to);
	write_addr(ctx, v6, &to.backend, to.backend_port);
	return PROCEED;
}

/* The place of the service, or else an empty one, or the least recently used. */
static __always_inline struct socket_service *place_of(struct socket_services *list,
						       const struct socket_service *to)
{
	struct socket_service *oldest = &list->seen[0];

	for (int i = 0; i < SOCKET_SERVICES; i++) {
		struct socket_service *m = &list->seen[i];

		if (m->used && is_at(m, to))
			return m;
		if (m->used < oldest->used)
			oldest = m;
	}
	return oldest;
}

static __always_inline int sendmsg(struct bpf_sock_addr *ctx, bool v6)
{
	struct socket_service to = {.service_port = ctx->user_port};
	struct socket_service *peer, *place;
	struct socket_services *list;
	struct service *s;

	if (ctx->protocol != IPPROTO_UDP)
		return PROCEED;
	read_addr(ctx, v6, &to.service);
	s = socket_lookup(&to, IPPROTO_UDP);
	if (!s)
		return PROCEED;
	to.service_id = s->id;
	list = bpf_sk_storage_get(&weft_socket_services, ctx->sk, NULL,
				  BPF_SK_STORAGE_GET_F_CREATE);
	if (!list)
		return refuse(ENOMEM, SOCKET_NO_MEMORY);
	place = place_of(list, &to);
	/* a connected socket hears only from its peer */
	peer = bpf_sk_storage_get(&weft_socket_peer, ctx->sk, NULL, 0);
	if (!(peer && keep(&to, peer, s)) && !keep(&to, place, s) && !choose(ctx, &to, s))
		return refuse(ECONNREFUSED, SOCKET_NO_BACKEND);
	to.used = ++list->clock;
	*place = to;
	write_addr(ctx, v6, &to.backend, to.backend_port);
	return PROCEED;
}

/* The service that the socket connected to, where from is its backend. */
static __always_inline struct socket_service *connected(struct bpf_sock_addr *ctx,
							const struct addr *from, __be16 port)
{
	struct socket_service *m = bpf_sk_storage_get(&weft_socket_peer, ctx->sk, NULL, 0);

	return m && m->backend_port == port && addr_equal(&m->backend, from) ? m : NULL;
}

/* The service that the socket sent to, where from is its backend: where several
 * share it, the last one. */
static __always_inline struct socket_service *sent_to(struct bpf_sock_addr *ctx,
						      const struct addr *from, __be16 port)
{
	struct socket_services *list = bpf_sk_storage_get(&weft_socket_services, ctx->sk, NULL, 0);
	struct socket_service *newest = NULL;
	__u32 used = 0;

	if (!list)
		return NULL;
	for (int i = 0; i < SOCKET_SERVICES; i++) {
		struct socket_service *m = &list->seen[i];

		if (m->used > used && m->backend_port == port && addr_equal(&m->backend, from)) {
			used = m->used;
			newest = m;
		}
	}
	return newest;
}

static __always_inline int getpeername(struct bpf_sock_addr *ctx, bool v6)
{
	__be16 port = ctx->user_port;
	struct socket_service *m;
	struct addr from;

	read_addr(ctx, v6, &from);
	m = connected(ctx, &from, port);
	if (m)
		write_addr(ctx, v6, &m->service, m->service_port);
	return PROCEED;
}

static __always_inline int recvmsg(struct bpf_sock_addr *ctx, bool v6)
{
	__be16 port = ctx->user_port;
	struct socket_service *m;
	struct addr from;

	read_addr(ctx, v6, &from);
	m = sent_to(ctx, &from, port);
	if (!m)
		m = connected(ctx, &from, port);
	if (m)
		write_addr(ctx, v6, &m->service, m->service_port);
	return PROCEED;
}

SEC("cgroup/connect4")
int socket_connect4(struct bpf_sock_addr *ctx)
{
	return connect(ctx, false);
}

SEC("cgroup/connect6")
int socket_connect6(struct bpf_sock_addr *ctx)
{
	return connect(ctx, true);
}

SEC("cgroup/sendmsg4")
int socket_send4(struct bpf_sock_addr *ctx)
{
	return sendmsg(ctx, false);
}

SEC("cgroup/sendmsg6")
int socket_send6(struct bpf_sock_addr *ctx)
{
	return sendmsg(ctx, true);
}

SEC("cgroup/recvmsg4")
int socket_recv4(struct bpf_sock_addr *ctx)
{
	return recvmsg(ctx, false);
}

SEC("cgroup/recvmsg6")
int socket_recv6(struct bpf_sock_addr *ctx)
{
	return recvmsg(ctx, true);
}

SEC("cgroup/getpeername4")
int socket_peer4(struct bpf_sock_addr *ctx)
{
	return getpeername(ctx, false);
}

SEC("cgroup/getpeername6")
int socket_peer6(struct bpf_sock_addr *ctx)
{
	return getpeername(ctx, true);
}

static __always_inline bool is_taken(const volatile struct addr *node, __be16 port, __u8 protocol)
{
	struct addr a;

	a.d[0] = node->d[0];
	a.d[1] = node->d[1];
	return service_lookup(&a, port, protocol);
}

/* A server of the node's own at a service's port would never hear from anyone.
 * A socket at :: counts as one of both families: which it is cannot be seen. */
static __always_inline int guard(struct bpf_sock *ctx, const struct addr *a)
{
	__u8 protocol = service_protocol(ctx->protocol);
	__be16 port = bpf_htons(ctx->src_port);
	bool any4 = a->w[3] == 0 && (is_v4(a) || addr_is_zero(a));
	bool any6 = addr_is_zero(a);

	if (!protocol || bpf_get_netns_cookie(ctx) != node_netns_cookie)
		return PROCEED;
	if (service_lookup(a, port, protocol) || (any4 && is_taken(&node_v4, port, protocol)) ||
	    (any6 && is_taken(&node_v6, port, protocol)))
		return refuse(EADDRINUSE, SOCKET_BIND);
	return PROCEED;
}

SEC("cgroup/post_bind4")
int socket_bind4(struct bpf_sock *ctx)
{
	struct addr a;

	addr_from_v4(&a, ctx->src_ip4);
	return guard(ctx, &a);
}

SEC("cgroup/post_bind6")
int socket_bind6(struct bpf_sock *ctx)
{
	struct addr a = {.w = {ctx->src_ip6[0], ctx->src_ip6[1], ctx->src_ip6[2], ctx->src_ip6[3]}};

	return guard(ctx, &a);
}

SEC("cgroup/sock_release")
int socket_release(struct bpf_sock *ctx)
{
	__u64 cookie;

	if (ctx->protocol != IPPROTO_UDP || !bpf_sk_storage_get(&weft_socket_peer, ctx, NULL, 0))
		return PROCEED;
	cookie = bpf_get_socket_cookie(ctx);
	bpf_map_delete_elem(&weft_service_sockets, &cookie);
	return PROCEED;
}
