// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Direct server return: a packet for a backend of another node keeps its
 * client's address and tells in an option which frontend it was sent to, so that
 * the backend's node answers the client itself. The option is on the SYN of a TCP
 * connection and on every datagram that has room for it. */

/* Experimental numbers of RFC 4727; the copied and the skip-if-unknown bits are
 * as for an option that nobody else needs to understand. */
#define DSR_OPTION4 0x9e
#define DSR_OPTION6 0x1e

struct dsr4 {
	__u8 type, len;
	__be16 port;
	__be32 addr;
};

/* A whole destination options header. */
struct dsr6 {
	__u8 next, words; /* length in units of 8 bytes beyond the first 8 */
	__u8 type, len;
	__be32 addr[4];
	__be16 port;
	__be16 pad;
};

#define DSR6_WORDS (sizeof(struct dsr6) / 8 - 1)
#define DSR6_LEN (sizeof(struct dsr6) - 4)

/* Longest IPv4 header. */
#define IP_MAX_HLEN 60

/* Whether the packet may carry the option to another node. */
static __always_inline bool dsr_fits(struct __sk_buff *skb, const struct packet *p)
{
	__u32 len = p->v4 ? sizeof(struct dsr4) : sizeof(struct dsr6);

	if (!service_dsr || tunnel_ifindex || skb->gso_size || p->first_fragment ||
	    p->later_fragment || wire_len(skb, p) + len > uplink_mtu)
		return false;
	return !p->v4 || p->l4_off + sizeof(struct dsr4) <= ETH_HLEN + IP_MAX_HLEN;
}

static __always_inline int dsr_insert4(struct __sk_buff *skb, struct packet *p,
				       const struct flow_key *frontend)
{
	struct dsr4 o = {
		.type = DSR_OPTION4,
		.len = sizeof(o),
		.port = frontend->dport,
		.addr = frontend->dst.w[3],
	};
	__be32 was, is[3];

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &was, sizeof(was)) ||
	    bpf_skb_adjust_room(skb, sizeof(o), BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_NO_CSUM_RESET))
		return DROP_REWRITE;
	/* header length in its words, total length in bytes */
	is[0] = bpf_htonl(bpf_ntohl(was) + ((sizeof(o) / 4) << 24) + sizeof(o));
	__builtin_memcpy(&is[1], &o, sizeof(o));
	if (bpf_skb_store_bytes(skb, ETH_HLEN, &is[0], 4, 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN + sizeof(struct iphdr), &is[1], sizeof(o), 0) ||
	    bpf_l3_csum_replace(skb, IP_CSUM_OFF, 0,
				bpf_csum_diff(&was, sizeof(was), is, sizeof(is), 0), 0))
		return DROP_REWRITE;
	p->l4_off += sizeof(o);
	p->header_len += sizeof(o);
	return 0;
}

/* The length and next header fields of an IPv6 header, with the hop limit. */
#define IP6_LENGTH_OFF (ETH_HLEN + offsetof(struct ipv6hdr, payload_len))

static __always_inline int dsr_insert6(struct __sk_buff *skb, struct packet *p,
				       const struct flow_key *frontend)
{
	struct dsr6 o = {
		.words = DSR6_WORDS,
		.type = DSR_OPTION6,
		.len = DSR6_LEN,
		.addr = {frontend->dst.w[0], frontend->dst.w[1], frontend->dst.w[2],
			 frontend->dst.w[3]},
		.port = frontend->dport,
	};
	struct {
		__be16 len;
		__u8 next, hops;
	} h;

	if (bpf_skb_load_bytes(skb, IP6_LENGTH_OFF, &h, sizeof(h)) ||
	    bpf_skb_adjust_room(skb, sizeof(o), BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_NO_CSUM_RESET))
		return DROP_REWRITE;
	o.next = h.next;
	h.next = NEXTHDR_DEST;
	h.len = bpf_htons(bpf_ntohs(h.len) + sizeof(o));
	if (bpf_skb_store_bytes(skb, IP6_LENGTH_OFF, &h, sizeof(h), 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN + sizeof(struct ipv6hdr), &o, sizeof(o), 0))
		return DROP_REWRITE;
	p->l4_off += sizeof(o);
	p->header_len += sizeof(o);
	return 0;
}

/* Adds the option where the packet is one that carries it. */
static SUBPROGRAM int dsr_insert(struct __sk_buff *skb, struct packet *p,
				 const struct flow_key *frontend)
{
	if (!p || !frontend || (p->protocol == IPPROTO_TCP && !is_begin(p)) || !dsr_fits(skb, p))
		return 0;
	return p->v4 ? dsr_insert4(skb, p, frontend) : dsr_insert6(skb, p, frontend);
}

/* Whether there is something between the IP header and the upper layer. */
static __always_inline bool has_options(const struct packet *p)
{
	return p->l4_off > ETH_HLEN + (p->v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));
}

/* Reads the frontend that the option names, which comes first of all options. */
static __always_inline bool dsr_read(struct __sk_buff *skb, const struct packet *p,
				     struct addr *frontend, __be16 *port)
{
	if (p->v4) {
		struct dsr4 o;

		if (bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct iphdr), &o, sizeof(o)) ||
		    o.type != DSR_OPTION4 || o.len != sizeof(o))
			return false;
		addr_from_v4(frontend, o.addr);
		*port = o.port;
	} else {
		struct dsr6 o;
		__u8 next;

		if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, nexthdr), &next,
				       1) ||
		    next != NEXTHDR_DEST ||
		    bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ipv6hdr), &o, sizeof(o)) ||
		    o.words != DSR6_WORDS || o.type != DSR_OPTION6 || o.len != DSR6_LEN)
			return false;
		frontend->w[0] = o.addr[0];
		frontend->w[1] = o.addr[1];
		frontend->w[2] = o.addr[2];
		frontend->w[3] = o.addr[3];
		*port = o.port;
		if (is_v4(frontend))
			return false;
	}
	return true;
}

