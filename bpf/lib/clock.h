// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#pragma once

#define NSEC_PER_SEC 1000000000ULL

/* CLOCK_MONOTONIC in seconds, to the last tick. */
static __always_inline __u32 now_seconds(void)
{
	return bpf_ktime_get_coarse_ns() / NSEC_PER_SEC;
}
