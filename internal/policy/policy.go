// SPDX-License-Identifier: Apache-2.0

// Package policy compiles NetworkPolicy and ClusterNetworkPolicy objects into
// entries for the kernel's longest-prefix maps. It is pure: what comes out
// depends on what goes in, in whatever order that is.
//
// Pods with the same compiled policy share a subject. For a new connection the
// datapath looks up (subject, direction, peer, protocol, port) three times,
// with peer being the identity of the other end, the CIDR class of its address
// (the most specific prefix that a policy names) and AnyPeer. Each answer has
// an outcome of the admin tier and one of the tiers below. The least admin rank
// of the three decides if it says Allow or Deny; where it says Pass, and where
// there is none, the least rank of the tiers below decides. No two rules that
// can match the same connection have the same rank, so the order of the lookups
// does not matter, and the deciding rule is always the same one.
//
// What the APIs leave open, or what surprises:
//
//   - An ipBlock or network matches every address that it covers, those of pods
//     and nodes too. It is compared with the address at the pod's interface.
//   - Selectors match pods with addresses of their own, never one with
//     hostNetwork: that one is its node.
//   - A named port of ingress is looked up among the pod's own ports, one of
//     egress among those of the pod that the address belongs to. A name with
//     several numbers means all of them, one that a pod does not have none.
//   - A rule without ports is for every protocol, ICMP included; one with ports
//     is not for ICMP.
//   - Policies of one tier and priority are evaluated in the order of names.
//   - What cannot be enforced (domainNames, or fields of another version) is a
//     Problem and fails closed: an Accept then matches nothing, a Deny or Pass
//     denies everything in its direction.
//
// Invariants of a subject:
//
//  1. In each direction the entry for AnyPeer and any protocol is there, and
//     has an outcome of the lower tiers: every connection gets a verdict.
//  2. A connection with the pod's own node is allowed (RuleOwnNode), whatever
//     the policies say.
//  3. Equal content has an equal key, also in another process as long as the
//     classes have the same numbers.
package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// Direction is the side of a connection that a rule judges, as seen from the
// pod. The numbers are those of the kernel's map.
type Direction uint8

// Directions.
const (
	Egress  Direction = 1
	Ingress Direction = 2
)

// String is "egress" or "ingress".
func (d Direction) String() string {
	if d == Egress {
		return "egress"
	}
	return "ingress"
}

// Verdict is what an outcome says. The numbers are those of the kernel's map.
type Verdict uint8

// Verdicts. Pass occurs in the admin outcome alone.
const (
	NoVerdict Verdict = 0 // no rule of these tiers matches
	Allow     Verdict = 1
	Deny      Verdict = 2
	Pass      Verdict = 3 // the tiers below decide
)

// String is "allow", "deny", "pass" or "none".
func (v Verdict) String() string {
	switch v {
	case Allow:
		return "allow"
	case Deny:
		return "deny"
	case Pass:
		return "pass"
	}
	return "none"
}

// AnyPeer is the peer of entries that match whoever is at the other end.
const AnyPeer uint64 = 0

// FirstClass is the least number of a CIDR class; identities are below.
const FirstClass uint64 = 1 << 32

// Numbers of rules that no policy has.
const (
	RuleNone    uint32 = 0 // no rule: isolated by a NetworkPolicy, or the default
	RuleOwnNode uint32 = 1 // a pod and the node that it is on
	firstRule   uint32 = 16
)

// Ranks. Less wins; a rank means something within one subject, direction and
// pair of tiers only.
const (
	RankNone     uint32 = 0xffffffff // no outcome
	rankOwnNode  uint32 = 0
	rankAdmin    uint32 = 1       // and up, one for each rule of the admin tier
	rankAllow    uint32 = 1       // and up, one for each rule of a NetworkPolicy
	rankIsolated uint32 = 1 << 30 // a NetworkPolicy selects the pod and no rule of any allows
	rankBaseline uint32 = 1 << 31 // and up, one for each rule of the baseline tier
	rankDefault  uint32 = 0xfffffffe
)

// Outcome is what the tiers of one kind say about an entry's connections.
type Outcome struct {
	Rank    uint32 // RankNone for none
	Rule    uint32 // key of Result.Rules, or RuleNone
	Verdict Verdict
}

// none is the outcome of tiers without a matching rule.
var none = Outcome{Rank: RankNone}

// Entry is one entry of the kernel's map. Its prefix is the direction, the
// peer, then Bits bits of (protocol, port).
type Entry struct {
	Direction Direction
	Peer      uint64 // an identity, a CIDR class or AnyPeer
	Bits      uint8  // 0: any protocol; 8: any port of Protocol; 8+n: n leading bits of Port
	Protocol  uint8  // IANA number; 0 where Bits is 0
	Port      uint16 // bits behind the prefix are 0
	Admin     Outcome
	Lower     Outcome // of the NetworkPolicy and baseline tiers and the default
}

// PortRange returns the first and last port of an entry: 0 and 65535 where it
// is for all.
func (e Entry) PortRange() (first, last uint16) {
	if e.Bits <= 8 {
		return 0, 65535
	}
	return e.Port, e.Port | 0xffff>>(e.Bits-8)
}

// SubjectKey is a hash of the content of a subject.
type SubjectKey [32]byte

// Subject is a compiled policy. It is immutable.
type Subject struct {
	Key     SubjectKey
	Entries []Entry // ordered by direction, peer, protocol, port and Bits; no two with the same prefix
	// Egress and Ingress say whether any policy judges the direction. Where
	// none does, whoever is at the other end is allowed, known or not.
	Egress, Ingress bool
}

