// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/weft-mesh/weft/internal/state"
)

// Compile compiles policies from scratch.
func Compile(in Input) *Result { return new(Compiler).Compile(in) }

// Compiler compiles again and again and keeps what did not change. The zero
// value is ready. It is not safe for concurrent use; its results are.
type Compiler struct {
	cluster  cluster // of the last call
	classes  []Class // of the last call
	parsed   map[*state.Policy]*parsed
	resolved map[*parsed]*resolved // under cluster and classes
	subjects map[digest]*Subject   // by what they are made from
}

// pass is one run of the compiler.
type pass struct {
	cluster
	class    func(netip.Prefix) uint64
	policies []*parsed   // in the order of evaluation
	active   []*resolved // by index of policies; nil for one that selects no local pod
	selected [][]int32   // by identity: the policies that select it, where it is local
	classes  []Class
	result   *Result
}

// Compile compiles policies, with the same result as a Compiler that has not
// compiled before.
func (c *Compiler) Compile(in Input) *Result {
	p := &pass{class: in.Class, result: &Result{
		Subjects: map[SubjectKey]*Subject{}, Endpoints: map[EndpointID]SubjectKey{},
		Selected: map[EndpointID][]Ref{}, Rules: map[uint32]Rule{},
	}}
	p.cluster = c.populate(in)
	c.parse(p, in.Policies)
	numbers := number(p.policies)
	p.describe(numbers)
	p.selectLocal()
	c.resolve(p, numbers)
	c.classify(p)
	c.assemble(p)
	return p.result
}

// populate returns the cluster, with what is still valid of the last one. What
// depends on what has changed is forgotten.
func (c *Compiler) populate(in Input) cluster {
	ids := slices.Clone(in.Identities)
	slices.SortFunc(ids, func(a, b *state.Identity) int { return cmp.Compare(a.ID, b.ID) })
	now := cluster{population: c.cluster.population, pods: sortedPods(in.Pods), nodes: slices.Clone(in.Nodes), named: c.cluster.named}
	sameIDs := now.population != nil && slices.Equal(ids, now.population.ids)
	if !sameIDs {
		now.population = newPopulation(ids)
		c.resolved = nil
	}
	if !sameIDs || !slices.Equal(now.nodes, c.cluster.nodes) || !slices.EqualFunc(now.pods, c.cluster.pods, samePod) {
		now.named = map[string][]clause{}
		maps.DeleteFunc(c.resolved, func(p *parsed, _ *resolved) bool { return p.moves() })
	}
	c.cluster = now
	return now
}

// samePod is true where a and b mean the same to the rules of others.
func samePod(a, b Pod) bool {
	return a.Identity == b.Identity && slices.Equal(a.IPs, b.IPs) && slices.Equal(a.Ports, b.Ports)
}

func sortedPods(pods []Pod) []Pod {
	out := slices.Clone(pods)
	slices.SortFunc(out, func(a, b Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID().IPs, b.ID().IPs))
	})
	return out
}

// parse fills in the policies and forgets those that are gone.
func (c *Compiler) parse(p *pass, rows []*state.Policy) {
	before := c.parsed
	c.parsed = make(map[*state.Policy]*parsed, len(rows))
	for _, row := range rows {
		one := before[row]
		if one == nil {
			one = parse(row)
		}
		c.parsed[row] = one
		p.policies = append(p.policies, one)
	}
	order(p.policies)
}

// describe lists rules and problems.
func (p *pass) describe(numbers map[ruleKey]uint32) {
	p.result.Rules[RuleNone] = Rule{Number: RuleNone}
	p.result.Rules[RuleOwnNode] = Rule{Number: RuleOwnNode, Tier: AdminTier, Verdict: Allow}
	for _, one := range p.policies {
		for i := range one.rules {
			r := one.rules[i].Rule
			r.Number = numbers[keyOf(r)]
			p.result.Rules[r.Number] = r
		}
		for _, text := range one.problems {
			p.result.Problems = append(p.result.Problems, Problem{one.ref, text})
		}
	}
}

// selectLocal finds the policies of each identity that a local pod has.
func (p *pass) selectLocal() {
	local := newBitset(len(p.population.ids))
	for i := range p.pods {
		if at, ok := p.population.index[p.pods[i].Identity]; ok && p.pods[i].Local {
			local.set(at)
		}
	}
	p.selected = make([][]int32, len(p.population.ids))
	p.active = make([]*resolved, len(p.policies))
	for i, one := range p.policies {
		if len(one.rules) == 0 && one.isolates == [3]bool{} {
			continue
		}
		set := p.population.match(one.subject)
		set.and(local)
		set.each(func(at int) {
			p.selected[at] = append(p.selected[at], int32(i))
			p.active[i] = &resolved{} // resolve replaces it
		})
	}
}

