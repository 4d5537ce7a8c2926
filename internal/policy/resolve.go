// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"sort"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/state"
)

// digest is a hash of all that an object says.
type digest [sha256.Size]byte

// resolved is a policy with the identities and classes of its peers. It is
// immutable once it has its digest.
type resolved struct {
	*parsed
	rules   []Rule // with numbers, as parsed.rules
	clauses []clause
	digest  digest
}

// clause is a rule, or the part of one that has its own peers and ports.
type clause struct {
	rule    int // index into resolved.rules
	any     bool
	ids     bitset         // identities that match, of the population; nil for none
	blocks  []block        // addresses that match
	hosts   []netip.Prefix // more of them, each of one address, in order; shared
	ports   []span
	named   []string // of the subject's own ports; see portName
	classes []int32  // what blocks and hosts are among the prefixes, ascending
}

// cluster is what peers are looked up in.
type cluster struct {
	population *population
	pods       []Pod // in order
	nodes      []*state.Node
	named      map[string][]clause // results of namedClauses
}

// moves is true for a policy whose prefixes depend on pods or nodes.
func (p *parsed) moves() bool {
	for _, r := range p.rules {
		if r.Direction == Egress && len(r.named) > 0 {
			return true
		}
		for _, x := range r.peers {
			if x.nodes != nil {
				return true
			}
		}
	}
	return false
}

// resolve finds the peers of all rules. Classes come later, when the prefixes
// of all policies are known.
func (c *cluster) resolve(p *parsed, numbers map[ruleKey]uint32) *resolved {
	out := &resolved{parsed: p, rules: make([]Rule, len(p.rules))}
	for i := range p.rules {
		r := &p.rules[i]
		out.rules[i] = r.Rule
		out.rules[i].Number = numbers[keyOf(r.Rule)]
		out.clauses = append(out.clauses, c.clausesOf(r, i)...)
	}
	return out
}

func (c *cluster) clausesOf(r *parsedRule, index int) []clause {
	base := clause{rule: index, any: r.any, ports: r.ports}
	for _, x := range r.peers {
		switch {
		case x.pods != nil:
			set := c.population.match(*x.pods)
			if base.ids == nil {
				base.ids = set
			} else {
				base.ids.or(set)
			}
		case x.block != nil:
			base.blocks = append(base.blocks, *x.block)
		default:
			base.hosts = append(base.hosts, c.nodeHosts(x.nodes)...)
		}
	}
	base.hosts = uniquePrefixes(base.hosts)
	if r.Direction == Ingress {
		base.named = r.named
		return []clause{base}
	}
	var clauses []clause
	if len(base.ports) > 0 {
		clauses = append(clauses, base)
	}
	return append(clauses, c.namedClauses(&base, r.named)...)
}

func (c *cluster) nodeHosts(s selector) []netip.Prefix {
	var hosts []netip.Prefix
	for _, n := range c.nodes {
		if !s.matches(n.Labels) {
			continue
		}
		for _, ip := range n.IPs {
			hosts = append(hosts, addr.Host(ip))
		}
	}
	return hosts
}

// namedClauses resolves named ports of egress rules by the pods they lead to:
// one clause for all addresses that have the same numbers. Rules with the same
// peers and names share them.
func (c *cluster) namedClauses(base *clause, named []string) []clause {
	if len(named) == 0 {
		return nil
	}
	key := fmt.Sprint(named, base.any, base.ids, base.blocks, base.hosts)
	shared, ok := c.named[key]
	if !ok {
		shared = c.findNamed(base, named)
		c.named[key] = shared
	}
	clauses := slices.Clone(shared)
	for i := range clauses {
		clauses[i].rule = base.rule
	}
	return clauses
}

func (c *cluster) findNamed(base *clause, named []string) []clause {
	byPorts := map[string]*clause{}
	for i := range c.pods {
		pod := &c.pods[i]
		ports := resolveNames(pod.Ports, named)
		if len(ports) == 0 {
			continue
		}
		key := fmt.Sprint(ports)
		for _, ip := range pod.IPs {
			host := addr.Host(ip)
			if !c.matches(base, pod.Identity, host) {
				continue
			}
			if byPorts[key] == nil {
				byPorts[key] = &clause{ports: ports}
			}
			byPorts[key].hosts = append(byPorts[key].hosts, host)
		}
	}
	clauses := make([]clause, 0, len(byPorts))
	for _, key := range slices.Sorted(maps.Keys(byPorts)) {
		byPorts[key].hosts = uniquePrefixes(byPorts[key].hosts)
		clauses = append(clauses, *byPorts[key])
	}
	return clauses
}

// matches is true where the peers of a clause include a pod at host.
func (c *cluster) matches(x *clause, identity uint64, host netip.Prefix) bool {
	if x.any {
		return true
	}
	if i, known := c.population.index[identity]; known && x.ids != nil && x.ids.has(i) {
		return true
	}
	if slices.ContainsFunc(x.blocks, func(b block) bool { return b.covers(host) }) {
		return true
	}
	_, found := slices.BinarySearchFunc(x.hosts, host, comparePrefixes)
	return found
}

// resolveNames returns the numbers of named ports, in order.
func resolveNames(ports []state.Port, named []string) []span {
	var out []span
	for _, p := range ports {
		protocol, ok := protocolByName(string(p.Protocol))
		if !ok && p.Protocol == "" {
			protocol, ok = TCP, true
		}
		if p.Name == "" || !ok {
			continue
		}
		for _, want := range named {
			if want == portName("", p.Name) || want == portName(protocolName(protocol), p.Name) {
				out = append(out, span{protocol, p.Port, p.Port})
			}
		}
	}
	slices.SortFunc(out, compareSpans)
	return slices.Compact(out)
}

