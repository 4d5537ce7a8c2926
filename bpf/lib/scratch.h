// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* What a program knows of its packet. Off the stack, which has 512 bytes for a
 * whole chain of calls; these programs run with bottom halves off, so that none
 * interrupts another on its CPU. */
struct scratch {
	struct packet packet;
	struct lookup lookup;
	struct translation translation; /* zero up to its key */
	struct packet quoted;           /* by an ICMP error; not zero */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratch_map SEC(".maps");

static __always_inline struct scratch *new_scratch(void)
{
	__u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratch_map, &zero);

	if (s)
		__builtin_memset(s, 0, offsetof(struct scratch, translation.key));
	return s;
}
