// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* For benches: a source of small UDP datagrams that is faster than what it
 * measures, and sinks that count what came out of it. */
#include "vmlinux.h"
#include "bpf_helpers.h"
#include "bpf_endian.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define TCX_NEXT -1
#define TCX_DROP 2

/* Ethernet, IPv4 without options, UDP without a checksum, and a little payload. */
#define FRAME_WORDS 6
#define SPORT_OFF 34
#define DPORT_OFF 36
#define FRAME_LEN 60

volatile const __u32 out_ifindex = 0;
volatile const __u64 header[FRAME_WORDS] = {};
volatile const __u32 clients = 1; /* source ports, from first_client on */
volatile const __u16 first_client = 1024;
volatile const __be16 arrived_port = 0; /* destination of what a sink counts */

/* 0: packets received by this CPU; 1: turn of the clients. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

static __always_inline __u64 *counter(__u32 which)
{
	return bpf_map_lookup_elem(&counts, &which);
}

/* Run on live frames: each leaves by out_ifindex. What was there before is from
 * an earlier turn, and changed by those that it met. */
SEC("xdp")
int generate(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u64 *turn = counter(1);
	__u64 *words = data;

	if (!turn || data + FRAME_LEN > end)
		return XDP_ABORTED;
	for (int i = 0; i < FRAME_WORDS; i++)
		words[i] = header[i];
	*turn += 1;
	*(__be16 *)(data + SPORT_OFF) = bpf_htons(first_client + *turn % (clients ?: 1));
	return bpf_redirect(out_ifindex, 0);
}

static __always_inline bool arrived(void *data, void *end)
{
	__u64 *n = counter(0);

	if (!n || data + DPORT_OFF + 2 > end || *(__be16 *)(data + DPORT_OFF) != arrived_port)
		return false;
	*n += 1;
	return true;
}

SEC("xdp")
int sink_frames(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	return arrived(data, end) ? XDP_DROP : XDP_PASS;
}

SEC("tcx/ingress")
int sink_packets(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	return arrived(data, end) ? TCX_DROP : TCX_NEXT;
}
