// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The program that sees the uplink's frames before the kernel does. It drops
 * what the deny list has, and sends on what is between a client outside and a
 * backend on another node. Everything else, and everything that it is not sure
 * of, passes: from_uplink at tcx does all that this does, and more. */
#include "vmlinux.h"
#include "bpf_helpers.h"
#include "bpf_endian.h"
#include "lib/addr.h"
#include "lib/reason.h"
#include "lib/packet.h"
#include "lib/endpoint.h"
#include "lib/event.h"
#include "lib/clock.h"
#include "lib/fragment.h"
#include "lib/policy.h"
#include "lib/conntrack.h"
#include "lib/service.h"
#include "lib/flow.h"
#include "lib/scratch.h"
#include "lib/checksum.h"
#include "lib/forward.h"
#include "lib/tunnel.h"
#include "lib/way.h"
#include "lib/icmp.h"
#include "lib/answer.h"
#include "lib/masquerade.h"
#include "lib/dsr.h"
#include "lib/translate.h"
#include "lib/deny.h"
#include "lib/xdp_packet.h"
#include "lib/xdp_neighbor.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Whether a packet of the flow goes on to another machine from here, without
 * what only tcx does. */
static __always_inline bool is_ours(const struct service_flow *f, const struct packet *p)
{
	if (!may_arrive(f, p, false))
		return false;
	/* TCP carries the option of DSR on its SYN alone */
	return f->flags & FLOW_SNAT ||
	       (f->flags & FLOW_DSR && p->protocol == IPPROTO_TCP && !is_begin(p));
}

/* The backend was chosen, but the packet is left to tcx, which chooses again. */
static __always_inline int unchoose(const struct translation *t)
{
	struct backend *b = bpf_map_lookup_elem(&weft_backends, &t->to.backend);

	if (b)
		__sync_fetch_and_add(&b->hits, -1);
	return 0;
}

/* Makes the connection of a client outside, as tcx would, where its backend is
 * on another node; false where it is left to tcx. */
static SUBPROGRAM bool begin(struct xdp_md *ctx, const struct packet *p, bool stale, __u32 now)
{
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct scratch *s = new_scratch();
	struct translation *t;

	if (!p || !s || (void *)(eth + 1) > end || is_reset(p))
		return false;
	t = &s->translation;
	t->stale = stale;
	flow_key_of(&t->key, p);
	__builtin_memcpy(t->to.mac, eth->h_source, ETH_ALEN);
	if (service_dsr || flow_choose(t, true, now) || !t->active)
		return false;
	if (!is_forged(p, false) && !far_source(t, p->v4, false) && t->to.flags & FLOW_SNAT &&
	    neighbor_to(&t->to.dst, p->v4) && !flow_make(t, now))
		return true;
	unchoose(t);
	return false;
}

/* The flow that p is of, made where it is the first. */
static __always_inline struct service_flow *find(struct xdp_md *ctx, const struct packet *p,
						 const struct flow_key *key, __u32 now)
{
	struct service_flow *f = bpf_map_lookup_elem(&weft_service_flows, key);
	struct packet copy;

	if (f && flow_holds(f, p, now))
		return f;
	copy = *p; /* so that *p itself need not be in memory */
	if (!begin(ctx, &copy, f && !(f->flags & FLOW_REPLY), now))
		return NULL;
	return bpf_map_lookup_elem(&weft_service_flows, key);
}

/* Answers go to where requests come from now, which another router may send on
 * since the connection began. Looked at once a second. */
static SUBPROGRAM int follow_sender(const struct flow_key *key, struct service_flow *f,
				    const struct ethhdr *eth)
{
	struct service_flow *back;
	struct flow_key other;

	if (!key || !f || !eth || !__builtin_memcmp(f->mac, eth->h_source, ETH_ALEN))
		return 0;
	__builtin_memcpy(f->mac, eth->h_source, ETH_ALEN);
	flow_key_other(&other, f, key->protocol);
	back = bpf_map_lookup_elem(&weft_service_flows, &other);
	if (back && flow_leads_back(back, key))
		__builtin_memcpy(back->mac, eth->h_source, ETH_ALEN);
	return 0;
}

/* Where the packet goes: to where the client's came from, or towards the backend,
 * which is looked up once a second; NULL where that is not known. */
static __always_inline const __u8 *next_hop(struct service_flow *f, __u32 now, bool v4)
{
	struct neighbor *n;

	if (f->flags & FLOW_REPLY)
		return mac_is_known(f->mac) ? f->mac : NULL;
	if (f->last_seen == now && mac_is_known(f->hop))
		return f->hop;
	n = neighbor_to(&f->dst, v4);
	if (!n)
		return NULL;
	__builtin_memcpy(f->hop, n->mac, ETH_ALEN);
	return f->hop;
}

static __always_inline int translate(struct xdp_md *ctx, const struct frame *f,
				     const struct packet *p, bool v4)
{
	__u16 *check = xdp_check(f, p->protocol, v4);
	__u32 now = now_seconds();
	struct service_flow *flow;
	struct ethhdr sender;
	struct flow_key key;
	const __u8 *mac;

	if (!check || is_partial(f, p, v4, *check))
		return XDP_PASS;
	flow_key_of(&key, p);
	flow = find(ctx, p, &key, now);
	if (!flow || !is_ours(flow, p))
		return XDP_PASS;
	mac = next_hop(flow, now, v4);
	if (!mac)
		return XDP_PASS;
	if (!(flow->flags & FLOW_REPLY) && flow->last_seen != now) {
		sender = *(struct ethhdr *)f->data;
		follow_sender(&key, flow, &sender);
	}
	flow_touch(&key, flow, p, now);
	xdp_rewrite(f, p, flow, check, v4);
	return xdp_send(f, mac);
}

static __always_inline int handle(struct xdp_md *ctx, struct frame *f, bool v4)
{
	struct packet p = {};

	if (!xdp_addresses(f, &p, v4))
		return XDP_PASS;
	if (denied(&p.src, f->len))
		return XDP_DROP;
	if (tunnel_ifindex || f->len > uplink_mtu + ETH_HLEN || !xdp_parse_ip(f, &p) ||
	    p.ttl <= 1 || !xdp_parse_l4(f, &p, v4))
		return XDP_PASS;
	return translate(ctx, f, &p, v4);
}

/* Of the uplink; internal/datapath/xdp sets it. */
volatile const __u8 uplink_mac[ETH_ALEN] = {};

/* Frames for others, and for all, are tcx's to look at. */
static __always_inline bool is_for_this_node(const struct ethhdr *eth)
{
	for (int i = 0; i < ETH_ALEN; i++) {
		if (eth->h_dest[i] != uplink_mac[i])
			return false;
	}
	return true;
}

SEC("xdp.frags")
int from_wire(struct xdp_md *ctx)
{
	struct frame f = {
		.data = (void *)(long)ctx->data,
		.end = (void *)(long)ctx->data_end,
		.len = bpf_xdp_get_buff_len(ctx),
	};
	struct ethhdr *eth = f.data;

	if ((void *)(eth + 1) > f.end || !is_for_this_node(eth))
		return XDP_PASS;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return handle(ctx, &f, true);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return handle(ctx, &f, false);
	return XDP_PASS;
}
