// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/weft-mesh/weft/internal/bench/kubeproxy"
	"github.com/weft-mesh/weft/internal/state"
)

// fleet is a cluster of so many services, numbered from 0, each with two
// endpoints. All endpoints are one server: its namespace has every address of
// fleetEndpoints.
type fleet int

var (
	fleetEndpoints = netip.MustParsePrefix("10.128.0.0/10")
	firstService   = netip.MustParseAddr("10.96.1.0")
	firstEndpoint  = netip.MustParseAddr("10.128.0.1")
	// firstSpare are the endpoints that a change brings; no service has them.
	firstSpare = netip.MustParseAddr("10.180.0.1")
)

const (
	fleetNamespace     = "default"
	fleetPort          = 80
	fleetTarget        = 8080
	endpointsOfService = 2
	// maxFleet keeps the service addresses within 10.96.0.0/12.
	maxFleet = 500_000
)

func (n fleet) services() *Services {
	return &Services{First: firstService, Count: int(n), Port: fleetPort}
}

func (fleet) name(i int) string { return fmt.Sprintf("service%d", i) }

func (fleet) endpoints(i int) []netip.Addr {
	return []netip.Addr{nth(firstEndpoint, endpointsOfService*i), nth(firstEndpoint, endpointsOfService*i+1)}
}

func meta(kind, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: fleetNamespace, Name: name, UID: types.UID(kind + "-" + name), Generation: 1,
		CreationTimestamp: metav1.NewTime(time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)),
	}
}

// service has every field as the API server defaults it.
func (n fleet) service(i int) *corev1.Service {
	single, cluster := corev1.IPFamilyPolicySingleStack, corev1.ServiceInternalTrafficPolicyCluster
	ip := nth(firstService, i).String()
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: meta("service", n.name(i)),
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single,
			InternalTrafficPolicy: &cluster, SessionAffinity: corev1.ServiceAffinityNone,
			Selector: map[string]string{"app": n.name(i)},
			Ports:    []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: fleetPort, TargetPort: intstr.FromInt32(fleetTarget)}},
		},
	}
}

// slice is the EndpointSlice of service i with these endpoints.
func (n fleet) slice(i int, endpoints []netip.Addr) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  meta("slice", n.name(i)),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Protocol: new(corev1.ProtocolTCP), Port: new(int32(fleetTarget))}},
	}
	s.Labels = map[string]string{discoveryv1.LabelServiceName: n.name(i)}
	for _, e := range endpoints {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{e.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
		})
	}
	return s
}

// objects are all of them, as etcd holds them. With the IPAddress objects the
// API server has nothing to repair.
func (n fleet) objects() ([]kubeproxy.Object, error) {
	var out []kubeproxy.Object
	add := func(key string, object any) error {
		b, err := json.Marshal(object)
		out = append(out, kubeproxy.Object{Key: "/registry/" + key, JSON: b})
		return err
	}
	for i := range int(n) {
		name := n.name(i)
		if err := add("services/specs/"+fleetNamespace+"/"+name, n.service(i)); err != nil {
			return nil, err
		}
		if err := add("endpointslices/"+fleetNamespace+"/"+name, n.slice(i, n.endpoints(i))); err != nil {
			return nil, err
		}
		ip := nth(firstService, i).String()
		if err := add("ipaddresses/"+ip, ipAddress(ip, name)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func ipAddress(ip, service string) map[string]any {
	return map[string]any{
		"apiVersion": "networking.k8s.io/v1", "kind": "IPAddress",
		"metadata": map[string]any{
			"name": ip, "uid": "address-" + ip, "creationTimestamp": "2020-01-01T00:00:00Z",
			"labels": map[string]string{"ipaddress.kubernetes.io/ip-family": "IPv4", "ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io"},
		},
		"spec": map[string]any{"parentRef": map[string]string{"resource": "services", "namespace": fleetNamespace, "name": service}},
	}
}

// patch is what the API is told for a change of endpoints.
func (n fleet) patch(i int, endpoints []netip.Addr) (path string, body []byte, err error) {
	body, err = json.Marshal(map[string]any{"endpoints": n.slice(i, endpoints).Endpoints})
	return "/apis/discovery.k8s.io/v1/namespaces/" + fleetNamespace + "/endpointslices/" + n.name(i), body, err
}

// sliceRow is a row of weft's tables.
func (n fleet) sliceRow(i int, endpoints []netip.Addr) *state.Endpoint {
	return &state.Endpoint{Namespace: fleetNamespace, Name: n.name(i), Service: n.name(i), Slice: n.slice(i, endpoints)}
}

// change is a change of service i: its first endpoint gives way to a spare one.
func (n fleet) change(i, spare int) []netip.Addr {
	return []netip.Addr{nth(firstSpare, spare), n.endpoints(i)[1]}
}
