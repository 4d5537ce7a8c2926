// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Connections to services that are translated packet by packet: finding, making
 * and ageing their two halves in weft_service_flows. Nothing here touches a
 * packet buffer, so that tcx and XDP share it. */

/* Source ports of translated connections whose client's own port cannot be
 * kept, host order, first to last. */
volatile const __u16 service_first_port = 20000;
volatile const __u16 service_last_port = 29999;
/* Backends of other nodes answer clients from outside by themselves (native
 * routing only). */
volatile const bool service_dsr = false;

#define SERVICE_PORT_CYCLE 80 /* seconds */
#define SERVICE_PORT_TRIES 32
#define SERVICE_PORT_TRIES_NEAR 8

/* The connection ends, or has ended: a SYN begins another. */
#define FLOW_CLOSING (FLOW_FIN | FLOW_FIN_BACK | FLOW_RST | FLOW_RST_BACK)

/* What both halves know of the connection's state. */
#define FLOW_SHARED (FLOW_ANSWERED | FLOW_ESTABLISHED)

/* A packet that is translated. */
struct translation {
	bool active; /* the rest holds */
	bool made;   /* by this packet */
	bool silent; /* the refusal is not answered */
	bool dsr;    /* from another node; the answers, in back, go out directly */
	bool moved;  /* the packet has its new ends, the buffer not yet */
	bool stale;  /* another connection's old flow has the key */
	__u8 pad[2];
	struct flow_key key;    /* of the packet as it came */
	struct service_flow to; /* what it becomes */
	struct flow_key back_key;
	struct service_flow back; /* the other half */
};

/* Whether the packet goes to a client in a service's name. */
static __always_inline bool is_answer(const struct translation *t)
{
	return t->active && t->to.flags & FLOW_REPLY;
}

static __always_inline void flow_key_of(struct flow_key *k, const struct packet *p)
{
	k->src = p->src;
	k->dst = p->dst;
	k->sport = p->sport;
	k->dport = p->dport;
	k->protocol = p->protocol;
	__builtin_memset(k->pad, 0, sizeof(k->pad));
}

/* The key of a packet that answers p. */
static __always_inline void flow_key_back(struct flow_key *k, const struct packet *p)
{
	k->src = p->dst;
	k->dst = p->src;
	k->sport = p->dport;
	k->dport = p->sport;
	k->protocol = p->protocol;
	__builtin_memset(k->pad, 0, sizeof(k->pad));
}

/* The key of the other half of f. */
static __always_inline void flow_key_other(struct flow_key *k, const struct service_flow *f,
					   __u8 protocol)
{
	k->src = f->dst;
	k->dst = f->src;
	k->sport = f->dport;
	k->dport = f->sport;
	k->protocol = protocol;
	__builtin_memset(k->pad, 0, sizeof(k->pad));
}

/* Whether f, found at the other half's key, is the other half of key. */
static __always_inline bool flow_leads_back(const struct service_flow *f,
					    const struct flow_key *key)
{
	return addr_equal(&f->dst, &key->src) && addr_equal(&f->src, &key->dst) &&
	       f->dport == key->sport && f->sport == key->dport;
}

static __always_inline bool flow_same_ends(const struct service_flow *a,
					   const struct service_flow *b)
{
	return addr_equal(&a->src, &b->src) && addr_equal(&a->dst, &b->dst) &&
	       a->sport == b->sport && a->dport == b->dport;
}

/* Seconds that a flow stays after its last packet; user space collects by the
 * same numbers. Where only the client is heard (DSR), its FIN alone must do. */
static __always_inline __u32 flow_lifetime(__u8 protocol, __u32 flags)
{
	if (protocol == IPPROTO_UDP)
		return flags & FLOW_ANSWERED ? ct_udp_replied : ct_udp;
	if (flags & (FLOW_RST | FLOW_RST_BACK) || (flags & FLOW_FIN && flags & FLOW_FIN_BACK))
		return ct_tcp_closing;
	if (flags & FLOW_DSR && flags & FLOW_FIN)
		return ct_tcp_syn;
	return flags & FLOW_ESTABLISHED ? ct_tcp_established : ct_tcp_syn;
}

static __always_inline bool flow_expired(const struct service_flow *f, __u8 protocol, __u32 now)
{
	return (__s32)(now - f->last_seen) > (__s32)flow_lifetime(protocol, f->flags);
}