static __always_inline int dsr_strip4(struct __sk_buff *skb, struct packet *p)
{
	__be32 was[3], is;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &was[0], 4) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct iphdr), &was[1],
			       sizeof(struct dsr4)) ||
	    bpf_skb_adjust_room(skb, -(int)sizeof(struct dsr4), BPF_ADJ_ROOM_NET,
				BPF_F_ADJ_ROOM_NO_CSUM_RESET))
		return DROP_REWRITE;
	is = bpf_htonl(bpf_ntohl(was[0]) - ((sizeof(struct dsr4) / 4) << 24) - sizeof(struct dsr4));
	if (bpf_skb_store_bytes(skb, ETH_HLEN, &is, sizeof(is), 0) ||
	    bpf_l3_csum_replace(skb, IP_CSUM_OFF, 0,
				bpf_csum_diff(was, sizeof(was), &is, sizeof(is), 0), 0))
		return DROP_REWRITE;
	p->l4_off -= sizeof(struct dsr4);
	p->header_len -= sizeof(struct dsr4);
	return 0;
}

static __always_inline int dsr_strip6(struct __sk_buff *skb, struct packet *p)
{
	struct {
		__be16 len;
		__u8 next, hops;
		struct dsr6 option;
	} was;
	__be32 is;

	if (bpf_skb_load_bytes(skb, IP6_LENGTH_OFF, &was, 4) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ipv6hdr), &was.option,
			       sizeof(was.option)) ||
	    bpf_skb_adjust_room(skb, -(int)sizeof(was.option), BPF_ADJ_ROOM_NET,
				BPF_F_ADJ_ROOM_NO_CSUM_RESET))
		return DROP_REWRITE;
	is = bpf_htonl((bpf_ntohs(was.len) - sizeof(was.option)) << 16 | was.option.next << 8 |
		       was.hops);
	/* what a device summed up (CHECKSUM_COMPLETE) had these bytes in it */
	bpf_csum_update(skb, bpf_csum_diff((__be32 *)&was, sizeof(was), &is, sizeof(is), 0));
	if (bpf_skb_store_bytes(skb, IP6_LENGTH_OFF, &is, sizeof(is), 0))
		return DROP_REWRITE;
	p->l4_off -= sizeof(was.option);
	p->header_len -= sizeof(was.option);
	return 0;
}

/* Whether there is such a frontend for clients from outside. Node ports are the
 * same on every node, and this one knows its own only. */
static __always_inline bool dsr_knows(const struct addr *frontend, __be16 port, __u8 protocol)
{
	struct service *s = service_lookup(frontend, port, protocol);
	struct ipcache_entry *e;
	struct addr node;

	if (!s) {
		e = ipcache_lookup(frontend);
		if (!e || !(e->flags & IPCACHE_REMOTE_NODE))
			return false;
		node_addr(&node, is_v4(frontend));
		s = service_lookup(&node, port, protocol);
	}
	return s && s->flags & SERVICE_EXTERNAL;
}

/* Remembers how the backend's answers go out. The answers of a TCP connection
 * that lives are not led elsewhere. Returns 0 or a drop reason. */
static __always_inline int dsr_remember(struct translation *t, const struct packet *p)
{
	__u32 now = now_seconds();
	struct service_flow *f;

	flow_key_back(&t->back_key, p);
	t->back.dst = p->src;
	t->back.dport = p->sport;
	t->back.flags = FLOW_REPLY | FLOW_DSR;
	t->back.service = 0;
	t->back.backend = 0;
	t->back.last_seen = now;
	__builtin_memset(t->back.mac, 0, sizeof(t->back.mac) + sizeof(t->back.hop));
	f = bpf_map_lookup_elem(&weft_service_flows, &t->back_key);
	if (f && flow_same_ends(f, &t->back) && !(f->flags & FLOW_CLOSING)) {
		if (f->last_seen != now)
			f->last_seen = now;
		return 0;
	}
	/* nor are those of a connection that was translated here */
	if (f && (p->protocol == IPPROTO_TCP || !(f->flags & FLOW_DSR)) &&
	    !(f->flags & FLOW_CLOSING) && !flow_expired(f, p->protocol, now))
		return 0;
	if (bpf_map_update_elem(&weft_service_flows, &t->back_key, &t->back, BPF_ANY))
		return DROP_SERVICE_FULL;
	t->made = !f;
	return 0;
}

/* Nodes send the option for clients outside of the cluster only. */
static __always_inline bool is_of_cluster(const struct addr *client)
{
	struct ipcache_entry *from = ipcache_lookup(client);

	return from && from->flags & (IPCACHE_POD | IPCACHE_REMOTE_NODE);
}

/* Takes the option off a packet for a pod of this node and remembers what it
 * says. One that names no frontend stays where it is, and means nothing. */
static SUBPROGRAM int dsr_receive(struct __sk_buff *skb, struct scratch *s)
{
	struct translation *t;
	struct packet *p;
	int err;

	if (!s)
		return 0;
	p = &s->packet;
	t = &s->translation;
	if ((p->protocol != IPPROTO_UDP && !is_begin(p)) || p->first_fragment ||
	    p->later_fragment || !dsr_read(skb, p, &t->back.src, &t->back.sport) ||
	    !dsr_knows(&t->back.src, t->back.sport, p->protocol) || is_of_cluster(&p->src))
		return 0;
	err = p->v4 ? dsr_strip4(skb, p) : dsr_strip6(skb, p);
	if (err)
		return err;
	t->dsr = true;
	return dsr_remember(t, p);
}
