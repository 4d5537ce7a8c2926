// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const maxPort = 65535

// checkMeta checks the metadata of an object of kind k and gives it its
// namespace.
func checkMeta(p *problems, k kind, obj runtime.Object) {
	m, err := meta.Accessor(obj)
	if err != nil {
		p.say(field.NewPath("metadata"), "%v", err)
		return
	}
	path := field.NewPath("metadata")
	checkObjectName(p, path.Child("name"), k.name, m.GetName())
	switch {
	case !k.namespaced && m.GetNamespace() != "":
		p.refuse(path.Child("namespace"), m.GetNamespace(), "a "+k.name+" is in no namespace: want no such field")
	case k.namespaced && m.GetNamespace() == "":
		m.SetNamespace(metav1.NamespaceDefault)
	case k.namespaced:
		p.text(path.Child("namespace"), m.GetNamespace(), validation.IsDNS1123Label)
	}
	checkLabels(p, path.Child("labels"), m.GetLabels())
	for _, key := range sortedKeys(m.GetAnnotations()) {
		p.text(path.Child("annotations"), strings.ToLower(key), validation.IsQualifiedName)
	}
}

func checkObjectName(p *problems, path *field.Path, kind, name string) {
	rule := validation.IsDNS1123Subdomain
	if kind == "Namespace" || kind == "Service" {
		rule = validation.IsDNS1123Label
	}
	if name == "" {
		p.missing(path, "the name of the "+kind)
		return
	}
	p.text(path, name, rule)
}

// text reports what rule has against s.
func (p *problems) text(path *field.Path, s string, rule func(string) []string) {
	for _, why := range rule(s) {
		p.refuse(path, s, why)
	}
}

func checkLabels(p *problems, path *field.Path, labels map[string]string) {
	for _, key := range sortedKeys(labels) {
		p.text(path, key, validation.IsQualifiedName)
		p.text(path.Key(key), labels[key], validation.IsValidLabelValue)
	}
}

func checkSelector(p *problems, path *field.Path, s *metav1.LabelSelector) {
	if s == nil {
		return
	}
	checkLabels(p, path.Child("matchLabels"), s.MatchLabels)
	for i, e := range s.MatchExpressions {
		at := path.Child("matchExpressions").Index(i)
		p.text(at.Child("key"), e.Key, validation.IsQualifiedName)
		switch e.Operator {
		case metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn:
			if len(e.Values) == 0 {
				p.missing(at.Child("values"), "at least one value for operator "+string(e.Operator))
			}
		case metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist:
			if len(e.Values) > 0 {
				p.add(at.Child("values"), e.Values, "no values for operator "+string(e.Operator))
			}
		default:
			p.add(at.Child("operator"), e.Operator, "In, NotIn, Exists or DoesNotExist")
		}
		for j, v := range e.Values {
			p.text(at.Child("values").Index(j), v, validation.IsValidLabelValue)
		}
	}
}

// checkAddr wants an address in the one form that every reader takes the same
// way: no zone, no leading zeros, not an IPv4 address inside of an IPv6 one.
func checkAddr(p *problems, path *field.Path, s string) netip.Addr {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		p.add(path, s, "an IPv4 or IPv6 address")
		return netip.Addr{}
	}
	return a
}

func checkPrefix(p *problems, path *field.Path, s string) netip.Prefix {
	c, err := netip.ParsePrefix(s)
	if err != nil || c.Addr().Is4In6() {
		p.add(path, s, "a CIDR such as 10.0.0.0/8 or fd00::/8")
		return netip.Prefix{}
	}
	if c != c.Masked() {
		p.add(path, s, fmt.Sprintf("a CIDR without bits behind its length: %s", c.Masked()))
		return netip.Prefix{}
	}
	return c
}

// checkFamilies wants at most one address or prefix of each family.
func checkFamilies(p *problems, path *field.Path, values []string, families []bool) {
	seen := map[bool]bool{}
	for i, is4 := range families {
		if seen[is4] {
			p.add(path.Index(i), values[i], "at most one for IPv4 and one for IPv6")
		}
		seen[is4] = true
	}
}

func checkPort(p *problems, path *field.Path, port int32) {
	if port < 1 || port > maxPort {
		p.add(path, port, fmt.Sprintf("a port from 1 to %d", maxPort))
	}
}

func checkPortOrName(p *problems, path *field.Path, port intstr.IntOrString) {
	if port.Type == intstr.Int {
		checkPort(p, path, port.IntVal)
		return
	}
	p.text(path, port.StrVal, validation.IsValidPortName)
}

// checkProtocol fills in TCP where there is none.
func checkProtocol(p *problems, path *field.Path, proto *corev1.Protocol) {
	if *proto == "" {
		*proto = corev1.ProtocolTCP
	}
	oneOf(p, path, *proto, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

func oneOf[T ~string](p *problems, path *field.Path, v T, known ...T) {
	if slices.Contains(known, v) {
		return
	}
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	p.add(path, v, "one of "+strings.Join(names, ", "))
}

// unique reports the second of two equal texts of a list; empty ones do not
// count.
func unique(p *problems, path func(i int) *field.Path, values []string) {
	seen := map[string]bool{}
	for i, v := range values {
		if v == "" {
			continue
		}
		if seen[v] {
			p.add(path(i), v, "each name once")
		}
		seen[v] = true
	}
}
