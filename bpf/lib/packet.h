// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* What the datapath reads of a packet. */

#define ETH_HLEN 14
#define ETH_P_IP 0x0800
#define ETH_P_ARP 0x0806
#define ETH_P_IPV6 0x86DD
#define ETH_ALEN 6

#define AF_INET 2
#define AF_INET6 10

#define IP_MF 0x2000
#define IP_OFFSET 0x1fff
#define IP_DF 0x4000

#define IPPROTO_ICMPV6 58

/* skb->pkt_type: for this host. */
#define PACKET_HOST 0
#define PACKET_OTHERHOST 3

#define NEXTHDR_HOP 0
#define NEXTHDR_ROUTING 43
#define NEXTHDR_FRAGMENT 44
#define NEXTHDR_AUTH 51
#define NEXTHDR_DEST 60

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

/* IPv6 extension headers read before giving up. */
#define MAX_EXTENSIONS 6

struct packet {
	struct addr src, dst;
	__be16 sport, dport; /* ICMP echo: the identifier in both; 0 where there are none */
	__u8 protocol;       /* after IPv6 extension headers */
	__u8 tcp_flags;
	__u8 icmp_type, icmp_code;
	__u8 ttl;
	bool v4;
	bool icmp_error;     /* quotes the packet that it is about */
	bool first_fragment; /* more follow */
	bool later_fragment; /* carries no L4 header */
	bool dont_fragment;  /* always on IPv6 */
	__u16 l4_off;        /* from the start of the frame */
	__u16 header_len;    /* L3 and L4 headers together, for GSO sizes */
	__u16 mtu;           /* of the way that was too narrow, for the answer */
	__u32 fragment_id;   /* network order, IPv4 in the upper half */
	__u32 rule;          /* of policy, where it is dropped for that */
};

/* The packet's bounds. By hand, for the compiler may otherwise keep the address
 * of the context field in a register, which the verifier refuses to load from. */
static __always_inline void *packet_data(const struct __sk_buff *skb)
{
	void *p;

	asm volatile("%0 = *(u32 *)(%1 + %2)"
		     : "=r"(p)
		     : "r"(skb), "i"(offsetof(struct __sk_buff, data)));
	return p;
}

static __always_inline void *packet_end(const struct __sk_buff *skb)
{
	void *p;

	asm volatile("%0 = *(u32 *)(%1 + %2)"
		     : "=r"(p)
		     : "r"(skb), "i"(offsetof(struct __sk_buff, data_end)));
	return p;
}

/* Makes the first want bytes of the frame (or all of it) readable in place. */
static __always_inline void make_linear(struct __sk_buff *skb, __u32 want)
{
	if (want > skb->len)
		want = skb->len;
	if (packet_data(skb) + want > packet_end(skb))
		bpf_skb_pull_data(skb, want);
}

static __always_inline bool is_icmp(__u8 protocol)
{
	return protocol == IPPROTO_ICMP || protocol == IPPROTO_ICMPV6;
}

static __always_inline bool icmp4_is_error(__u8 type)
{
	return type == 3 || type == 4 || type == 5 || type == 11 || type == 12;
}

static __always_inline bool icmp6_is_error(__u8 type)
{
	return type < 128;
}

/* The first bytes of an L4 header. */
struct l4_head {
	__be16 sport, dport;
	__be16 id; /* ICMP echo identifier */
	__be16 sequence;
};

struct tcp_head {
	struct l4_head head;
	__be32 ack;
	__u8 len, flags;
};

#define TCP_HEAD_LEN 14

/* An L4 header may start this far into the frame to be read in place. */
#define MAX_DIRECT 0xff

/* Returns len bytes at off in place, or NULL where they are not linear. */
static __always_inline void *direct(const struct __sk_buff *skb, __u32 off, __u32 len)
{
	void *at;

	if (off > MAX_DIRECT)
		return NULL;
	barrier_var(off); /* the verifier must see the bound on this register */
	off &= MAX_DIRECT;
	at = packet_data(skb) + off;
	return at + len <= packet_end(skb) ? at : NULL;
}

