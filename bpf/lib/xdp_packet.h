// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Reading and changing packets as frames, before the kernel makes an skb of
 * them. Only what is plain is read: the rest is tcx's. */

/* A frame of xdp_handle: v4 is known at compile time wherever this is used. */
struct frame {
	void *data, *end;
	__u32 len;    /* all of it: [data, end) may be the first part only */
	__u32 l4_len; /* as the IP header has it */
};

#define IP4_HLEN sizeof(struct iphdr)
#define IP6_HLEN sizeof(struct ipv6hdr)
#define UDP_HLEN sizeof(struct udphdr)
/* As far as the flags. */
#define TCP_READ_LEN sizeof(struct tcphdr)

static __always_inline __u32 l3_len(bool v4)
{
	return v4 ? IP4_HLEN : IP6_HLEN;
}

/* Fills in the addresses of a frame that holds an IP header; false where it
 * does not. */
static __always_inline bool xdp_addresses(const struct frame *f, struct packet *p, bool v4)
{
	if (f->data + ETH_HLEN + l3_len(v4) > f->end)
		return false;
	p->v4 = v4;
	if (v4) {
		struct iphdr *ip = f->data + ETH_HLEN;

		addr_from_v4(&p->src, ip->saddr);
		addr_from_v4(&p->dst, ip->daddr);
	} else {
		struct ipv6hdr *ip = f->data + ETH_HLEN;

		addr_from_v6(&p->src, &ip->saddr);
		addr_from_v6(&p->dst, &ip->daddr);
	}
	return true;
}

/* Reads the IP header, which xdp_addresses found to be there. False for what is
 * not plain: options, extension headers, fragments, lengths that disagree. */
static __always_inline bool xdp_parse_ip(struct frame *f, struct packet *p)
{
	struct ipv6hdr *ip6 = f->data + ETH_HLEN;
	struct iphdr *ip = f->data + ETH_HLEN;
	__u32 l3;

	if (p->v4) {
		if (ip->version != 4 || ip->ihl != 5 || ip->frag_off & bpf_htons(IP_MF | IP_OFFSET))
			return false;
		p->protocol = ip->protocol;
		p->ttl = ip->ttl;
		l3 = bpf_ntohs(ip->tot_len);
		if (l3 < IP4_HLEN)
			return false;
		f->l4_len = l3 - IP4_HLEN;
	} else {
		if (ip6->version != 6 || is_v4(&p->src) || is_v4(&p->dst))
			return false;
		p->protocol = ip6->nexthdr;
		p->ttl = ip6->hop_limit;
		f->l4_len = bpf_ntohs(ip6->payload_len);
		l3 = f->l4_len + IP6_HLEN;
	}
	return l3 + ETH_HLEN <= f->len;
}

/* Reads ports and flags of TCP and UDP. */
static __always_inline bool xdp_parse_l4(const struct frame *f, struct packet *p, bool v4)
{
	void *l4 = f->data + ETH_HLEN + l3_len(v4);
	struct tcphdr *tcp = l4;
	struct udphdr *udp = l4;

	if (l4 + UDP_HLEN > f->end || f->l4_len < UDP_HLEN)
		return false;
	p->sport = udp->source;
	p->dport = udp->dest;
	if (p->protocol == IPPROTO_UDP)
		return true;
	if (p->protocol != IPPROTO_TCP || l4 + TCP_READ_LEN > f->end || f->l4_len < TCP_READ_LEN)
		return false;
	p->tcp_flags = ((__u8 *)tcp)[13];
	return true;
}

/* The sum of 32-bit words, to be folded. */
static __always_inline __u64 sum_addr(const struct addr *a, bool v4)
{
	return v4 ? (__u64)a->w[3] : (__u64)a->w[0] + a->w[1] + a->w[2] + a->w[3];
}

static __always_inline __u16 fold64(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* RFC 1624: the checksum after words that add up to from became such that add
 * up to what to is. */
static __always_inline __u16 sum_replace(__u16 check, __u64 from, __u64 to)
{
	/* one's complement: minus x is plus not x */
	return ~fold64((__u64)(__u16)~check + (__u16)~fold64(from) + to);
}

/* Whether a checksum is yet to be completed by a device, as it is in what comes
 * from another namespace of this machine: it is the sum of the pseudo header
 * alone then. One in 65,536 others looks the same, so nothing may be lost by it. */
static __always_inline bool is_partial(const struct frame *f, const struct packet *p, bool v4,
				       __u16 check)
{
	__u64 sum = sum_addr(&p->src, v4) + sum_addr(&p->dst, v4) + bpf_htons(f->l4_len) +
		    bpf_htons(p->protocol);

	return check == fold64(sum);
}

/* Where the L4 checksum is; NULL where the frame ends before it. */
static __always_inline __u16 *xdp_check(const struct frame *f, __u8 protocol, bool v4)
{
	void *l4 = f->data + ETH_HLEN + l3_len(v4);
	struct tcphdr *tcp = l4;
	struct udphdr *udp = l4;

	if (protocol == IPPROTO_UDP)
		return (void *)(udp + 1) > f->end ? NULL : &udp->check;
	return (void *)(tcp + 1) > f->end ? NULL : &tcp->check;
}

/* Both ports as one word. */
static __always_inline __u64 sum_ports(__be16 sport, __be16 dport)
{
	return (__u64)sport + dport;
}

/* Gives the packet the addresses and ports of to, and one TTL less. The caller
 * has read it and knows that check is in it. */
static __always_inline void xdp_rewrite(const struct frame *f, const struct packet *p,
					const struct service_flow *to, __u16 *check, bool v4)
{
	__u64 addrs_from = sum_addr(&p->src, v4) + sum_addr(&p->dst, v4);
	__u64 addrs_to = sum_addr(&to->src, v4) + sum_addr(&to->dst, v4);
	struct udphdr *ports = f->data + ETH_HLEN + l3_len(v4);
	struct ipv6hdr *ip6 = f->data + ETH_HLEN;
	struct iphdr *ip = f->data + ETH_HLEN;
	__u16 sum;

	if (*check || p->protocol != IPPROTO_UDP) {
		sum = sum_replace(*check, addrs_from + sum_ports(p->sport, p->dport),
				  addrs_to + sum_ports(to->sport, to->dport));
		*check = !sum && p->protocol == IPPROTO_UDP ? 0xffff : sum;
	}
	ports->source = to->sport;
	ports->dest = to->dport;
	if (v4) {
		/* the TTL is the upper byte of its word: 0x0100 less in the sum of words */
		ip->check = sum_replace(ip->check, addrs_from + bpf_htons(0x0100), addrs_to);
		ip->saddr = to->src.w[3];
		ip->daddr = to->dst.w[3];
		ip->ttl--;
	} else {
		__builtin_memcpy(&ip6->saddr, &to->src, sizeof(to->src));
		__builtin_memcpy(&ip6->daddr, &to->dst, sizeof(to->dst));
		ip6->hop_limit--;
	}
}

static __always_inline bool mac_is_known(const __u8 *mac)
{
	return mac[0] | mac[1] | mac[2] | mac[3] | mac[4] | mac[5];
}

/* Sends the frame back where it came from, to another machine. */
static __always_inline int xdp_send(const struct frame *f, const __u8 *mac)
{
	struct ethhdr *eth = f->data;

	__builtin_memcpy(eth->h_source, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, mac, ETH_ALEN);
	count(FORWARD_SERVICE, f->len);
	return XDP_TX;
}
