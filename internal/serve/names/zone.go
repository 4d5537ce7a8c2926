// SPDX-License-Identifier: Apache-2.0

// Package names is a DNS server for the names of a cluster, by the specification
// of DNS-based service discovery of Kubernetes (schema version 1.1.0). It knows
// the cluster from a folder of manifests, answers for nothing else, and is an
// ordinary process: in a lab it runs in a pod behind a Service.
package names

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/state"
)

const (
	// ttl of all answers, also of those that say no, in seconds.
	ttl = 5
	// schemaVersion is that of the specification.
	schemaVersion = "1.1.0"
	// maxAliases is how many external names are followed within the zone.
	maxAliases = 8
)

// Zone is all names of a cluster at one moment. It is immutable.
type Zone struct {
	domain string             // fully qualified, lower case
	serial uint32             // of the SOA record
	names  map[string]*record // by fully qualified, lower-case name; those above others included
	pods   map[podAddr]bool
	ptr    map[netip.Addr][]string // names of addresses
}

// record is what belongs to a name.
type record struct {
	ips   []netip.Addr
	srv   []dns.SRV // Target, Port
	alias string    // CNAME
	text  string    // TXT
}

type podAddr struct {
	namespace string
	ip        netip.Addr
}

// Rows are what a zone is made of.
type Rows struct {
	Namespaces []*state.Namespace
	Services   []*state.Service
	Endpoints  []*state.Endpoint
	Workloads  []*state.Workload
}

// NewZone makes the zone of a cluster under domain, such as "cluster.local".
func NewZone(domain string, serial uint32, r Rows) *Zone {
	z := &Zone{
		domain: strings.ToLower(dns.Fqdn(domain)), serial: serial,
		names: map[string]*record{}, pods: map[podAddr]bool{}, ptr: map[netip.Addr][]string{},
	}
	z.at(z.domain)
	z.at("dns-version." + z.domain).text = schemaVersion
	for _, n := range r.Namespaces {
		z.at(n.Name + ".svc." + z.domain)
		z.at(n.Name + ".pod." + z.domain)
	}
	slicesOf := map[string][]*discoveryv1.EndpointSlice{}
	for _, e := range r.Endpoints {
		key := state.Key(e.Namespace, e.Service)
		slicesOf[key] = append(slicesOf[key], e.Slice)
	}
	for _, s := range r.Services {
		z.addService(s, slicesOf[state.Key(s.Namespace, s.Name)])
	}
	for _, w := range r.Workloads {
		z.addPod(w)
	}
	return z
}

// at returns the record of a name, which it makes with all names above.
func (z *Zone) at(name string) *record {
	rec := z.names[name]
	if rec != nil {
		return rec
	}
	rec = &record{}
	z.names[name] = rec
	if _, parent, ok := strings.Cut(name, "."); ok && dns.IsSubDomain(z.domain, parent) {
		z.at(parent)
	}
	return rec
}

func (z *Zone) addService(s *state.Service, of []*discoveryv1.EndpointSlice) {
	base := strings.ToLower(s.Name + "." + s.Namespace + ".svc." + z.domain)
	rec := z.at(base)
	switch {
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		rec.alias = dns.Fqdn(s.Spec.ExternalName)
		return
	case s.Spec.ClusterIP == corev1.ClusterIPNone:
		for _, slice := range of {
			z.addHeadless(base, slice)
		}
		return
	}
	for _, text := range s.Spec.ClusterIPs {
		if ip, err := netip.ParseAddr(text); err == nil {
			rec.ips = append(rec.ips, ip)
			z.ptr[ip] = append(z.ptr[ip], base)
		}
	}
	for _, p := range s.Spec.Ports {
		z.addPort(base, base, p.Name, p.Protocol, p.Port)
	}
}

// addHeadless gives the Service and each of its endpoints the addresses that
// are ready, or are to be published all the same: then the slice calls them so.
func (z *Zone) addHeadless(base string, slice *discoveryv1.EndpointSlice) {
	if slice.AddressType == discoveryv1.AddressTypeFQDN {
		return
	}
	for _, e := range slice.Endpoints {
		if e.Conditions.Ready != nil && !*e.Conditions.Ready {
			continue
		}
		for _, text := range e.Addresses {
			ip, err := netip.ParseAddr(text)
			if err != nil {
				continue
			}
			label := dashed(ip)
			if e.Hostname != nil && *e.Hostname != "" {
				label = strings.ToLower(*e.Hostname)
			}
			name := label + "." + base
			z.at(base).ips = appendNew(z.at(base).ips, ip)
			z.at(name).ips = appendNew(z.at(name).ips, ip)
			z.ptr[ip] = appendNew(z.ptr[ip], name)
			for _, p := range slice.Ports {
				if p.Name != nil && p.Port != nil && p.Protocol != nil {
					z.addPort(base, name, *p.Name, *p.Protocol, *p.Port)
				}
			}
		}
	}
}

// addPort makes a named port of a Service one to ask for.
func (z *Zone) addPort(base, target, name string, protocol corev1.Protocol, port int32) {
	if name == "" {
		return
	}
	rec := z.at(strings.ToLower("_" + name + "._" + string(protocol) + "." + base))
	same := func(s dns.SRV) bool { return s.Target == target && s.Port == uint16(port) }
	if !slices.ContainsFunc(rec.srv, same) {
		rec.srv = append(rec.srv, dns.SRV{Target: target, Port: uint16(port)})
	}
}

// addPod notes the addresses of a pod. Those of its node's network are the
// node's own.
func (z *Zone) addPod(w *state.Workload) {
	if w.HostNetwork || w.Phase == string(corev1.PodSucceeded) || w.Phase == string(corev1.PodFailed) {
		return
	}
	for _, ip := range w.IPs {
		z.pods[podAddr{w.Namespace, ip}] = true
		if z.ptr[ip] == nil {
			z.ptr[ip] = []string{dashed(ip) + "." + w.Namespace + ".pod." + z.domain}
		}
	}
}

// pod returns the address that a name below NAMESPACE.pod stands for.
func (z *Zone) pod(name string) (netip.Addr, bool) {
	rest, ok := strings.CutSuffix(name, ".pod."+z.domain)
	label, namespace, two := strings.Cut(rest, ".")
	if !ok || !two {
		return netip.Addr{}, false
	}
	ip, err := netip.ParseAddr(strings.ReplaceAll(label, "-", "."))
	if err != nil {
		ip, err = netip.ParseAddr(strings.ReplaceAll(label, "-", ":"))
	}
	return ip, err == nil && z.pods[podAddr{namespace, ip}]
}

// lookup returns the record of a lower-case name, nil where there is none.
func (z *Zone) lookup(name string) *record {
	if rec := z.names[name]; rec != nil {
		return rec
	}
	if ip, ok := z.pod(name); ok {
		return &record{ips: []netip.Addr{ip}}
	}
	return nil
}

// dashed is an address as a label.
func dashed(ip netip.Addr) string {
	return strings.NewReplacer(".", "-", ":", "-").Replace(ip.String())
}

func appendNew[T comparable](list []T, v T) []T {
	if slices.Contains(list, v) {
		return list
	}
	return append(list, v)
}