func compareSpans(a, b span) int {
	return slices.Compare([]int{int(a.protocol), int(a.first), int(a.last)}, []int{int(b.protocol), int(b.first), int(b.last)})
}

func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}

func uniquePrefixes(ps []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ps, comparePrefixes)
	return slices.Compact(ps)
}

// prefixesOf returns all prefixes that some policy names, in order. An IPv6
// prefix that covers the range of IPv4-mapped addresses, in which the kernel
// looks for IPv4 ones, brings 0.0.0.0/0 along, so that no IPv4 address is of
// its class.
func prefixesOf(policies []*resolved) []netip.Prefix {
	seen := map[netip.Prefix]bool{}
	mapped := netip.AddrFrom16(addr.To16(netip.IPv4Unspecified()))
	add := func(p netip.Prefix) {
		seen[p] = true
		if p.Contains(mapped) {
			seen[netip.PrefixFrom(netip.IPv4Unspecified(), 0)] = true
		}
	}
	hosts := map[*netip.Prefix]bool{}
	for _, p := range policies {
		for i := range p.clauses {
			c := &p.clauses[i]
			for _, b := range c.blocks {
				add(b.cidr)
				for _, e := range b.except {
					add(e)
				}
			}
			if len(c.hosts) == 0 || hosts[&c.hosts[0]] {
				continue
			}
			hosts[&c.hosts[0]] = true
			for _, h := range c.hosts {
				add(h)
			}
		}
	}
	return slices.SortedFunc(maps.Keys(seen), comparePrefixes)
}

// classifier finds the classes of clauses among prefixes.
type classifier struct {
	prefixes []netip.Prefix
	hosts    map[*netip.Prefix][]int32 // by the first of shared hosts
}

// classify sets the classes of all clauses.
func (x *classifier) classify(r *resolved) {
	for i := range r.clauses {
		c := &r.clauses[i]
		if len(c.blocks) == 0 {
			c.classes = x.classesOf(c.hosts)
			continue
		}
		c.classes = slices.Clone(x.classesOf(c.hosts))
		for _, b := range c.blocks {
			from, _ := slices.BinarySearchFunc(x.prefixes, b.cidr, comparePrefixes)
			for j := from; j < len(x.prefixes) && b.cidr.Contains(x.prefixes[j].Addr()); j++ {
				if b.covers(x.prefixes[j]) {
					c.classes = append(c.classes, int32(j))
				}
			}
		}
		slices.Sort(c.classes)
		c.classes = slices.Compact(c.classes)
	}
}

func (x *classifier) classesOf(hosts []netip.Prefix) []int32 {
	if len(hosts) == 0 {
		return nil
	}
	out, ok := x.hosts[&hosts[0]]
	if ok {
		return out
	}
	for _, h := range hosts {
		if j, found := slices.BinarySearchFunc(x.prefixes, h, comparePrefixes); found {
			out = append(out, int32(j))
		}
	}
	x.hosts[&hosts[0]] = out
	return out
}

// sign sets the digest: two policies with the same one compile to the same
// entries.
func (r *resolved) sign(p *population, classes []Class) {
	var b bytes.Buffer
	number := func(v uint64) { b.Write(binary.BigEndian.AppendUint64(b.AvailableBuffer(), v)) }
	fmt.Fprintf(&b, "%d %v %d\n", r.tier, r.isolates, len(r.rules))
	for _, x := range r.rules {
		fmt.Fprintf(&b, "%d %d %d\n", x.Number, x.Direction, x.Verdict)
	}
	for i := range r.clauses {
		c := &r.clauses[i]
		fmt.Fprintf(&b, "%d %v %v %q\n", c.rule, c.any, c.ports, c.named)
		if c.ids != nil {
			c.ids.each(func(i int) { number(p.ids[i].ID) })
		}
		number(0)
		for _, j := range c.classes {
			number(classes[j].Number)
		}
		number(0)
	}
	r.digest = sha256.Sum256(b.Bytes())
}

// ruleKey names a rule over all versions of its policy.
type ruleKey struct {
	policy    Ref
	direction Direction
	index     int
}

func keyOf(r Rule) ruleKey { return ruleKey{r.Policy, r.Direction, r.Index} }

// number gives every rule its number: a hash of its name, the next free one
// where two collide. So a rule keeps its number when others come and go, on
// every node and over restarts.
func number(policies []*parsed) map[ruleKey]uint32 {
	numbers := map[ruleKey]uint32{}
	used := map[uint32]bool{}
	for _, p := range policies {
		for i := range p.rules {
			key := keyOf(p.rules[i].Rule)
			h := fnv.New32a()
			fmt.Fprintf(h, "%s\x00%s\x00%s\x00%d\x00%d", key.policy.Kind, key.policy.Namespace, key.policy.Name, key.direction, key.index)
			n := h.Sum32()
			for n < firstRule || used[n] {
				n++
			}
			used[n] = true
			numbers[key] = n
		}
	}
	return numbers
}

// order sorts policies as they are evaluated: by tier, priority and name.
func order(policies []*parsed) {
	sort.Slice(policies, func(i, j int) bool {
		a, b := policies[i], policies[j]
		switch {
		case a.tier != b.tier:
			return a.tier < b.tier
		case a.priority != b.priority:
			return a.priority < b.priority
		case a.ref.Namespace != b.ref.Namespace:
			return a.ref.Namespace < b.ref.Namespace
		case a.ref.Name != b.ref.Name:
			return a.ref.Name < b.ref.Name
		}
		return a.ref.Kind < b.ref.Kind
	})
}
