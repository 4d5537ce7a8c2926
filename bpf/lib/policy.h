// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* The verdict of network policy on a new connection. internal/policy compiles
 * rules to entries such that the longest prefix within a peer is the rule that
 * decides for it; ranks order the rules of different peers. */

struct policy_key {
	__u32 prefixlen; /* at least POLICY_EXACT */
	__be32 subject;  /* pods with the same rules; not 0 */
	__u8 direction;  /* enum direction, seen from the subject */
	__u8 peer[8];    /* identity, CIDR class, or 0 for any; big endian */
	__u8 protocol;
	__be16 port; /* of the destination; 0 for protocols without */
} __attribute__((packed));

/* Set in the number of a subject whose ingress, or egress, a policy judges. */
#define SUBJECT_INGRESS (1U << 31)
#define SUBJECT_EGRESS (1U << 30)

/* Bits of subject, direction and peer: they always match in full. */
#define POLICY_EXACT 104
#define POLICY_WHOLE 128

enum policy_verdict {
	POLICY_NONE = 0,
	POLICY_ALLOW = 1,
	POLICY_DENY = 2,
	POLICY_PASS = 3, /* admin tier: ask the lower ones */
};

/* No rule of this tier matches. */
#define RANK_NONE 0xffffffff

struct policy_entry {
	__u32 admin_rank, admin_rule; /* the winner of the admin tier */
	__u32 rank, rule;             /* the winner of the tiers below it */
	__u8 admin_verdict, verdict;  /* enum policy_verdict */
	__u8 pad[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct policy_key);
	__type(value, struct policy_entry);
} weft_policy SEC(".maps");

/* The class of the most specific prefix, of those that policies name, that an
 * address lies in. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ipcache_key);
	__type(value, __u64);
} weft_cidr SEC(".maps");

/* Connections that policy forbids since a change go on where this is set. */
volatile const bool keep_established = false;

/* A packet in the light of its connection. */
struct lookup {
	struct ct_key key;
	bool from_a;    /* the packet's source is end a of the key */
	__u8 reply;     /* out: 1 where it comes from the responder */
	__u8 direction; /* enum direction */
	__u8 pad;
	__u32 src_subject, dst_subject; /* of the packet's two ends; 0: no policy, or not here */
};

/* The winners so far. */
struct policy_best {
	__u32 admin_rank, admin_rule, rank, rule;
	__u8 admin_verdict, verdict;
};

static __always_inline void policy_ask(struct policy_best *best, struct policy_key *key, __u64 peer)
{
	__u64 wire = bpf_cpu_to_be64(peer);
	struct policy_entry *e;

	__builtin_memcpy(key->peer, &wire, sizeof(wire));
	e = bpf_map_lookup_elem(&weft_policy, key);
	if (!e)
		return;
	if (e->admin_rank < best->admin_rank) {
		best->admin_rank = e->admin_rank;
		best->admin_rule = e->admin_rule;
		best->admin_verdict = e->admin_verdict;
	}
	if (e->rank < best->rank) {
		best->rank = e->rank;
		best->rule = e->rule;
		best->verdict = e->verdict;
	}
}

/* One side of a connection to judge. */
struct side {
	__u32 subject;
	__u8 direction;
	__u8 protocol;
	__be16 port;
	__u64 identity; /* of the peer */
};

/* Judges one side; *rule is what decides. A subject always has an entry for any
 * peer; where it is missing, the map is not what it should be, and the answer
 * is no. */
static SUBPROGRAM bool policy_side(const struct side *s, const struct addr *peer, __u32 *rule)
{
	struct policy_best best = {.admin_rank = RANK_NONE, .rank = RANK_NONE};
	struct policy_key key = {
		.prefixlen = POLICY_WHOLE,
		.subject = bpf_htonl(s->subject),
		.direction = s->direction,
		.protocol = s->protocol,
		.port = s->port,
	};
	struct ipcache_key prefix = {
		.prefixlen = 128,
		.addr = {peer->w[0], peer->w[1], peer->w[2], peer->w[3]},
	};
	__u64 *class = bpf_map_lookup_elem(&weft_cidr, &prefix);

	policy_ask(&best, &key, 0);
	policy_ask(&best, &key, s->identity);
	if (class)
		policy_ask(&best, &key, *class);
	if (best.admin_verdict == POLICY_ALLOW || best.admin_verdict == POLICY_DENY) {
		*rule = best.admin_rule;
		return best.admin_verdict == POLICY_ALLOW;
	}
	*rule = best.rule;
	return best.verdict == POLICY_ALLOW;
}

/* Judges the connection of p, as its originator began it, on the sides that are
 * pods of this node. What a pod and its own node say to each other is always
 * allowed: the node probes it. Returns 0 or a drop reason, with p->rule. */
static SUBPROGRAM int policy_judge(struct packet *p, const struct lookup *l)
{
	const struct addr *src = l->reply ? &p->dst : &p->src;
	const struct addr *dst = l->reply ? &p->src : &p->dst;
	__u32 dst_subject = l->reply ? l->src_subject : l->dst_subject;
	struct side s = {
		.subject = l->reply ? l->dst_subject : l->src_subject,
		.direction = DIRECTION_EGRESS,
		.protocol = p->protocol,
		.port = is_icmp(p->protocol) ? 0
			: l->reply           ? p->sport
					     : p->dport,
		.identity = identity_of(dst),
	};
	__u32 rule = 0;

	if (s.identity == IDENTITY_UNKNOWN && s.subject & SUBJECT_EGRESS)
		return DROP_IDENTITY_UNKNOWN;
	if (s.subject && s.identity != IDENTITY_NODE && !policy_side(&s, dst, &rule)) {
		p->rule = rule;
		return DROP_POLICY;
	}
	s.identity = identity_of(src);
	if (!dst_subject || s.identity == IDENTITY_NODE)
		return 0;
	if (s.identity == IDENTITY_UNKNOWN && dst_subject & SUBJECT_INGRESS)
		return DROP_IDENTITY_UNKNOWN;
	s.subject = dst_subject;
	s.direction = DIRECTION_INGRESS;
	if (policy_side(&s, src, &rule))
		return 0;
	p->rule = rule;
	return DROP_POLICY;
}
