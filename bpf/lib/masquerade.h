// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Pods talk to the outside with the node's address; conntrack remembers the
 * port, this map the way back. */

struct nat_key {
	struct addr remote;
	__be16 remote_port; /* 0 for ICMP */
	__be16 nat_port;    /* ICMP: the echo identifier */
	__u8 protocol;
	__u8 pad[3];
};

struct nat_entry {
	struct addr pod;
	__be16 pod_port;
	__u8 pad[6];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__type(key, struct nat_key);
	__type(value, struct nat_entry);
} weft_nat SEC(".maps");

volatile const bool masquerade_enabled = true;
/* Source ports on the wire, host order, first to last. They lie outside of the
 * range that the node's own connections use (net.ipv4.ip_local_port_range). */
volatile const __u16 masquerade_first_port = 10000;
volatile const __u16 masquerade_last_port = 29999;

#define MASQUERADE_TRIES 24

static __always_inline bool masquerade_protocol(const struct packet *p)
{
	switch (p->protocol) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
		return true;
	case IPPROTO_ICMP:
		return p->icmp_type == 8;
	case IPPROTO_ICMPV6:
		return p->icmp_type == 128;
	}
	return false;
}

static __always_inline int source_port_off(__u8 protocol)
{
	return protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6 ? 4 : 0;
}

static __always_inline int destination_port_off(__u8 protocol)
{
	return protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6 ? 4 : 2;
}

/* The connection that has, or is about to have, the port of an entry; NULL where
 * it is over and the entry only waits for its collection. */
static __always_inline struct ct_entry *nat_connection(const struct nat_key *k,
						       const struct nat_entry *nat)
{
	struct ct_entry *ct;
	struct ct_key key;

	ct_key_of(&key, &nat->pod, &k->remote, nat->pod_port,
		  is_icmp(k->protocol) ? nat->pod_port : k->remote_port, k->protocol);
	ct = bpf_map_lookup_elem(&weft_conntrack, &key);
	if (!ct || ct_expired(ct, k->protocol, now_seconds()))
		return NULL;
	return ct->nat_port && ct->nat_port != k->nat_port ? NULL : ct;
}

/* Takes a free port for the connection of p; returns it in network order, or 0. */
static __always_inline __be16 take_port(const struct packet *p)
{
	struct nat_entry entry = {.pod = p->src, .pod_port = p->sport};
	struct nat_key key = {
		.remote = p->dst,
		.remote_port = is_icmp(p->protocol) ? 0 : p->dport,
		.protocol = p->protocol,
	};
	__u32 range = masquerade_last_port - masquerade_first_port + 1;
	__u32 start = bpf_get_prandom_u32();
	struct nat_entry *other;

	for (int i = 0; i < MASQUERADE_TRIES; i++) {
		key.nat_port = bpf_htons(masquerade_first_port + (start + i * 7919) % range);
		if (!bpf_map_update_elem(&weft_nat, &key, &entry, BPF_NOEXIST))
			return key.nat_port;
		other = bpf_map_lookup_elem(&weft_nat, &key);
		if (other && !nat_connection(&key, other) &&
		    !bpf_map_update_elem(&weft_nat, &key, &entry, BPF_ANY))
			return key.nat_port;
	}
	return 0;
}

/* The connection's port on the wire, taken at its first packet. */
static __always_inline __be16 masquerade_port(const struct packet *p, struct ct_entry *ct)
{
	__u32 taken, other;

	if (ct->nat_port)
		return ct->nat_port;
	taken = take_port(p);
	if (!taken)
		return 0;
	other = __sync_val_compare_and_swap(&ct->nat_port, 0, taken);
	/* another CPU was first: ours is collected as an orphan */
	return other ? other : taken;
}

