// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/lab/model"
)

const clusterDomain = "cluster.local"

// nameServers are the addresses of the Service that pods ask for names, IPv4
// first; none where there is no such Service.
func nameServers(c *model.Cluster) []netip.Addr {
	svc, ok := c.Get(model.ID{Kind: "Service", Namespace: "kube-system", Name: "kube-dns"}).(*corev1.Service)
	if !ok {
		return nil
	}
	var servers []netip.Addr
	for _, text := range svc.Spec.ClusterIPs {
		if ip, err := netip.ParseAddr(text); err == nil {
			servers = append(servers, ip)
		}
	}
	slices.SortFunc(servers, netip.Addr.Compare)
	return servers
}

// followNameServers has the pods know where names are asked now; l.mu is held.
func (l *Lab) followNameServers() error {
	now := nameServers(l.cluster)
	if before := l.dns.Load(); before != nil && slices.Equal(*before, now) {
		return nil
	}
	l.dns.Store(&now)
	var errs []error
	for _, w := range l.workers {
		errs = append(errs, w.writeResolvConf(false))
	}
	return errors.Join(errs...)
}

// writeResolvConf writes the pod's own resolv.conf, if there is one or it is to
// be made. The containers have mounted the file: it stays the same one.
func (w *worker) writeResolvConf(create bool) error {
	w.resolvMu.Lock()
	defer w.resolvMu.Unlock()
	flags := os.O_WRONLY
	if create {
		flags |= os.O_CREATE
	}
	f, err := os.OpenFile(filepath.Join(w.dir(), "resolv.conf"), flags, 0o644)
	if errors.Is(err, os.ErrNotExist) && !create {
		return nil
	}
	if err != nil {
		return fmt.Errorf("write the pod's resolv.conf: %w", err)
	}
	defer f.Close()
	var servers []netip.Addr
	if p := w.lab.dns.Load(); p != nil {
		servers = *p
	}
	text := resolvConf(w.pod, servers)
	// Written before it is cut: a reader never finds an empty file.
	if _, err := f.WriteString(text); err != nil {
		return fmt.Errorf("write the pod's resolv.conf: %w", err)
	}
	if err := f.Truncate(int64(len(text))); err != nil {
		return fmt.Errorf("write the pod's resolv.conf: %w", err)
	}
	return nil
}

// resolvConf is what a kubelet would write. Where no server is known it names
// none: a name that cannot be found should say so at once. The nodes of a lab
// have none either.
func resolvConf(pod *corev1.Pod, cluster []netip.Addr) string {
	var servers, search []string
	var options []corev1.PodDNSConfigOption
	if asksCluster(&pod.Spec) {
		for _, ip := range cluster {
			servers = append(servers, ip.String())
		}
		search = []string{pod.Namespace + ".svc." + clusterDomain, "svc." + clusterDomain, clusterDomain}
		five := "5"
		options = append(options, corev1.PodDNSConfigOption{Name: "ndots", Value: &five})
	}
	if c := pod.Spec.DNSConfig; c != nil {
		servers, search = append(servers, c.Nameservers...), append(search, c.Searches...)
		for _, o := range c.Options {
			options = slices.DeleteFunc(options, func(have corev1.PodDNSConfigOption) bool { return have.Name == o.Name })
			options = append(options, o)
		}
	}
	var b strings.Builder
	b.WriteString("# Written by weft lab.\n")
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	if len(search) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(search, " "))
	}
	for _, o := range options {
		b.WriteString("options " + o.Name)
		if o.Value != nil {
			b.WriteString(":" + *o.Value)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// asksCluster tells whether a pod's names are those of the cluster. A pod on its
// node's network is asked to say so.
func asksCluster(s *corev1.PodSpec) bool {
	switch s.DNSPolicy {
	case corev1.DNSNone, corev1.DNSDefault:
		return false
	case corev1.DNSClusterFirstWithHostNet:
		return true
	}
	return !s.HostNetwork
}
