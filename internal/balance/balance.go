// SPDX-License-Identifier: Apache-2.0

// Package balance computes what Services mean on one node: which addresses and
// ports are theirs, and which endpoints a connection to one may reach. It is
// pure: rows in, values out, in an order that does not depend on that of the
// input.
package balance

import (
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Kind is how clients know a frontend.
type Kind string

// The kinds of frontends. All but ClusterIP are external: they exist for
// clients outside of the cluster, and balance those by Service's
// externalTrafficPolicy.
const (
	ClusterIP    Kind = "ClusterIP"
	NodePort     Kind = "NodePort"
	ExternalIP   Kind = "ExternalIP"
	LoadBalancer Kind = "LoadBalancer"
)

// External says whether clients outside of the cluster use the frontend.
func (k Kind) External() bool { return k != ClusterIP }

// Name names a service port, the unit of balancing. Port is the name of the port
// within the Service, empty where it has none.
type Name struct {
	Namespace string
	Service   string
	Port      string
	Protocol  corev1.Protocol
}

// Frontend is where clients connect to. A NodePort has one for each address of
// this node.
type Frontend struct {
	Addr netip.Addr
	Port uint16
	Kind Kind
}

// State of a backend.
type State string

// A Terminating backend is used only where no Active one is left (KEP-1669).
const (
	Active      State = "active"
	Terminating State = "terminating"
)

// Backend is one endpoint of a service port.
type Backend struct {
	Addr  netip.Addr
	Port  uint16
	Node  string // of the pod; empty where not known
	Zone  string
	Pod   string // NAMESPACE/NAME of targetRef; empty where there is none
	State State
}

// ServicePort is a service port as this node balances it. Both address families
// are together: a frontend reaches the backends of its own family only.
type ServicePort struct {
	Name      Name
	Frontends []Frontend // in order of kind, address and port
	// Internal are the backends for clients on this node, External those for
	// clients from outside; each in order of address and port, without
	// duplicates, and only those that may be chosen. External is nil where there
	// is no external frontend.
	//
	// Internal is for the ClusterIP frontends only, as internalTrafficPolicy is.
	// Clients on this node that use an external frontend get Cluster, whatever
	// the policies are; it is in the same order, and nil where there is no
	// external frontend. The three may share memory: they are read only.
	Internal, External []Backend
	Cluster            []Backend
	// Affinity is how long a client stays with its backend after its last
	// connection; 0: none.
	Affinity time.Duration
	// SourceRanges are the clients that LoadBalancer frontends accept, as masked
	// prefixes in order; nil: all. Ranges of one family refuse all clients of the
	// other (kube-proxy accepts these).
	SourceRanges []netip.Prefix
	// LocalExternal says that externalTrafficPolicy is Local: the client's
	// address reaches the backend, and there is no second hop.
	LocalExternal bool
	// HealthCheckPort answers load balancers about this node on its TCP port; 0:
	// none. LocalReady is how many ready backends this node has, of all ports;
	// one with addresses in both families counts once. It is counted only where
	// there is a HealthCheckPort.
	HealthCheckPort uint16
	LocalReady      int
}