// resolve finds the peers of the policies that select a local pod.
func (c *Compiler) resolve(p *pass, numbers map[ruleKey]uint32) {
	before := c.resolved
	c.resolved = make(map[*parsed]*resolved, len(p.policies))
	for i, one := range p.policies {
		if p.active[i] == nil {
			continue
		}
		r := before[one]
		if r == nil || !sameNumbers(r, numbers) {
			r = p.cluster.resolve(one, numbers)
		}
		p.active[i], c.resolved[one] = r, r
	}
}

func sameNumbers(r *resolved, numbers map[ruleKey]uint32) bool {
	for i := range r.rules {
		if r.rules[i].Number != numbers[keyOf(r.rules[i])] {
			return false
		}
	}
	return true
}

// classify numbers the prefixes and signs the policies.
func (c *Compiler) classify(p *pass) {
	active := slices.DeleteFunc(slices.Clone(p.active), func(r *resolved) bool { return r == nil })
	prefixes := prefixesOf(active)
	p.classes = make([]Class, len(prefixes))
	for i, prefix := range prefixes {
		n := FirstClass + uint64(i)
		if p.class != nil {
			n = p.class(prefix)
		}
		p.classes[i] = Class{prefix, n}
	}
	p.result.Prefixes = p.classes
	p.result.classOf = newClassTable(p.classes)
	x := &classifier{prefixes, map[*netip.Prefix][]int32{}}
	same := slices.Equal(p.classes, c.classes)
	c.classes = p.classes
	for _, r := range active {
		if r.digest != (digest{}) && (same || !r.hasPrefixes()) {
			continue
		}
		x.classify(r)
		r.sign(p.population, p.classes)
	}
}

func (r *resolved) hasPrefixes() bool {
	return slices.ContainsFunc(r.clauses, func(c clause) bool { return len(c.blocks)+len(c.hosts) > 0 })
}

// assemble gives every local pod its subject.
func (c *Compiler) assemble(p *pass) {
	before := c.subjects
	c.subjects = map[digest]*Subject{}
	for i := range p.pods {
		pod := &p.pods[i]
		if !pod.Local {
			continue
		}
		id := pod.ID()
		policies, known := p.policiesOf(pod)
		if !known {
			p.result.Problems = append(p.result.Problems, Problem{Ref{"Pod", pod.Namespace, pod.Name},
				fmt.Sprintf("identity %d is not known: nothing is allowed", pod.Identity)})
		}
		if len(policies) == 0 {
			continue
		}
		sum, ports := sign(policies, pod)
		s := c.subjects[sum]
		if s == nil {
			if s = before[sum]; s == nil {
				s = p.subject(policies, ports)
			}
			c.subjects[sum] = s
		}
		p.result.Subjects[s.Key] = s
		p.result.Endpoints[id] = s.Key
		p.result.Selected[id] = refs(policies)
	}
}

// policiesOf returns the policies of a pod, in order. A pod with an identity
// that is not known is isolated by a policy that nobody wrote.
func (p *pass) policiesOf(pod *Pod) (policies []*resolved, known bool) {
	at, known := p.population.index[pod.Identity]
	if !known {
		return []*resolved{{parsed: &parsed{tier: NetworkPolicyTier, isolates: [3]bool{Egress: true, Ingress: true}}}}, false
	}
	for _, i := range p.selected[at] {
		policies = append(policies, p.active[i])
	}
	return policies, true
}

func refs(policies []*resolved) []Ref {
	out := make([]Ref, 0, len(policies))
	for _, p := range policies {
		if p.ref != (Ref{}) {
			out = append(out, p.ref)
		}
	}
	return out
}

// sign hashes what a subject is made from: policies, and the ports of the pod
// that they name.
func sign(policies []*resolved, pod *Pod) (digest, map[string][]span) {
	h := sha256.New()
	ports := map[string][]span{}
	for _, p := range policies {
		h.Write(p.digest[:])
		for i := range p.clauses {
			for _, name := range p.clauses[i].named {
				if _, done := ports[name]; !done {
					ports[name] = resolveNames(pod.Ports, []string{name})
					fmt.Fprintf(h, "%q %v", name, ports[name])
				}
			}
		}
	}
	return digest(h.Sum(nil)), ports
}

// subject compiles policies for pods whose own ports have these numbers.
func (p *pass) subject(policies []*resolved, ports map[string][]span) *Subject {
	s := &Subject{Egress: judges(policies, Egress), Ingress: judges(policies, Ingress)}
	for _, d := range []Direction{Egress, Ingress} {
		s.Entries = append(s.Entries, p.entries(d, policies, ports)...)
	}
	s.Key = hash(s)
	return s
}

// judges is true where a policy isolates pods in a direction or has rules.
func judges(policies []*resolved, d Direction) bool {
	return slices.ContainsFunc(policies, func(p *resolved) bool {
		return p.isolates[d] || slices.ContainsFunc(p.rules, func(r Rule) bool { return r.Direction == d })
	})
}

