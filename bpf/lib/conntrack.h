// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* One entry for each connection that a pod of this node takes part in, found
 * from either direction by one lookup. */

enum ct_flag {
	CT_FROM_A = 1 << 0,      /* end a sent the first packet */
	CT_REPLIED = 1 << 1,     /* a packet of the responder was seen */
	CT_ESTABLISHED = 1 << 2, /* TCP: the originator answered the SYN+ACK */
	CT_FIN_ORIG = 1 << 3,
	CT_FIN_REPLY = 1 << 4,
	CT_RST = 1 << 5,
	CT_CLOSED = 1 << 6,      /* the close was reported */
	CT_DENIED = 1 << 7,      /* by rules that came after it began */
	CT_ALIVE_ORIG = 1 << 8,  /* goes on sending after a RST */
	CT_ALIVE_REPLY = 1 << 9,
	CT_OWNED_ORIG = 1 << 10, /* counts for the originator's quota, else the responder's */
	CT_SERVICE = 1 << 11,    /* packets of the responder look for a service_flow */
};

#define CT_CLOSING (CT_FIN_ORIG | CT_FIN_REPLY | CT_RST)
#define CT_ALIVE (CT_ALIVE_ORIG | CT_ALIVE_REPLY)

struct ct_entry {
	__u64 packets[2]; /* from the originator, from the responder */
	__u64 bytes[2];
	__u64 src_identity, dst_identity; /* of the originator, of the responder */
	__u32 flags;
	__u32 last_seen;   /* CLOCK_MONOTONIC, s */
	__u32 last_report; /* CLOCK_MONOTONIC, s */
	__u32 subject[2];  /* of policy, that it was judged by: originator, responder */
	__u32 rule;        /* of policy, for CT_DENIED */
	__u32 nat_port;    /* source port on the wire where masqueraded (network order), else 0 */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__type(key, struct ct_key);
	__type(value, struct ct_entry);
} weft_conntrack SEC(".maps");

/* Lifetimes, in seconds; user space collects by the same numbers. */
volatile const __u32 ct_tcp_syn = 60;
volatile const __u32 ct_tcp_established = 21600;
volatile const __u32 ct_tcp_closing = 10;
volatile const __u32 ct_udp = 60;
volatile const __u32 ct_udp_replied = 180;
volatile const __u32 ct_other = 30;
/* Seconds between two EVENT_UPDATE of one connection; 0 turns them off. */
volatile const __u32 report_interval = 10;

#define EEXIST 17

static __always_inline __u32 ct_lifetime(__u8 protocol, __u32 flags)
{
	switch (protocol) {
	case IPPROTO_TCP:
		if (flags & CT_RST || (flags & CT_FIN_ORIG && flags & CT_FIN_REPLY))
			return ct_tcp_closing;
		return flags & CT_ESTABLISHED ? ct_tcp_established : ct_tcp_syn;
	case IPPROTO_UDP:
		return flags & CT_REPLIED ? ct_udp_replied : ct_udp;
	}
	return ct_other;
}

static __always_inline bool ct_expired(const struct ct_entry *e, __u8 protocol, __u32 now)
{
	/* signed: another CPU may have written a later second than ours */
	return (__s32)(now - e->last_seen) > (__s32)ct_lifetime(protocol, e->flags);
}

/* Fills *key and says whether the packet's source is end a. */
static __always_inline bool ct_key_of(struct ct_key *key, const struct addr *src,
				      const struct addr *dst, __be16 sport, __be16 dport,
				      __u8 protocol)
{
	bool from_a = addr_less(src, dst) || (addr_equal(src, dst) && sport <= dport);

	key->a = from_a ? *src : *dst;
	key->b = from_a ? *dst : *src;
	key->a_port = from_a ? sport : dport;
	key->b_port = from_a ? dport : sport;
	key->protocol = protocol;
	__builtin_memset(key->pad, 0, sizeof(key->pad));
	return from_a;
}

static __always_inline __u32 ct_tcp_flags(__u8 tcp, bool reply, __u32 flags)
{
	__u32 set = 0;

	if (tcp & TCP_RST)
		set |= CT_RST;
	else if (flags & CT_RST)
		set |= reply ? CT_ALIVE_REPLY : CT_ALIVE_ORIG;
	if (tcp & TCP_FIN)
		set |= reply ? CT_FIN_REPLY : CT_FIN_ORIG;
	/* a connection first seen in mid-stream, without its SYN, is no more than
	 * an attempt either until both ends were heard */
	if (!reply && tcp & TCP_ACK && !(tcp & TCP_SYN) && flags & CT_REPLIED)
		set |= CT_ESTABLISHED;
	return set;
}