static __always_inline bool is_begin(const struct packet *p)
{
	return p->protocol == IPPROTO_TCP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

/* Nothing begins with it. */
static __always_inline bool is_reset(const struct packet *p)
{
	return p->protocol == IPPROTO_TCP && p->tcp_flags & TCP_RST;
}

/* Whether f is what becomes of p. A SYN on a connection that has ended begins
 * another, and so does a datagram whose backend has gone. */
static __always_inline bool flow_holds(const struct service_flow *f, const struct packet *p,
				       __u32 now)
{
	if (flow_expired(f, p->protocol, now))
		return false;
	if (f->flags & FLOW_REPLY)
		return !is_begin(p);
	if (p->protocol == IPPROTO_TCP && !is_begin(p))
		return true;
	if (f->flags & FLOW_CLOSING)
		return false;
	return bpf_map_lookup_elem(&weft_backends, &f->backend);
}

/* Puts back the other half of f where it is missing. */
static SUBPROGRAM int flow_mend(const struct flow_key *key, const struct service_flow *f,
				const struct flow_key *other)
{
	struct service_flow back = {};

	if (!key || !f || !other || f->flags & FLOW_DSR)
		return 0;
	back.src = key->dst;
	back.dst = key->src;
	back.sport = key->dport;
	back.dport = key->sport;
	back.flags = (f->flags ^ FLOW_REPLY) &
		     (FLOW_REPLY | FLOW_SNAT | FLOW_HAIRPIN | FLOW_FAR | FLOW_SHARED);
	back.service = f->service;
	back.backend = f->backend;
	back.last_seen = f->last_seen;
	__builtin_memcpy(back.mac, f->mac, sizeof(back.mac));
	return bpf_map_update_elem(&weft_service_flows, other, &back, BPF_NOEXIST);
}

/* Writes what a packet told into both halves. A RST whose sender goes on
 * afterwards was none. */
static SUBPROGRAM int flow_update(const struct flow_key *key, struct service_flow *f, __u32 set,
				  __u32 now)
{
	struct flow_key other;
	struct service_flow *o;
	bool alive;
	__u32 back;

	if (!key || !f)
		return 0;
	alive = f->flags & FLOW_RST && !(set & FLOW_RST);
	back = set & FLOW_SHARED;
	back |= (set & (FLOW_FIN | FLOW_RST)) << 2;
	f->last_seen = now;
	__sync_fetch_and_or(&f->flags, set);
	if (alive)
		__sync_fetch_and_and(&f->flags, ~FLOW_RST);
	flow_key_other(&other, f, key->protocol);
	o = bpf_map_lookup_elem(&weft_service_flows, &other);
	if (!o)
		return flow_mend(key, f, &other);
	if (!flow_leads_back(o, key))
		return 0;
	o->last_seen = now;
	__sync_fetch_and_or(&o->flags, back);
	if (alive)
		__sync_fetch_and_and(&o->flags, ~FLOW_RST_BACK);
	return 0;
}

/* What p tells about the connection of f. FLOW_RST is kept where p does not
 * show that its sender goes on. */
static __always_inline __u32 flow_news(const struct service_flow *f, const struct packet *p)
{
	bool answer = f->flags & FLOW_REPLY;
	__u32 set = 0;

	if (p->protocol == IPPROTO_UDP)
		return answer || f->flags & FLOW_DSR ? FLOW_ANSWERED : 0;
	if (p->later_fragment)
		return f->flags & FLOW_RST;
	if (p->tcp_flags & TCP_RST || (f->flags & FLOW_RST && p->tcp_flags & TCP_SYN))
		set |= FLOW_RST;
	if (p->tcp_flags & TCP_FIN)
		set |= FLOW_FIN;
	if (answer)
		return set | FLOW_ANSWERED;
	/* of DSR the answers are not seen here */
	if (f->flags & (FLOW_ANSWERED | FLOW_DSR) &&
	    (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK)
		set |= FLOW_ESTABLISHED;
	return set;
}

/* Tells the flow at key about its packet: once a second, or when it has news. */
static __always_inline void flow_touch(const struct flow_key *key, struct service_flow *f,
				       const struct packet *p, __u32 now)
{
	__u32 set = flow_news(f, p);

	if (f->last_seen != now || set & ~f->flags || f->flags & ~set & FLOW_RST)
		flow_update(key, f, set, now);
}

/* The flow of t->key where it is that of p. */
static __always_inline struct service_flow *flow_find(struct translation *t, const struct packet *p,
						      __u32 now)
{
	struct service_flow *f = bpf_map_lookup_elem(&weft_service_flows, &t->key);

	if (!f)
		return NULL;
	if (flow_holds(f, p, now))
		return f;
	t->stale = !(f->flags & FLOW_REPLY);
	return NULL;
}

/* Chooses the backend of a new connection. Returns 0, with t->active where the
 * packet is for a service, or a drop reason. */
static SUBPROGRAM int flow_choose(struct translation *t, bool far, __u32 now)
{
	struct service_client c = {};
	struct service *s;
	struct backend *b;
	__u32 id = 0;

	if (!t)
		return 0;
	s = service_lookup(&t->key.dst, t->key.dport, t->key.protocol);
	if (!s || (far && !(s->flags & SERVICE_EXTERNAL)))
		return 0;
	if (!service_allows(s, &t->key.src))
		return DROP_SOURCE_RANGE;
	/* whether a balancer in front of the nodes sends here is its own affair */
	t->silent = far && s->flags & SERVICE_LOCAL;
	c.addr = t->key.src;
	c.far = far;
	if (far)
		c.hash = connection_hash(&t->key.src, t->key.sport, &t->key.dst, t->key.dport,
					 t->key.protocol);
	b = service_backend(s, &c, now, &id);
	if (!b || is_v4(&b->addr) != is_v4(&t->key.dst))
		return DROP_NO_BACKEND;
	t->to.src = t->key.src;
	t->to.sport = t->key.sport;
	t->to.dst = b->addr;
	t->to.dport = b->port;
	t->to.flags = far ? FLOW_FAR : 0;
	__builtin_memset(t->to.hop, 0, sizeof(t->to.hop));
	t->to.service = s->id;
	t->to.backend = id;
	t->to.last_seen = now;
	t->active = true;
	return 0;
}

/* Forgets the connection whose half f is no more, unless it has another by now. */
static SUBPROGRAM int flow_forget_other(const struct flow_key *key, const struct service_flow *f)
{
	struct flow_key other;
	struct service_flow *o;

	if (!key || !f || f->flags & FLOW_DSR)
		return 0;
	flow_key_other(&other, f, key->protocol);
	o = bpf_map_lookup_elem(&weft_service_flows, &other);
	if (!o || !flow_leads_back(o, key))
		return 0;
	return bpf_map_delete_elem(&weft_service_flows, &other);
}

/* Whether the pod talks to the backend directly with the same ports. */
static __always_inline bool flow_is_taken(const struct translation *t, __u32 now)
{
	struct ct_entry *ct;
	struct ct_key key;

	ct_key_of(&key, &t->to.src, &t->to.dst, t->to.sport, t->to.dport, t->key.protocol);
	ct = bpf_map_lookup_elem(&weft_conntrack, &key);
	return ct && !(ct->flags & (CT_SERVICE | CT_CLOSING)) &&
	       !ct_expired(ct, t->key.protocol, now);
}

/* Takes t->back_key for the answers. Returns 0, -EEXIST where another
 * connection has it, or a drop reason. */
static SUBPROGRAM int flow_take(struct translation *t, __u32 now)
{
	struct service_flow *o;
	__u32 seen;
	long err;

	if (!t)
		return -EEXIST;
	if (!(t->to.flags & FLOW_SNAT) && flow_is_taken(t, now))
		return -EEXIST;
	err = bpf_map_update_elem(&weft_service_flows, &t->back_key, &t->back, BPF_NOEXIST);
	if (!err)
		return 0;
	if (err != -EEXIST)
		return DROP_SERVICE_FULL;
	o = bpf_map_lookup_elem(&weft_service_flows, &t->back_key);
	if (!o)
		return -EEXIST;
	if (!flow_same_ends(o, &t->back)) {
		/* one that is over is taken by who is first to say so */
		seen = o->last_seen;
		if (!flow_expired(o, t->key.protocol, now) ||
		    __sync_val_compare_and_swap(&o->last_seen, seen, now) != seen)
			return -EEXIST;
		flow_forget_other(&t->back_key, o);
	}
	err = bpf_map_update_elem(&weft_service_flows, &t->back_key, &t->back, BPF_ANY);
	return err ? DROP_SERVICE_FULL : 0;
}

static __always_inline void flow_fill_back(struct translation *t)
{
	flow_key_other(&t->back_key, &t->to, t->key.protocol);
	t->back.src = t->key.dst;
	t->back.dst = t->key.src;
	t->back.sport = t->key.dport;
	t->back.dport = t->key.sport;
	t->back.flags = t->to.flags | FLOW_REPLY;
	t->back.service = t->to.service;
	t->back.backend = t->to.backend;
	t->back.last_seen = t->to.last_seen;
	__builtin_memcpy(t->back.mac, t->to.mac, sizeof(t->back.mac));
	__builtin_memset(t->back.hop, 0, sizeof(t->back.hop));
}

/* A port to try. The backend may still wait for the end of the connection that
 * had it (TIME_WAIT, a minute), and then does not take a SYN of another client,
 * whose clock is another. So ports come again as late as can be, whichever
 * Service and processor they are for: the first tries are in a window that goes
 * through all ports in SERVICE_PORT_CYCLE, and has a port for as long as the flow
 * of a connection that has ended keeps it. */
static __always_inline __be16 flow_some_port(__u32 start, __u32 try, __u32 now)
{
	__u32 range = service_last_port - service_first_port + 1;
	__u32 port = start + try * 7919;

	if (try < SERVICE_PORT_TRIES_NEAR)
		port = now % SERVICE_PORT_CYCLE * range / SERVICE_PORT_CYCLE +
		       port % (ct_tcp_closing * range / SERVICE_PORT_CYCLE + 1);
	return bpf_htons(service_first_port + port % range);
}

/* Takes a port for the connection in t->to: the client's own where that can be,
 * else one that is free towards the backend. */
static __always_inline int flow_take_port(struct translation *t, __u32 now)
{
	__u32 start = bpf_get_prandom_u32();
	int err;

	if (!(t->to.flags & FLOW_SNAT)) {
		err = flow_take(t, now);
		if (err != -EEXIST)
			return err;
	}
	for (__u32 i = 0; i < SERVICE_PORT_TRIES; i++) {
		t->to.sport = flow_some_port(start, i, now);
		t->back_key.dport = t->to.sport;
		err = flow_take(t, now);
		if (err != -EEXIST)
			return err;
	}
	return DROP_SERVICE_PORTS;
}

/* Writes the half of the requests; the connection that had it before loses its
 * other half last. */
static SUBPROGRAM int flow_put(struct translation *t)
{
	struct service_flow before = {};
	struct service_flow *old;

	if (!t)
		return 0;
	old = t->stale ? bpf_map_lookup_elem(&weft_service_flows, &t->key) : NULL;
	if (old)
		before = *old;
	if (bpf_map_update_elem(&weft_service_flows, &t->key, &t->to, BPF_ANY))
		return DROP_SERVICE_FULL;
	/* with the same backend and port that half is ours by now */
	if (old && !flow_same_ends(&before, &t->to))
		flow_forget_other(&t->key, &before);
	return 0;
}

/* Makes the connection in t->to, the half of the answers first. Returns 0 or a
 * drop reason. */
static SUBPROGRAM int flow_make(struct translation *t, __u32 now)
{
	bool dsr;
	int err = 0;

	if (!t)
		return 0;
	dsr = t->to.flags & FLOW_DSR;
	flow_fill_back(t);
	if (!dsr)
		err = flow_take_port(t, now);
	if (err)
		return err;
	err = flow_put(t);
	if (!err)
		t->made = true;
	else if (!dsr)
		bpf_map_delete_elem(&weft_service_flows, &t->back_key);
	return err;
}

/* Takes back what the packet made: it goes nowhere. */
static __always_inline void flow_undo(struct translation *t)
{
	if (!t->made)
		return;
	if (!t->dsr)
		bpf_map_delete_elem(&weft_service_flows, &t->key);
	if (t->dsr || !(t->to.flags & FLOW_DSR))
		bpf_map_delete_elem(&weft_service_flows, &t->back_key);
	t->made = false;
}