static __always_inline int load_tcp(struct __sk_buff *skb, __u32 off, struct packet *p)
{
	struct tcp_head *h = direct(skb, off, TCP_HEAD_LEN), copy;

	if (h) {
		p->sport = h->head.sport;
		p->dport = h->head.dport;
		p->header_len += (h->len >> 4) * 4;
		p->tcp_flags = h->flags;
		return 0;
	}
	if (bpf_skb_load_bytes(skb, off, &copy, TCP_HEAD_LEN))
		return DROP_MALFORMED;
	p->sport = copy.head.sport;
	p->dport = copy.head.dport;
	p->header_len += (copy.len >> 4) * 4;
	p->tcp_flags = copy.flags;
	return 0;
}

static __always_inline int load_head(struct __sk_buff *skb, __u32 off, struct l4_head *head)
{
	struct l4_head *h = direct(skb, off, sizeof(*h));

	if (h) {
		*head = *h;
		return 0;
	}
	return bpf_skb_load_bytes(skb, off, head, sizeof(*head)) ? DROP_MALFORMED : 0;
}

static __always_inline void parse_icmp(struct packet *p, const struct l4_head *h)
{
	bool v4 = p->protocol == IPPROTO_ICMP;

	p->icmp_type = h->sport & 0xff;
	p->icmp_code = bpf_ntohs(h->sport) & 0xff;
	if (v4 ? icmp4_is_error(p->icmp_type) : icmp6_is_error(p->icmp_type)) {
		p->icmp_error = true;
		return;
	}
	if (v4 ? p->icmp_type == 8 || p->icmp_type == 0
	       : p->icmp_type == 128 || p->icmp_type == 129) {
		/* the echo identifier plays the part of both ports */
		p->sport = h->id;
		p->dport = h->id;
	}
}

/* Reads ports, flags and ICMP fields at off, in place where they are linear. */
static __always_inline int parse_l4_at(struct __sk_buff *skb, __u32 off, struct packet *p)
{
	struct l4_head head;

	p->header_len = off - ETH_HLEN;
	switch (p->protocol) {
	case IPPROTO_TCP:
		return load_tcp(skb, off, p);
	case IPPROTO_UDP:
	case IPPROTO_SCTP:
		if (load_head(skb, off, &head))
			return DROP_MALFORMED;
		p->sport = head.sport;
		p->dport = head.dport;
		p->header_len += sizeof(head);
		return 0;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		if (load_head(skb, off, &head))
			return DROP_MALFORMED;
		parse_icmp(p, &head);
		p->header_len += sizeof(head);
		return 0;
	}
	return 0;
}

static __always_inline int parse_ipv4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr *ip;
	__u16 frag;
	__u32 ihl;

	make_linear(skb, ETH_HLEN + 60);
	ip = packet_data(skb) + ETH_HLEN;
	if ((void *)(ip + 1) > packet_end(skb))
		return DROP_MALFORMED;
	ihl = ip->ihl * 4;
	if (ip->version != 4 || ihl < sizeof(*ip) || bpf_ntohs(ip->tot_len) < ihl ||
	    bpf_ntohs(ip->tot_len) + ETH_HLEN > skb->len)
		return DROP_MALFORMED;
	addr_from_v4(&p->src, ip->saddr);
	addr_from_v4(&p->dst, ip->daddr);
	p->v4 = true;
	p->protocol = ip->protocol;
	p->ttl = ip->ttl;
	p->l4_off = ETH_HLEN + ihl;
	p->header_len = ihl;
	frag = bpf_ntohs(ip->frag_off);
	p->dont_fragment = frag & IP_DF;
	p->later_fragment = frag & IP_OFFSET;
	p->first_fragment = (frag & IP_MF) && !p->later_fragment;
	p->fragment_id = (__u32)ip->id << 16;
	if (p->later_fragment)
		return 0;
	return parse_l4_at(skb, p->l4_off, p);
}