// EndpointID names a pod's sandbox: a pod that takes the place of one of the
// same name is another endpoint.
type EndpointID struct {
	Namespace string
	Name      string
	IPs       string // all addresses, separated by commas
}

// String is "namespace/name (IPs)".
func (e EndpointID) String() string { return state.Key(e.Namespace, e.Name) + " (" + e.IPs + ")" }

// Endpoint makes an EndpointID. The order of ips does not matter.
func Endpoint(namespace, name string, ips []netip.Addr) EndpointID {
	sorted := slices.Clone(ips)
	slices.SortFunc(sorted, netip.Addr.Compare)
	texts := make([]string, len(sorted))
	for i, ip := range sorted {
		texts[i] = ip.String()
	}
	return EndpointID{Namespace: namespace, Name: name, IPs: strings.Join(texts, ",")}
}

// Pod is a pod with addresses of its own: none with hostNetwork, none that has
// ended (its addresses may be those of another by now).
type Pod struct {
	Namespace string
	Name      string
	IPs       []netip.Addr
	Identity  uint64       // of Input.Identities
	Ports     []state.Port // of all containers
	Local     bool         // on this node: gets a subject
}

// ID returns the endpoint that the pod is.
func (p *Pod) ID() EndpointID { return Endpoint(p.Namespace, p.Name, p.IPs) }

// Ref names a policy.
type Ref struct {
	Kind      string // NetworkPolicy or ClusterNetworkPolicy
	Namespace string // empty for a ClusterNetworkPolicy
	Name      string
}

// String is "NetworkPolicy shop/web" or "ClusterNetworkPolicy tenants".
func (r Ref) String() string {
	if r.Namespace == "" {
		return r.Kind + " " + r.Name
	}
	return r.Kind + " " + state.Key(r.Namespace, r.Name)
}

// Tier orders policies.
type Tier uint8

// Tiers, the first to decide first.
const (
	AdminTier Tier = iota + 1
	NetworkPolicyTier
	BaselineTier
)

// String is "admin", "network-policy" or "baseline".
func (t Tier) String() string {
	switch t {
	case AdminTier:
		return "admin"
	case NetworkPolicyTier:
		return "network-policy"
	}
	return "baseline"
}

// Rule is a rule of a policy, or a built-in one (whose Policy is zero).
type Rule struct {
	Number    uint32
	Policy    Ref
	Tier      Tier
	Direction Direction
	Index     int    // in the policy's list of the direction
	Name      string // of a ClusterNetworkPolicy's rule; may be empty
	Verdict   Verdict
}

// String is "NetworkPolicy shop/web ingress[2]", with the name of the rule in
// parentheses where it has one.
func (r Rule) String() string {
	switch r.Number {
	case RuleNone:
		return "no rule allows"
	case RuleOwnNode:
		return "the pod's own node"
	}
	return r.Policy.String() + " " + r.place()
}

// place is where the rule stands in its policy.
func (r Rule) place() string {
	s := fmt.Sprintf("%s[%d]", r.Direction, r.Index)
	if r.Name != "" {
		s += " (" + r.Name + ")"
	}
	return s
}

// Problem is something of a policy that is not enforced as written.
type Problem struct {
	Policy  Ref
	Message string
}

// String is the policy, ": " and the message.
func (p Problem) String() string { return p.Policy.String() + ": " + p.Message }

// Class is a prefix and the number of its CIDR class.
type Class struct {
	Prefix netip.Prefix // masked, never an IPv4-mapped one
	Number uint64
}

// Input is what policies are compiled from. The rows are immutable; a row that
// is the same pointer as in the last call is taken to be unchanged.
type Input struct {
	Policies   []*state.Policy   // each Kind, Namespace and Name once
	Identities []*state.Identity // of every pod of the cluster
	Pods       []Pod             // of the cluster, each identity among Identities
	Nodes      []*state.Node     // for the nodes peers of ClusterNetworkPolicies
	// Class returns the number of a prefix's class: FirstClass or more, and
	// the same for as long as the prefix is in use. Nil numbers the prefixes
	// in the order of Result.Prefixes, which changes with every new prefix.
	Class func(netip.Prefix) uint64
}

// Result is a compiled state of the cluster for one node. It is immutable.
type Result struct {
	Subjects  map[SubjectKey]*Subject
	Endpoints map[EndpointID]SubjectKey // of local pods; a pod that no policy concerns is absent
	// Selected are the policies that select a local pod, by tier, priority and
	// name. It has a key for each pod of Endpoints.
	Selected map[EndpointID][]Ref
	Prefixes []Class         // what the kernel's map of classes must hold, by prefix
	Rules    map[uint32]Rule // of all policies, and the built-in ones
	Problems []Problem

	classOf classTable
}

// Rule returns the rule of a number as it appears in entries and events.
func (r *Result) Rule(number uint32) Rule {
	if rule, ok := r.Rules[number]; ok {
		return rule
	}
	return Rule{Number: RuleNone}
}

// Protocol numbers that policies can name.
const (
	TCP  uint8 = 6
	UDP  uint8 = 17
	SCTP uint8 = 132
)

func protocolByName(name string) (uint8, bool) {
	switch corev1.Protocol(name) {
	case corev1.ProtocolTCP:
		return TCP, true
	case corev1.ProtocolUDP:
		return UDP, true
	case corev1.ProtocolSCTP:
		return SCTP, true
	}
	return 0, false
}

func protocolName(number uint8) string {
	switch number {
	case TCP:
		return string(corev1.ProtocolTCP)
	case UDP:
		return string(corev1.ProtocolUDP)
	}
	return string(corev1.ProtocolSCTP)
}
