// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once
/* Behind generic XDP the kernel (6.9 and later) may hand tcx a packet that starts
 * at its IP header: it copied the packet for XDP, and forgot how long the
 * Ethernet header is (skb->mac_len). */

extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym;

static __always_inline bool lacks_ethernet(struct __sk_buff *skb)
{
	struct sk_buff *k = bpf_cast_to_kern_ctx(skb);

	return (__u64)k->data != (__u64)k->head + k->mac_header;
}

/* Has the packet start at its Ethernet header. Returns 0 or a drop reason. */
static __always_inline int restore_ethernet(struct __sk_buff *skb)
{
	struct ethhdr eth;

	if (!lacks_ethernet(skb))
		return 0;
	if (bpf_skb_load_bytes_relative(skb, 0, &eth, sizeof(eth), BPF_HDR_START_MAC) ||
	    bpf_skb_change_head(skb, sizeof(eth), 0) ||
	    bpf_skb_store_bytes(skb, 0, &eth, sizeof(eth), 0))
		return DROP_REWRITE;
	return 0;
}