/* Follows IPv6 extension headers from p->l4_off and leaves p->protocol and
 * p->l4_off at the upper layer. */
static __always_inline int skip_extensions(struct __sk_buff *skb, struct packet *p)
{
	struct {
		__u8 next, len;
		__be16 frag;
		__be32 id;
	} ext;
	bool fragmented = false;

	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		switch (p->protocol) {
		case NEXTHDR_HOP:
		case NEXTHDR_ROUTING:
		case NEXTHDR_DEST:
		case NEXTHDR_AUTH:
		case NEXTHDR_FRAGMENT:
			break;
		default:
			return 0;
		}
		if (bpf_skb_load_bytes(skb, p->l4_off, &ext, sizeof(ext)))
			return DROP_MALFORMED;
		if (p->protocol == NEXTHDR_FRAGMENT) {
			if (fragmented) /* nobody sends a fragment of a fragment */
				return DROP_MALFORMED;
			fragmented = true;
			p->later_fragment = bpf_ntohs(ext.frag) & ~7;
			p->first_fragment = (bpf_ntohs(ext.frag) & 1) && !p->later_fragment;
			p->fragment_id = ext.id;
			p->protocol = ext.next;
			p->l4_off += 8;
			if (p->later_fragment)
				return 0;
			continue;
		}
		p->l4_off += p->protocol == NEXTHDR_AUTH ? (ext.len + 2) * 4 : (ext.len + 1) * 8;
		p->protocol = ext.next;
	}
	return DROP_IPV6_EXTENSION;
}

static __always_inline int parse_ipv6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr *ip;
	int err;

	make_linear(skb, ETH_HLEN + 60);
	ip = packet_data(skb) + ETH_HLEN;
	if ((void *)(ip + 1) > packet_end(skb))
		return DROP_MALFORMED;
	if (ip->version != 6 || bpf_ntohs(ip->payload_len) + sizeof(*ip) + ETH_HLEN > skb->len)
		return DROP_MALFORMED;
	addr_from_v6(&p->src, &ip->saddr);
	addr_from_v6(&p->dst, &ip->daddr);
	p->protocol = ip->nexthdr;
	p->ttl = ip->hop_limit;
	p->dont_fragment = true;
	p->l4_off = ETH_HLEN + sizeof(*ip);
	err = skip_extensions(skb, p);
	if (err)
		return err;
	p->header_len = p->l4_off - ETH_HLEN;
	if (p->later_fragment)
		return 0;
	return parse_l4_at(skb, p->l4_off, p);
}

/* Reads an IPv4 or IPv6 packet into *p, which must be zero. Returns 0 or a
 * drop reason. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *p)
{
	int err;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		return parse_ipv4(skb, p);
	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return DROP_ETHERTYPE;
	err = parse_ipv6(skb, p);
	/* an IPv4-mapped address in a real IPv6 packet would be taken for IPv4 */
	if (!err && (is_v4(&p->src) || is_v4(&p->dst)))
		return DROP_MALFORMED;
	return err;
}

static __always_inline bool is_multicast(const struct packet *p)
{
	if (p->v4)
		return p->dst.b[12] >= 224; /* 224.0.0.0/4, 240.0.0.0/4, broadcast */
	return p->dst.b[0] == 0xff;
}

/* Length of the largest L3 packet that this skb becomes on the wire. */
static __always_inline __u32 wire_len(struct __sk_buff *skb, const struct packet *p)
{
	return skb->gso_size ? skb->gso_size + p->header_len : skb->len - ETH_HLEN;
}

/* What a connection is found by, from either end. */
struct ct_key {
	struct addr a, b; /* a is the lesser of the two ends */
	__be16 a_port, b_port;
	__u8 protocol;
	__u8 pad[3];
};
