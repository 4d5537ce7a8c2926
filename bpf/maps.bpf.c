// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The maps that several objects share, and no program: internal/datapath/pin
 * creates them from this object and hands them to the others. */
#include "vmlinux.h"
#include "bpf_helpers.h"
#include "bpf_endian.h"
#include "lib/addr.h"
#include "lib/reason.h"
#include "lib/packet.h"
#include "lib/endpoint.h"
#include "lib/event.h"
#include "lib/clock.h"
#include "lib/fragment.h"
#include "lib/policy.h"
#include "lib/conntrack.h"
#include "lib/checksum.h"
#include "lib/forward.h"
#include "lib/icmp.h"
#include "lib/masquerade.h"
#include "lib/service.h"
#include "lib/flow.h"
#include "lib/socket.h"
#include "lib/deny.h"
#include "lib/xdp_neighbor.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Types that have no map of their own, kept for the Go side. */
const struct event *unused_event __attribute__((unused));
const enum reason *unused_reason __attribute__((unused));
const enum policy_verdict *unused_policy_verdict __attribute__((unused));
const enum ct_flag *unused_ct_flag __attribute__((unused));
const enum ipcache_flag *unused_ipcache_flag __attribute__((unused));
const enum event_type *unused_event_type __attribute__((unused));
const enum service_flag *unused_service_flag __attribute__((unused));
const enum service_flow_flag *unused_service_flow_flag __attribute__((unused));
const enum socket_count *unused_socket_count __attribute__((unused));
const enum direction *unused_direction __attribute__((unused));
