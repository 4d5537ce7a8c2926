// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Events to user space, numbered by CPU so that the reader knows exactly how
 * many it missed. */

enum event_type {
	EVENT_NEW = 1,    /* first packet of a connection */
	EVENT_UPDATE = 2, /* counters of a connection that is not new */
	EVENT_CLOSE = 3,  /* TCP connection closed or reset */
	EVENT_DROP = 4,
};

enum direction {
	DIRECTION_EGRESS = 1,  /* from a pod of this node */
	DIRECTION_INGRESS = 2, /* to a pod of this node */
};

struct event {
	__u64 sequence; /* of this CPU, lost ones counted */
	__u64 time;     /* CLOCK_MONOTONIC, ns */
	__u32 cpu;
	__u32 ifindex;
	__u8 type;
	__u8 direction;
	__u8 reason; /* of a drop */
	__u8 protocol;
	__u8 tcp_flags;
	__u8 icmp_type, icmp_code;
	__u8 pad;
	struct addr src, dst;
	__be16 sport, dport;
	__u32 rule; /* of policy, for DROP_POLICY; 0: no rule allows */
	__u64 src_identity, dst_identity;
	__u64 packets, bytes;
};

struct event_count {
	__u64 generated;
	__u64 lost;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct event_count);
} weft_event_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} weft_events SEC(".maps");

/* The reader looks every 100 ms; it is woken before only when this many bytes
 * wait (an eighth of the smallest ring that the agent accepts). */
#define EVENT_WAKEUP_BYTES (32 << 10)

static __always_inline void emit(struct __sk_buff *skb, const struct packet *p, __u8 type,
				 __u8 direction, __u8 reason, __u64 src_identity,
				 __u64 dst_identity, __u64 packets, __u64 bytes)
{
	__u32 zero = 0;
	struct event_count *n = bpf_map_lookup_elem(&weft_event_counts, &zero);
	struct event *e;
	__u64 sequence, flags;

	if (!n)
		return;
	/* counted as generated only when it is in the ring or lost: the reader may
	 * look in between (no other program runs on this CPU in the meantime) */
	sequence = n->generated;
	e = bpf_ringbuf_reserve(&weft_events, sizeof(*e), 0);
	if (!e) {
		n->lost++;
		n->generated = sequence + 1;
		return;
	}
	e->sequence = sequence;
	e->time = bpf_ktime_get_ns();
	e->cpu = bpf_get_smp_processor_id();
	e->ifindex = skb->ifindex;
	e->type = type;
	e->direction = direction;
	e->reason = reason;
	e->protocol = p->protocol;
	e->tcp_flags = p->tcp_flags;
	e->icmp_type = p->icmp_type;
	e->icmp_code = p->icmp_code;
	e->pad = 0;
	e->src = p->src;
	e->dst = p->dst;
	e->sport = p->sport;
	e->dport = p->dport;
	e->rule = p->rule;
	e->src_identity = src_identity;
	e->dst_identity = dst_identity;
	e->packets = packets;
	e->bytes = bytes;
	flags = bpf_ringbuf_query(&weft_events, BPF_RB_AVAIL_DATA) >= EVENT_WAKEUP_BYTES
			? BPF_RB_FORCE_WAKEUP
			: BPF_RB_NO_WAKEUP;
	bpf_ringbuf_submit(e, flags);
	n->generated = sequence + 1;
}

/* Counts a drop, tells user space and returns the verdict. */
static SUBPROGRAM int drop(struct __sk_buff *skb, const struct packet *p, __u8 direction,
			   __u8 reason)
{
	if (!p)
		return TCX_DROP;
	count(reason, skb->len);
	emit(skb, p, EVENT_DROP, direction, reason, identity_of(&p->src), identity_of(&p->dst), 1,
	     skb->len);
	return TCX_DROP;
}
