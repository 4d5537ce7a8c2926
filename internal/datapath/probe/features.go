// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

const (
	groupBase    = "base"
	groupRouting = "pod routing"
	groupDevices = "devices"
	groupSockets = "sockets"
	groupPacing  = "pacing"
	groupTracing = "tracing"
)

// catalogue is all that is probed, in the order it is printed. What weft
// does not use yet says "for", and what it is for.
var catalogue = []feature{
	{
		group: groupBase, name: "BTF", since: "5.4", option: "CONFIG_DEBUG_INFO_BTF", required: true,
		use:     "one set of programs for every kernel",
		instead: "nothing: programs cannot be fitted to the kernel",
		probe:   kernelBTF,
	},
	{
		group: groupBase, name: "bpf file system", since: "4.4", option: "CONFIG_BPF_SYSCALL", required: true,
		use:     "pins links and maps: pods stay connected without the agent",
		instead: "nothing: links would end with the agent",
		probe:   fileSystem("bpf"),
	},
	{
		group: groupBase, name: "bpf file system mounted", since: "4.4", option: "CONFIG_BPF_SYSCALL",
		use:     "uses what is mounted",
		instead: "the agent mounts it",
		probe:   mounted("bpf"),
	},
	{
		group: groupBase, name: "bounded loops", since: "5.3", required: true,
		use: "walks packet headers", instead: "nothing: programs are not accepted",
		probe: boundedLoops,
	},
	{
		group: groupBase, name: "open-coded iterators", since: "6.4", option: "CONFIG_DEBUG_INFO_BTF",
		use: "for scanning request heads", instead: "loops over at most 2,048 bytes",
		probe: iterators,
	},
	{
		group: groupBase, name: "bpf_rdonly_cast", since: "6.2", option: "CONFIG_DEBUG_INFO_BTF",
		use: "for back-pressure on spliced bytes", instead: "no splicing: TCP carries all bytes",
		probe: rdonlyCast,
	},
	{
		group: groupRouting, name: "LPM trie maps", since: "4.11", option: "CONFIG_BPF_SYSCALL", required: true,
		use: "finds routes and identities by prefix", instead: "nothing: pods cannot be routed",
		probe: mapType(ebpf.LPMTrie),
	},
	{
		group: groupRouting, name: "LRU hash maps", since: "4.10", option: "CONFIG_BPF_SYSCALL", required: true,
		use: "tracks connections", instead: "nothing: connections cannot be tracked",
		probe: mapType(ebpf.LRUHash),
	},
	{
		group: groupRouting, name: "ring buffer maps", since: "5.8", option: "CONFIG_BPF_SYSCALL", required: true,
		use: "reports flows and drops", instead: "nothing: flows cannot be reported",
		probe: mapType(ebpf.RingBuf),
	},
	{
		group: groupRouting, name: "tcx links", since: "6.6", option: "CONFIG_NET_XGRESS", required: true,
		use: "runs at pods and at the uplink, pinned, next to others", instead: "nothing: programs cannot be attached",
		probe: tcx,
	},
	{
		group: groupRouting, name: "bpf_redirect_peer", since: "5.10", required: true,
		use: "takes packets into a pod without the host's backlog", instead: "nothing: pods cannot be reached",
		probe: helper(ebpf.SchedCLS, asm.FnRedirectPeer),
	},
	{
		group: groupRouting, name: "bpf_redirect_neigh", since: "5.10", required: true,
		use: "sends packets to other nodes without the host's routing", instead: "nothing: other nodes cannot be reached",
		probe: helper(ebpf.SchedCLS, asm.FnRedirectNeigh),
	},
	{
		group: groupRouting, name: "bpf_ktime_get_coarse_ns", since: "5.11", required: true,
		use: "ages connections at little cost", instead: "nothing: connections cannot be tracked",
		probe: helper(ebpf.SchedCLS, asm.FnKtimeGetCoarseNs),
	},
	{
		group: groupRouting, name: "VXLAN with metadata", since: "4.3", option: "CONFIG_VXLAN",
		use: "can do tunnel: vxlan", instead: "refuses tunnel: vxlan; tunnel: none works where the network routes pod addresses",
		probe: all(deviceKind("vxlan"), helper(ebpf.SchedCLS, asm.FnSkbSetTunnelKey, asm.FnSkbGetTunnelKey)),
	},
	{
		group: groupRouting, name: "XDP native on veth", since: "4.19", option: "CONFIG_VETH",
		use: "for the edge: deny lists and load balancing", instead: "the edge runs in tcx",
		probe: xdpNative,
	},
	{
		group: groupDevices, name: "netkit", since: "6.7", option: "CONFIG_NETKIT",
		use: "not used: pods have veth pairs", instead: "nothing is missed: pods have veth pairs",
		probe: deviceKind("netkit"),
	},
	{
		group: groupDevices, name: "bridge", since: "2.6", option: "CONFIG_BRIDGE",
		use: "joins the nodes of a lab", instead: "no weft lab; nodes are not affected",
		probe: deviceKind("bridge"),
	},
	{
		group: groupDevices, name: "BIG TCP (IPv4, IPv6)", since: "6.3",
		use: "for bulk transfers between pods", instead: "segments of at most 64 KiB",
		probe: func(s *site) error { return s.net.BigTCP() },
	},
	{
		group: groupDevices, name: "WireGuard", since: "5.6", option: "CONFIG_WIREGUARD",
		use: "not used: encryption between nodes is mTLS", instead: "nothing is missed: encryption between nodes is mTLS",
		probe: deviceKind("wireguard"),
	},
	{
		group: groupDevices, name: "GENEVE", since: "3.18", option: "CONFIG_GENEVE",
		use: "not used: tunnels are VXLAN", instead: "nothing is missed: tunnels are VXLAN",
		probe: deviceKind("geneve"),
	},
	{
		group: groupDevices, name: "AF_XDP sockets", since: "4.18", option: "CONFIG_XDP_SOCKETS",
		use: "not used yet", instead: "nothing is missed",
		probe: socket(unix.AF_XDP, unix.SOCK_RAW, 0),
	},
	{
		group: groupSockets, name: "cgroup2 mounted", since: "4.5", option: "CONFIG_CGROUPS",
		use: "pods and nodes have cgroups to attach to", instead: "no weft lab; nothing is attached to cgroups",
		probe: mounted("cgroup2"),
	},
	{
		group: groupSockets, name: "cgroup connect, sendmsg, recvmsg, getpeername", since: "5.8", option: "CONFIG_CGROUP_BPF",
		use: "for service addresses, translated at the socket", instead: "service addresses translated packet by packet",
		probe: cgroupAttach(ebpf.CGroupSockAddr,
			ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect,
			ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Sendmsg,
			ebpf.AttachCGroupUDP4Recvmsg, ebpf.AttachCGroupUDP6Recvmsg,
			ebpf.AttachCgroupInet4GetPeername, ebpf.AttachCgroupInet6GetPeername),
	},
	{
		group: groupSockets, name: "cgroup post_bind, sock_release", since: "5.9", option: "CONFIG_CGROUP_BPF",
		use: "for ports of services on the node, and sockets that end", instead: "service addresses translated packet by packet",
		probe: cgroupAttach(ebpf.CGroupSock,
			ebpf.AttachCGroupInet4PostBind, ebpf.AttachCGroupInet6PostBind, ebpf.AttachCgroupInetSockRelease),
	},
	{
		group: groupSockets, name: "errors and storage in cgroup connect", since: "5.18", option: "CONFIG_CGROUP_BPF",
		use: "for refusing what has no backend, and for showing services as peers", instead: "service addresses translated packet by packet",
		probe: helper(ebpf.CGroupSockAddr, asm.FnSetRetval, asm.FnSkStorageGet, asm.FnGetNetnsCookie),
	},
	{
		group: groupSockets, name: "cutting UDP sockets", since: "4.9", option: "CONFIG_INET_DIAG_DESTROY",
		use: "for clients of a backend that has gone", instead: "they wait until they connect again",
		probe: func(s *site) error { return s.net.CutUDP() },
	},
	{
		group: groupSockets, name: "cgroup sockops", since: "4.13", option: "CONFIG_CGROUP_BPF",
		use: "for enrolling sockets at the handshake", instead: "no splicing: TCP carries all bytes",
		probe: cgroupAttach(ebpf.SockOps, ebpf.AttachCGroupSockOps),
	},
	{
		group: groupSockets, name: "netns cookie in sockops", since: "5.15", option: "CONFIG_CGROUP_BPF",
		use: "for telling apart equal addresses of several pods", instead: "no splicing of loopback connections",
		probe: helper(ebpf.SockOps, asm.FnGetNetnsCookie),
	},
	{
		group: groupSockets, name: "socket storage", since: "5.2", option: "CONFIG_BPF_SYSCALL",
		use: "for state of each socket", instead: "no splicing: TCP carries all bytes",
		probe: all(mapType(ebpf.SkStorage), helper(ebpf.SockOps, asm.FnSkStorageGet), helper(ebpf.SkMsg, asm.FnSkStorageGet)),
	},
	{
		group: groupSockets, name: "SOCKHASH with sk_msg", since: "4.18", option: "CONFIG_BPF_STREAM_PARSER",
		use: "for splicing and L7 rules at the sender", instead: "L7 rules in a proxy",
		probe: sockmap(ebpf.SkMsg, ebpf.AttachSkMsgVerdict),
	},
	{
		group: groupSockets, name: "SOCKHASH with sk_skb", since: "5.13", option: "CONFIG_BPF_STREAM_PARSER",
		use: "for L7 rules at the receiver", instead: "L7 rules in a proxy",
		probe: sockmap(ebpf.SkSKB, ebpf.AttachSkSKBStreamVerdict),
	},
	{
		group: groupSockets, name: "kTLS", since: "4.13", option: "CONFIG_TLS",
		use: "for encryption in the kernel", instead: "encryption in user space",
		probe: kernelTLS,
	},
	{
		group: groupSockets, name: "MPTCP", since: "5.6", option: "CONFIG_MPTCP",
		use: "seen as TCP", instead: "nothing is missed",
		probe: socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP),
	},
	{
		group: groupSockets, name: "SCTP", since: "2.6", option: "CONFIG_IP_SCTP",
		use: "not used by weft", instead: "nothing is missed",
		probe: socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP),
	},
	{
		group: groupPacing, name: "struct_ops TCP congestion control", since: "6.4", option: "CONFIG_BPF_JIT",
		use: "for paced bulk transfers", instead: "the pod's own congestion control",
		probe: congestionControl,
	},
	{
		group: groupPacing, name: "BBR", since: "4.9", option: "CONFIG_TCP_CONG_BBR",
		use: "pods may choose it", instead: "pods use CUBIC",
		probe: congestion("bbr"),
	},
	{
		group: groupPacing, name: "DCTCP", since: "3.18", option: "CONFIG_TCP_CONG_DCTCP",
		use: "pods may choose it", instead: "pods use CUBIC",
		probe: congestion("dctcp"),
	},
	{
		group: groupPacing, name: "fq queueing discipline", since: "3.12", option: "CONFIG_NET_SCH_FQ",
		use: "for bandwidth limits by departure time", instead: "TCP paces itself (SO_MAX_PACING_RATE)",
		probe: qdisc("fq"),
	},
	{
		group: groupPacing, name: "fq_codel queueing discipline", since: "3.5", option: "CONFIG_NET_SCH_FQ_CODEL",
		use: "not used", instead: "nothing is missed",
		probe: qdisc("fq_codel"),
	},
	{
		group: groupTracing, name: "fentry programs", since: "5.5", option: "CONFIG_FUNCTION_TRACER",
		use: "not used", instead: "nothing is missed: weft reports from its own programs",
		probe: programType(ebpf.Tracing),
	},
	{
		group: groupTracing, name: "LSM programs", since: "5.7", option: "CONFIG_BPF_LSM",
		use: "not used", instead: "nothing is missed",
		probe: programType(ebpf.LSM),
	},
	{
		group: groupTracing, name: "extension programs", since: "5.6", option: "CONFIG_BPF_JIT",
		use: "not used", instead: "nothing is missed: programs are replaced by link update",
		probe: programType(ebpf.Extension),
	},
}

func deviceKind(kind string) func(*site) error {
	return func(s *site) error { return s.net.Kind(kind) }
}

func qdisc(kind string) func(*site) error {
	return func(s *site) error { return s.net.Qdisc(kind) }
}
