// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/weft-mesh/weft/internal/state"
)

// Compile compiles policies from scratch.
func Compile(in Input) *Result { return new(Compiler).Compile(in) }

// Compiler compiles again and again and keeps what did not change. The zero
// value is ready. It is not safe for concurrent use; its results are.
type Compiler struct {
	population *population
	parsed     map[*state.Policy]*parsed
	resolved   map[*parsed]*resolved // under population
	subjects   map[digest]*Subject   // by what they are made from
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
	p.cluster = cluster{population: c.populate(in.Identities), pods: sortedPods(in.Pods), nodes: in.Nodes}
	c.parse(p, in.Policies)
	numbers := number(p.policies)
	p.describe(numbers)
	p.selectLocal()
	c.resolve(p, numbers)
	c.classify(p)
	c.assemble(p)
	return p.result
}

// populate returns the index of identities, the last one where they are the
// same.
func (c *Compiler) populate(rows []*state.Identity) *population {
	ids := slices.Clone(rows)
	slices.SortFunc(ids, func(a, b *state.Identity) int { return cmp.Compare(a.ID, b.ID) })
	if c.population == nil || !slices.Equal(ids, c.population.ids) {
		c.population = newPopulation(ids)
		c.resolved = nil
	}
	return c.population
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
		if r == nil || one.moves() || !sameNumbers(r, numbers) {
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
	for _, r := range active {
		if r.digest != (digest{}) && !r.hasPrefixes() {
			continue
		}
		r.classify(prefixes)
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
	s := &Subject{}
	for _, d := range []Direction{Egress, Ingress} {
		s.Entries = append(s.Entries, p.entries(d, policies, ports)...)
	}
	s.Key = SubjectKey(sha256.Sum256(encode(s.Entries)))
	return s
}

// encode writes entries as bytes of one length each.
func encode(entries []Entry) []byte {
	b := make([]byte, 0, 31*len(entries))
	for _, e := range entries {
		b = append(b, byte(e.Direction), e.Bits, e.Protocol)
		b = binary.BigEndian.AppendUint64(b, e.Peer)
		b = binary.BigEndian.AppendUint16(b, e.Port)
		for _, o := range []Outcome{e.Admin, e.Lower} {
			b = binary.BigEndian.AppendUint32(b, o.Rank)
			b = binary.BigEndian.AppendUint32(b, o.Rule)
			b = append(b, byte(o.Verdict))
		}
	}
	return b
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
	out := appendEntries(nil, d, AnyPeer, f.setAny(anyone), f.outcomes)
	out = append(out, Entry{Direction: d, Peer: ownNode, Admin: Outcome{rankOwnNode, RuleOwnNode, Allow}, Lower: none})
	ids := newLists(len(p.population.ids))
	classes := newLists(len(p.classes))
	for i, c := range clauses {
		if c.ids != nil {
			c.ids.each(func(at int) { ids.add(at, int32(i)) })
		}
		for _, at := range c.classes {
			classes.add(int(at), int32(i))
		}
	}
	for at, list := range ids {
		if len(list) > 0 {
			out = appendEntries(out, d, p.population.ids[at].ID, f.peer(list), f.outcomes)
		}
	}
	from := len(out)
	for at, list := range classes {
		if len(list) > 0 {
			out = appendEntries(out, d, p.classes[at].Number, f.peer(list), f.outcomes)
		}
	}
	slices.SortStableFunc(out[from:], func(a, b Entry) int { return cmp.Compare(a.Peer, b.Peer) })
	return out
}

// ownNode is identity.Node: what a pod's own node is to it.
const ownNode uint64 = 1

// lists holds for each peer the terms that match it.
type lists [][]int32

func newLists(n int) lists { return make(lists, n) }

func (l lists) add(at int, term int32) { l[at] = append(l[at], term) }

func appendEntries(out []Entry, d Direction, peer uint64, pieces []piece, outcomes []Outcome) []Entry {
	for _, x := range pieces {
		out = append(out, Entry{Direction: d, Peer: peer, Bits: x.bits, Protocol: x.protocol, Port: x.port,
			Admin: outcomes[x.pair.admin], Lower: outcomes[x.pair.lower]})
	}
	return out
}

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
