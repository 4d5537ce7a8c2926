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
#include "lib/checksum.h"
#include "lib/forward.h"
#include "lib/service.h"
#include "lib/deny.h"
#include "lib/xdp_packet.h"
#include "lib/xdp_neighbor.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

static __always_inline int translate(const struct frame *f, const struct packet *p, bool v4)
{
	struct flow_key key = {
		.src = p->src,
		.dst = p->dst,
		.sport = p->sport,
		.dport = p->dport,
		.protocol = p->protocol,
	};
	struct service_flow *flow = bpf_map_lookup_elem(&weft_service_flows, &key);
	struct neighbor *n;
	__u16 *check;

	if (!flow)
		return XDP_PASS;
	if (!(flow->flags & FLOW_SNAT) || flow->flags & FLOW_HAIRPIN)
		return XDP_PASS;
	check = xdp_check(f, p->protocol, v4);
	if (!check || is_partial(f, p, v4, *check))
		return XDP_PASS;
	if (flow->flags & FLOW_REPLY) {
		xdp_rewrite(f, p, flow, check, v4);
		return xdp_send(f, flow->mac);
	}
	n = neighbor_to(&flow->dst, v4);
	if (!n)
		return XDP_PASS;
	xdp_rewrite(f, p, flow, check, v4);
	return xdp_send(f, n->mac);
}

static __always_inline int handle(struct frame *f, bool v4)
{
	struct packet p = {};

	if (!xdp_addresses(f, &p, v4))
		return XDP_PASS;
	if (denied(&p.src, f->len))
		return XDP_DROP;
	if (tunnel_ifindex || f->len > uplink_mtu + ETH_HLEN || !xdp_parse_ip(f, &p) ||
	    p.ttl <= 1 || !xdp_parse_l4(f, &p, v4))
		return XDP_PASS;
	return translate(f, &p, v4);
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
		return handle(&f, true);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return handle(&f, false);
	return XDP_PASS;
}
