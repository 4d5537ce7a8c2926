// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* One address form: IPv4 travels as ::ffff:a.b.c.d. */

/* A function with a stack frame of its own, which not every object that
 * includes it calls: the verifier allows 512 bytes for all frames together. */
#define SUBPROGRAM __attribute__((noinline, unused))

struct addr {
	union {
		__u8 b[16];
		__be32 w[4];
		__u64 d[2];
	};
};

static __always_inline void addr_from_v4(struct addr *a, __be32 v4)
{
	a->d[0] = 0;
	a->w[2] = bpf_htonl(0xffff);
	a->w[3] = v4;
}

static __always_inline void addr_from_v6(struct addr *a, const struct in6_addr *v6)
{
	a->w[0] = v6->in6_u.u6_addr32[0];
	a->w[1] = v6->in6_u.u6_addr32[1];
	a->w[2] = v6->in6_u.u6_addr32[2];
	a->w[3] = v6->in6_u.u6_addr32[3];
}

static __always_inline bool addr_equal(const struct addr *a, const struct addr *b)
{
	return a->d[0] == b->d[0] && a->d[1] == b->d[1];
}

static __always_inline bool addr_is_zero(const struct addr *a)
{
	return !a->d[0] && !a->d[1];
}

/* A total order; which one does not matter, only that both directions agree. */
static __always_inline bool addr_less(const struct addr *a, const struct addr *b)
{
	return a->d[0] < b->d[0] || (a->d[0] == b->d[0] && a->d[1] < b->d[1]);
}

static __always_inline bool is_v4(const struct addr *a)
{
	return !a->d[0] && a->w[2] == bpf_htonl(0xffff);
}

static __always_inline bool is_link_local(const struct addr *a)
{
	return (a->w[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

/* For more than one machine: multicast, and of IPv4 all above it. */
static __always_inline bool is_group(const struct addr *a)
{
	return is_v4(a) ? a->b[12] >= 224 : a->b[0] == 0xff;
}

/* An address that means something on one machine or link only: loopback,
 * unspecified ("this network" of IPv4), or IPv6 link-local. */
static __always_inline bool is_unroutable(const struct addr *a)
{
	if (is_v4(a))
		return a->b[12] == 0 || a->b[12] == 127;
	if (!a->d[0] && !a->w[2])
		return !a->w[3] || a->w[3] == bpf_htonl(1);
	return is_link_local(a);
}