/* Gives a packet to the outside the node's address. Returns 0 or a drop reason. */
static SUBPROGRAM int masquerade(struct __sk_buff *skb, const struct packet *p, struct ct_entry *ct)
{
	struct addr node;
	__be16 port;

	node_addr(&node, p->v4);
	if (addr_is_zero(&node))
		return DROP_MASQUERADE_ADDRESS;
	if (!p->later_fragment && !masquerade_protocol(p))
		return DROP_MASQUERADE_PROTOCOL;
	port = masquerade_port(p, ct);
	if (!port)
		return DROP_MASQUERADE_EXHAUSTED;
	return replace_endpoint(skb, p, true, &node, p->sport, port, source_port_off(p->protocol));
}

static __always_inline void nat_key_of(struct nat_key *k, const struct addr *remote,
				       __be16 remote_port, __be16 nat_port, __u8 protocol)
{
	k->remote = *remote;
	k->remote_port = is_icmp(protocol) ? 0 : remote_port;
	k->nat_port = nat_port;
	k->protocol = protocol;
	__builtin_memset(k->pad, 0, sizeof(k->pad));
}

/* A SYN from the outside begins a connection; no answer does. Without this an
 * old entry would let it in as if the pod were open to the outside. */
static __always_inline bool begins(const struct packet *p)
{
	return p->protocol == IPPROTO_TCP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

static __always_inline bool is_echo_request(const struct packet *p)
{
	return is_icmp(p->protocol) && p->icmp_type == (p->v4 ? 8 : 128);
}

/* Gives an ICMP error about what went to the outside the pod's address, and the
 * packet that it quotes too. */
static SUBPROGRAM int unmasquerade_error(struct __sk_buff *skb, struct packet *p)
{
	struct packet q = {};
	struct nat_entry *nat;
	struct nat_key key;
	struct addr pod;
	int err;

	if (!parse_quoted(skb, p, &q) || !addr_equal(&q.src, &p->dst))
		return 0;
	nat_key_of(&key, &q.dst, q.dport, q.sport, q.protocol);
	nat = bpf_map_lookup_elem(&weft_nat, &key);
	if (!nat)
		return 0;
	pod = nat->pod;
	err = replace_quoted(skb, p, &q, true, &pod, nat->pod_port);
	if (!err)
		err = replace_endpoint(skb, p, false, &pod, 0, 0, -1);
	p->dst = pod;
	return err;
}

/* Gives an answer from the outside, or an ICMP error about what went there, the
 * pod's address. Returns 0 with *p changed, 0 with *p unchanged where the
 * packet is the node's own, or a drop reason. */
static SUBPROGRAM int unmasquerade(struct __sk_buff *skb, struct packet *p)
{
	struct nat_entry *nat;
	struct nat_key key;
	struct addr pod;
	__be16 port;
	int err;

	nat_key_of(&key, &p->src, p->sport, p->dport, p->protocol);
	nat = is_echo_request(p) || begins(p) ? NULL : bpf_map_lookup_elem(&weft_nat, &key);
	if (!nat || !nat_connection(&key, nat))
		return 0;
	pod = nat->pod;
	port = nat->pod_port;
	err = replace_endpoint(skb, p, false, &pod, p->dport, port,
			       destination_port_off(p->protocol));
	p->dst = pod;
	p->dport = port;
	if (is_icmp(p->protocol))
		p->sport = port;
	return err;
}

/* Gives an ICMP error of a pod about an answer from the outside the node's
 * address, quoted packet included. */
static SUBPROGRAM int masquerade_error(struct __sk_buff *skb, const struct packet *p,
				       __be16 nat_port)
{
	struct packet q = {};
	struct addr node;
	int err;

	node_addr(&node, p->v4);
	if (addr_is_zero(&node))
		return DROP_MASQUERADE_ADDRESS;
	if (!parse_quoted(skb, p, &q))
		return DROP_ICMP_UNMATCHED;
	err = replace_quoted(skb, p, &q, false, &node, nat_port);
	if (err)
		return err;
	return replace_endpoint(skb, p, true, &node, 0, 0, -1);
}
