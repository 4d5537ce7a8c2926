// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"math/bits"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// bitset is a set of indexes into a list whose length is known from elsewhere.
type bitset []uint64

const wordBits = 64

func newBitset(n int) bitset { return make(bitset, (n+wordBits-1)/wordBits) }

func (b bitset) set(i int) { b[i/wordBits] |= 1 << (i % wordBits) }

func (b bitset) has(i int) bool { return b[i/wordBits]&(1<<(i%wordBits)) != 0 }

func (b bitset) and(o bitset) {
	for i := range b {
		b[i] &= o[i]
	}
}

func (b bitset) or(o bitset) {
	for i := range b {
		b[i] |= o[i]
	}
}

func (b bitset) andNot(o bitset) {
	for i := range b {
		b[i] &^= o[i]
	}
}

// each calls f with every member, in ascending order.
func (b bitset) each(f func(i int)) {
	for w, word := range b {
		for ; word != 0; word &= word - 1 {
			f(w*wordBits + bits.TrailingZeros64(word))
		}
	}
}

// requirement is one condition on labels.
type requirement struct {
	key    string
	op     metav1.LabelSelectorOperator
	values []string
}

// selector is the conjunction of its requirements; an empty one matches all.
type selector []requirement

// newSelector takes over s. It refuses what the API refuses.
func newSelector(s *metav1.LabelSelector) (selector, error) {
	sel := make(selector, 0, len(s.MatchLabels)+len(s.MatchExpressions))
	for k, v := range s.MatchLabels {
		sel = append(sel, requirement{k, metav1.LabelSelectorOpIn, []string{v}})
	}
	for _, e := range s.MatchExpressions {
		switch e.Operator {
		case metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn:
			if len(e.Values) == 0 {
				return nil, fmt.Errorf("operator %s on label %s: want at least one value", e.Operator, e.Key)
			}
		case metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist:
			if len(e.Values) > 0 {
				return nil, fmt.Errorf("operator %s on label %s: want no values", e.Operator, e.Key)
			}
		default:
			return nil, fmt.Errorf("operator %q on label %s: want In, NotIn, Exists or DoesNotExist", e.Operator, e.Key)
		}
		sel = append(sel, requirement{e.Key, e.Operator, e.Values})
	}
	return sel, nil
}

// matches judges one set of labels; labelIndex.match judges many.
func (s selector) matches(labels map[string]string) bool {
	for _, r := range s {
		v, there := labels[r.key]
		ok := there
		switch r.op {
		case metav1.LabelSelectorOpIn:
			ok = there && slices.Contains(r.values, v)
		case metav1.LabelSelectorOpNotIn:
			ok = !there || !slices.Contains(r.values, v)
		case metav1.LabelSelectorOpDoesNotExist:
			ok = !there
		}
		if !ok {
			return false
		}
	}
	return true
}

// labelIndex finds which of a list of label sets a selector matches.
type labelIndex struct {
	n      int
	values map[string]map[string][]int32 // key and value to ascending indexes
}

func newLabelIndex(n int, labels func(i int) map[string]string) *labelIndex {
	x := &labelIndex{n: n, values: map[string]map[string][]int32{}}
	for i := range n {
		for k, v := range labels(i) {
			byValue := x.values[k]
			if byValue == nil {
				byValue = map[string][]int32{}
				x.values[k] = byValue
			}
			byValue[v] = append(byValue[v], int32(i))
		}
	}
	return x
}

// match takes out of set what s does not match.
func (x *labelIndex) match(set bitset, s selector) {
	for _, r := range s {
		found := newBitset(x.n)
		add := func(list []int32) {
			for _, i := range list {
				found.set(int(i))
			}
		}
		byValue := x.values[r.key]
		if r.op == metav1.LabelSelectorOpExists || r.op == metav1.LabelSelectorOpDoesNotExist {
			for _, list := range byValue {
				add(list)
			}
		}
		for _, v := range r.values {
			add(byValue[v])
		}
		if r.op == metav1.LabelSelectorOpIn || r.op == metav1.LabelSelectorOpExists {
			set.and(found)
		} else {
			set.andNot(found)
		}
	}
}

// population is the identities of the cluster, in the order of their numbers.
// It is immutable.
type population struct {
	ids         []*state.Identity
	index       map[uint64]int // number to index
	byNamespace map[string]bitset
	namespaces  *labelIndex
	pods        *labelIndex
}

func newPopulation(ids []*state.Identity) *population {
	p := &population{ids: ids, index: make(map[uint64]int, len(ids)), byNamespace: map[string]bitset{}}
	for i, id := range ids {
		p.index[id.ID] = i
		if p.byNamespace[id.Namespace] == nil {
			p.byNamespace[id.Namespace] = newBitset(len(ids))
		}
		p.byNamespace[id.Namespace].set(i)
	}
	p.namespaces = newLabelIndex(len(ids), func(i int) map[string]string { return ids[i].NamespaceLabels })
	p.pods = newLabelIndex(len(ids), func(i int) map[string]string { return ids[i].Labels })
	return p
}

// podSet selects pods. Its zero value selects none.
type podSet struct {
	any        bool   // any namespace; else the one called namespace
	namespace  string // exact name
	namespaces selector
	pods       selector
}

// match returns the identities of the pods that s selects.
func (p *population) match(s podSet) bitset {
	set := newBitset(len(p.ids))
	switch {
	case s.any:
		for i := range p.ids {
			set.set(i)
		}
	case p.byNamespace[s.namespace] != nil:
		copy(set, p.byNamespace[s.namespace])
	default:
		return set
	}
	p.namespaces.match(set, s.namespaces)
	p.pods.match(set, s.pods)
	return set
}