/* A RST whose sequence number the receiver does not accept ends nothing: where
 * both ends go on after it, it was one of those. */
static __always_inline void ct_survive_reset(struct ct_entry *e)
{
	if ((e->flags & CT_ALIVE) == CT_ALIVE)
		__sync_fetch_and_and(&e->flags, ~(CT_RST | CT_CLOSED | CT_ALIVE));
}

/* Counts the packet into e; returns the type of event that is due, or 0. */
static __always_inline __u8 ct_account(struct ct_entry *e, const struct packet *p, bool reply,
				       __u32 len, __u32 now)
{
	__u32 set = reply ? CT_REPLIED : 0, last;

	__sync_fetch_and_add(&e->packets[reply], 1);
	__sync_fetch_and_add(&e->bytes[reply], len);
	if (e->last_seen != now)
		e->last_seen = now;
	if (p->protocol == IPPROTO_TCP && !p->later_fragment)
		set |= ct_tcp_flags(p->tcp_flags, reply, e->flags);
	if ((e->flags & set) != set)
		__sync_fetch_and_or(&e->flags, set);
	if (set & CT_ALIVE)
		ct_survive_reset(e);
	if (set & CT_CLOSING && !(e->flags & CT_CLOSED) &&
	    (e->flags & CT_RST || (e->flags & CT_FIN_ORIG && e->flags & CT_FIN_REPLY))) {
		if (!(__sync_fetch_and_or(&e->flags, CT_CLOSED) & CT_CLOSED))
			return EVENT_CLOSE;
	}
	last = e->last_report;
	if (report_interval && (__s32)(now - last) >= (__s32)report_interval &&
	    __sync_val_compare_and_swap(&e->last_report, last, now) == last)
		return EVENT_UPDATE;
	return 0;
}

/* A new connection may take the place of an entry that is over, or that never
 * was a connection: expired, closed and met by a SYN, or begun by the other end
 * without an answer, where this SYN is what really begins it. */