// hash returns the key of a subject.
func hash(s *Subject) SubjectKey {
	h := sha256.New()
	fmt.Fprintf(h, "%v %v\n", s.Egress, s.Ingress)
	b := make([]byte, 0, 64)
	for _, e := range s.Entries {
		b = append(b[:0], byte(e.Direction), e.Bits, e.Protocol)
		b = binary.BigEndian.AppendUint64(b, e.Peer)
		b = binary.BigEndian.AppendUint16(b, e.Port)
		for _, o := range []Outcome{e.Admin, e.Lower} {
			b = binary.BigEndian.AppendUint32(b, o.Rank)
			b = binary.BigEndian.AppendUint32(b, o.Rule)
			b = append(b, byte(o.Verdict))
		}
		h.Write(b)
	}
	return SubjectKey(h.Sum(nil))
}

// entries compiles one direction of a subject.
func (p *pass) entries(d Direction, policies []*resolved, ports map[string][]span) []Entry {
	clauses, terms := rank(d, policies, ports)
	f := newFlattener(terms)
	var anyone []int32
	for i := range terms {
		if i >= len(clauses) || clauses[i].any {
			anyone = append(anyone, int32(i))
		}
	}
	anyPieces := f.setAny(anyone)
	ids, classes := p.termsByPeer(clauses)
	peers := []peerPieces{{AnyPeer, anyPieces}}
	for at, list := range ids {
		if len(list) > 0 {
			peers = append(peers, peerPieces{p.population.ids[at].ID, f.peer(list)})
		}
	}
	for at, list := range classes {
		if len(list) > 0 {
			peers = append(peers, peerPieces{p.classes[at].Number, f.peer(list)})
		}
	}
	slices.SortFunc(peers, func(a, b peerPieces) int { return cmp.Compare(a.peer, b.peer) })
	return f.entries(d, peers)
}

// termsByPeer returns for each identity and each class the clauses that match
// it.
func (p *pass) termsByPeer(clauses []*clause) (ids, classes [][]int32) {
	ids, classes = make([][]int32, len(p.population.ids)), make([][]int32, len(p.classes))
	for i, c := range clauses {
		if c.ids != nil {
			c.ids.each(func(at int) { ids[at] = append(ids[at], int32(i)) })
		}
		for _, at := range c.classes {
			classes[at] = append(classes[at], int32(i))
		}
	}
	return ids, classes
}

// peerPieces are the entries of one peer.
type peerPieces struct {
	peer   uint64
	pieces []piece
}

// entries returns the entries of all peers, which are in order, and that of the
// own node behind AnyPeer.
func (f *flattener) entries(d Direction, peers []peerPieces) []Entry {
	n := 1
	for _, x := range peers {
		n += len(x.pieces)
	}
	out := make([]Entry, 0, n)
	for i, x := range peers {
		for _, y := range x.pieces {
			out = append(out, Entry{Direction: d, Peer: x.peer, Bits: y.bits, Protocol: y.protocol, Port: y.port,
				Admin: f.outcomes[y.pair.admin], Lower: f.outcomes[y.pair.lower]})
		}
		if i == 0 {
			out = append(out, Entry{Direction: d, Peer: ownNode, Admin: Outcome{rankOwnNode, RuleOwnNode, Allow}, Lower: none})
		}
	}
	return out
}

// ownNode is identity.Node: what a pod's own node is to it.
const ownNode uint64 = 1

// rank returns the clauses of one direction with their ranks, and behind them
// the terms that match everyone: isolation or the default.
func rank(d Direction, policies []*resolved, ports map[string][]span) ([]*clause, []ranked) {
	var clauses []*clause
	var terms []ranked
	next := map[Tier]uint32{AdminTier: rankAdmin, NetworkPolicyTier: rankAllow, BaselineTier: rankBaseline}
	isolated := false
	for _, p := range policies {
		isolated = isolated || p.isolates[d]
	}
	for _, p := range policies {
		if isolated && p.tier == BaselineTier {
			continue
		}
		for i := range p.clauses {
			c := &p.clauses[i]
			r := p.rules[c.rule]
			if r.Direction != d {
				continue
			}
			if i > 0 && p.clauses[i-1].rule == c.rule {
				next[p.tier]-- // a part of the same rule
			}
			terms = append(terms, ranked{p.tier == AdminTier, Outcome{next[p.tier], r.Number, verdictOf(r)}, portsOf(c, ports)})
			clauses = append(clauses, c)
			next[p.tier]++
		}
	}
	if isolated {
		terms = append(terms, ranked{false, Outcome{rankIsolated, RuleNone, Deny}, []span{everything}})
	}
	return clauses, append(terms, ranked{false, Outcome{rankDefault, RuleNone, Allow}, []span{everything}})
}

// verdictOf is the verdict that a rule compiles to: behind the baseline tier
// there is only the default, which allows.
func verdictOf(r Rule) Verdict {
	if r.Tier == BaselineTier && r.Verdict == Pass {
		return Allow
	}
	return r.Verdict
}

func portsOf(c *clause, ports map[string][]span) []span {
	if len(c.named) == 0 {
		return c.ports
	}
	out := slices.Clone(c.ports)
	for _, name := range c.named {
		out = append(out, ports[name]...)
	}
	return out
}