static __always_inline bool ct_is_over(const struct ct_entry *e, const struct packet *p,
				       bool from_a, __u32 now)
{
	bool reply = !(e->flags & CT_FROM_A) == from_a;

	if (ct_expired(e, p->protocol, now))
		return true;
	if (p->protocol != IPPROTO_TCP || (p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	return e->flags & CT_CLOSING || (reply && !(e->flags & CT_REPLIED));
}

/* Live connections of each address of a pod, closed ones apart; corrected by
 * user space at each collection. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct addr);
	__type(value, __u64);
} weft_quota SEC(".maps");

/* Connections that one address of a pod may have, so that no pod can fill the
 * table; 0 is no limit. */
volatile const __u32 ct_max_per_pod = 0;

/* Takes one connection from the quota of the pod at this end. */
static __always_inline bool ct_within_quota(const struct packet *p, __u8 direction)
{
	const struct addr *pod = direction == DIRECTION_EGRESS ? &p->src : &p->dst;
	__u64 one = 1, *live;

	live = bpf_map_lookup_elem(&weft_quota, pod);
	if (!live) {
		bpf_map_update_elem(&weft_quota, pod, &one, BPF_NOEXIST);
		return true;
	}
	/* signed: what was counted down twice is corrected later */
	if (ct_max_per_pod && (__s64)*live >= ct_max_per_pod)
		return false;
	__sync_fetch_and_add(live, 1);
	return true;
}

/* Gives back what a connection that has closed took: it stays in the table for
 * late packets, and a pod may open the next one. */
static __always_inline void ct_closed(const struct ct_entry *e, const struct packet *p, bool reply)
{
	bool owner_sent = !(e->flags & CT_OWNED_ORIG) == reply;
	__u64 *live = bpf_map_lookup_elem(&weft_quota, owner_sent ? &p->src : &p->dst);

	if (live)
		__sync_fetch_and_add(live, -1);
}

/* Makes the entry of a new connection. Returns 0, a drop reason, or -EEXIST
 * where another CPU was first. */
static SUBPROGRAM int ct_create(struct __sk_buff *skb, const struct packet *p,
				const struct lookup *l)
{
	__u64 src = identity_of(&p->src), dst = identity_of(&p->dst);
	__u32 now = now_seconds(), reply = l->reply & 1;
	struct ct_entry e = {
		.src_identity = reply ? dst : src,
		.dst_identity = reply ? src : dst,
		.flags = (l->from_a == !reply ? CT_FROM_A : 0) | (reply ? CT_REPLIED : 0) |
			 ((l->direction == DIRECTION_EGRESS) == !reply ? CT_OWNED_ORIG : 0),
		.last_seen = now,
		.last_report = now,
	};
	long err;

	e.subject[reply] = l->src_subject;
	e.subject[1 - reply] = l->dst_subject;
	e.packets[reply] = 1;
	e.bytes[reply] = skb->len;
	if (p->protocol == IPPROTO_TCP)
		e.flags |= ct_tcp_flags(p->tcp_flags, reply, 0);
	if (!ct_within_quota(p, l->direction))
		return DROP_CONNTRACK_QUOTA;
	err = bpf_map_update_elem(&weft_conntrack, &l->key, &e, BPF_NOEXIST);
	if (err)
		return err == -EEXIST ? -EEXIST : DROP_CONNTRACK_FULL;
	emit(skb, p, EVENT_NEW, l->direction, 0, src, dst, 1, skb->len);
	return 0;
}

/* Judges what seems to be a new connection. A TCP packet without SYN is in the
 * middle of one that was forgotten: it may be an answer, and passes as one
 * where the other end may begin. That opens nothing: without a SYN there is no
 * connection to the other end. Returns 0 with l->reply, or a drop reason. */
static __always_inline int ct_judge_new(struct packet *p, struct lookup *l)
{
	__u32 rule;
	int err;

	if (!(l->src_subject | l->dst_subject))
		return 0;
	err = policy_judge(p, l);
	if (!err || p->protocol != IPPROTO_TCP || p->tcp_flags & TCP_SYN || p->later_fragment)
		return err;
	rule = p->rule;
	l->reply = 1;
	if (!policy_judge(p, l))
		return 0;
	l->reply = 0;
	p->rule = rule;
	return err;
}

/* Whether the connection may go on: it is judged again under rules that are not
 * those it was judged by, and the entry keeps the answer. */
static __always_inline int ct_allowed(struct packet *p, const struct lookup *l, struct ct_entry *e)
{
	__u32 reply = l->reply & 1; /* for the verifier, which saw it come from the stack */
	int err = 0;

	if (e->subject[reply] == l->src_subject && e->subject[1 - reply] == l->dst_subject) {
		p->rule = e->rule;
		return e->flags & CT_DENIED ? DROP_POLICY : 0;
	}
	if (!keep_established)
		err = policy_judge(p, l);
	if (err)
		__sync_fetch_and_or(&e->flags, CT_DENIED);
	else
		__sync_fetch_and_and(&e->flags, ~CT_DENIED);
	e->rule = p->rule;
	e->subject[reply] = l->src_subject;
	e->subject[1 - reply] = l->dst_subject;
	return err;
}

/* Finds or makes the packet's entry and counts it; *out points to the entry.
 * The caller has filled in direction and subjects of *l. Returns 0 or a drop
 * reason. */
static __always_inline int conntrack(struct __sk_buff *skb, struct packet *p, struct lookup *l,
				     struct ct_entry **out)
{
	__u32 now = now_seconds();
	struct ct_entry *e;
	int err;
	__u8 due;

	l->from_a = ct_key_of(&l->key, &p->src, &p->dst, p->sport, p->dport, p->protocol);
	e = bpf_map_lookup_elem(&weft_conntrack, &l->key);
	if (e && ct_is_over(e, p, l->from_a, now)) {
		bpf_map_delete_elem(&weft_conntrack, &l->key);
		e = NULL;
	}
	if (!e) {
		err = ct_judge_new(p, l);
		if (!err)
			err = ct_create(skb, p, l);
		if (err && err != -EEXIST)
			return err;
		e = bpf_map_lookup_elem(&weft_conntrack, &l->key);
		if (!e)
			return DROP_CONNTRACK_FULL;
		*out = e;
		if (!err)
			return 0;
	}
	*out = e;
	l->reply = !(e->flags & CT_FROM_A) == l->from_a;
	err = ct_allowed(p, l, e);
	if (err)
		return err;
	due = ct_account(e, p, l->reply & 1, skb->len, now);
	if (due == EVENT_CLOSE)
		ct_closed(e, p, l->reply & 1);
	if (due)
		emit(skb, p, due, l->direction, 0, l->reply ? e->dst_identity : e->src_identity,
		     l->reply ? e->src_identity : e->dst_identity, e->packets[0] + e->packets[1],
		     e->bytes[0] + e->bytes[1]);
	return 0;
}

/* Whether a connection exists, from either end. */
static __always_inline struct ct_entry *ct_find(const struct packet *p)
{
	struct ct_key key;

	ct_key_of(&key, &p->src, &p->dst, p->sport, p->dport, p->protocol);
	return bpf_map_lookup_elem(&weft_conntrack, &key);
}
