// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// pod is a manifest of a pod whose spec is what a case changes.
func pod(spec string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: " + spec + "\n"
}

func service(spec string) string {
	return "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: " + spec + "\n"
}

func policy(spec string) string {
	return "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web}\nspec: " + spec + "\n"
}

func clusterPolicy(spec string) string {
	return "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: web}\nspec: " + spec + "\n"
}

// clusterEgress is a cluster policy with one egress rule.
func clusterEgress(rule string) string {
	return clusterPolicy("{tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [" + rule + "]}")
}

func node(spec string) string {
	return "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nspec: " + spec + "\n"
}

// wrong are wrong manifests, each with everything that is said about it.
var wrong = []struct {
	name string
	text string
	want []string
}{
	{"unknown field", pod(`{containers: [{name: a, imagee: x}]}`), []string{
		`f.yaml, document 0, spec.containers[0].imagee: unknown field with value "x": want "image"`,
	}},
	{"field of another case", pod(`{containers: [{Name: a}]}`), []string{
		`f.yaml, document 0, spec.containers[0].Name: unknown field with value "a": want "name"`,
	}},
	{"unknown top field", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\nxyzzy: [1, 2]\n", []string{
		"f.yaml, document 0, xyzzy: unknown field with value [1,2]: want one of apiVersion, binaryData, data, immutable, kind, metadata",
	}},
	{"duplicate key", "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers:\n  - name: a\n    image: x\n    image: y\n", []string{
		`f.yaml, document 0, spec.containers[0].image: key appears on line 7 and again, with value "y", on line 8: want it once`,
	}},
	{"number where a text belongs", pod(`{containers: [{name: a, args: [8080]}]}`), []string{
		"f.yaml, document 0, spec.containers[0].args[0]: 8080: want a text (put it in quotes if it looks like something else)",
	}},
	{"text where a number belongs", pod(`{containers: [{name: a, ports: [{containerPort: "80"}]}]}`), []string{
		`f.yaml, document 0, spec.containers[0].ports[0].containerPort: "80": want a whole number, without quotes`,
	}},
	{"yes where a text belongs", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {on: yes}\n", []string{
		"f.yaml, document 0, data[true]: true: want a text (put it in quotes if it looks like something else)",
	}},
	{"object where a list belongs", pod(`{containers: {name: a}}`), []string{
		`f.yaml, document 0, spec.containers: {"name":"a"}: want a list`,
	}},
	{"bad quantity", pod(`{containers: [{name: a, resources: {requests: {cpu: many}}}]}`), []string{
		`f.yaml, document 0, spec.containers[0].resources.requests[cpu]: "many": want a quantity such as 500m or 1Gi`,
	}},
	{"bad base64", "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\ndata: {k: '!'}\n", []string{
		`f.yaml, document 0, data[k]: "!": want a text in base64`,
	}},
	{"missing name", "apiVersion: v1\nkind: ConfigMap\nmetadata: {}\n", []string{
		"f.yaml, document 0, metadata.name: missing: want the name of the ConfigMap",
	}},
	{"bad name", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: A_b}\n", []string{
		`f.yaml, document 0, metadata.name: "A_b": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')`,
	}},
	{"missing kind", "apiVersion: v1\nmetadata: {name: a}\n", []string{
		"f.yaml, document 0, kind: missing: want a kind such as Pod",
	}},
	{"misspelled kind", "apiVersion: v1\nkind: Pood\nmetadata: {name: a}\n", []string{
		`f.yaml, document 0, kind: "Pood": want "Pod", or another kind of v1`,
	}},
	{"kind of another version", "apiVersion: v1\nkind: NetworkPolicy\nmetadata: {name: a}\n", []string{
		`f.yaml, document 0, apiVersion: "v1": want "networking.k8s.io/v1" for a NetworkPolicy`,
	}},
	{"kind that is not supported", "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {name: a}\n", []string{
		`f.yaml, document 0, kind: "StatefulSet": is not supported: use a Deployment or Pods`,
	}},
	{"misspelled group", "apiVersion: networking.k8s.oi/v1\nkind: NetworkPolicy\nmetadata: {name: a}\n", []string{
		`f.yaml, document 0, apiVersion: "networking.k8s.oi/v1": want the group "networking.k8s.io", or one that does not look like it`,
	}},
	{"unknown group without a dot", "apiVersion: foo/v1\nkind: Bar\nmetadata: {name: a}\n", []string{
		`f.yaml, document 0, apiVersion: "foo/v1": want an API group of Kubernetes, or a custom one with a dot in its name`,
	}},
	{"custom object without a name", "apiVersion: example.com/v1\nkind: Bar\n", []string{
		"f.yaml, document 0, metadata.name: missing: want the name of the object",
	}},
	{"bad label", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, labels: {app: 'a b'}}\n", []string{
		`f.yaml, document 0, metadata.labels[app]: "a b": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')`,
	}},
	{"namespace of a node", "apiVersion: v1\nkind: Node\nmetadata: {name: a, namespace: b}\n", []string{
		`f.yaml, document 0, metadata.namespace: "b": a Node is in no namespace: want no such field`,
	}},
	{"no containers", pod(`{nodeName: node1}`), []string{
		"f.yaml, document 0, spec.containers: missing: want at least one container",
	}},
	{"hostPort", pod(`{containers: [{name: web, ports: [{containerPort: 80, hostPort: 8080}]}]}`), []string{
		`f.yaml, document 0, spec.containers[0].ports[0].hostPort: 8080 in container "web": hostPort is not supported; use a Service of type NodePort or hostNetwork`,
	}},
	{"port out of range", pod(`{containers: [{name: a, ports: [{containerPort: 70000}]}]}`), []string{
		"f.yaml, document 0, spec.containers[0].ports[0].containerPort: 70000: want a port from 1 to 65535",
	}},
	{"bad protocol", pod(`{containers: [{name: a, ports: [{containerPort: 7, protocol: tcp}]}]}`), []string{
		`f.yaml, document 0, spec.containers[0].ports[0].protocol: "tcp": want one of TCP, UDP, SCTP`,
	}},
	{"two containers of one name", pod(`{containers: [{name: a}, {name: a}]}`), []string{
		`f.yaml, document 0, spec.containers[1].name: "a": want each name once`,
	}},
	{"bad pod IP", pod(`{containers: [{name: a}]}` + "\nstatus: {podIPs: [{ip: 10.0.0.300}]}"), []string{
		`f.yaml, document 0, status.podIPs[0].ip: "10.0.0.300": want an IPv4 or IPv6 address`,
	}},
	{"bad phase", pod(`{containers: [{name: a}]}` + "\nstatus: {phase: running}"), []string{
		`f.yaml, document 0, status.phase: "running": want one of Pending, Running, Succeeded, Failed, Unknown`,
	}},
	{"selector does not match template", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec: {selector: {matchLabels: {app: a}}, template: {metadata: {labels: {app: b}}, spec: {containers: [{name: a}]}}}\n", []string{
		`f.yaml, document 0, spec.template.metadata.labels: {"app":"b"}: want labels that spec.selector matches: app=a`,
	}},
	{"no selector", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec: {template: {spec: {containers: [{name: a}]}}}\n", []string{
		"f.yaml, document 0, spec.selector: missing: want the labels of the pods of the template",
	}},
	{"bad pod CIDR", node(`{podCIDR: 10.244.1.0}`), []string{
		`f.yaml, document 0, spec.podCIDRs[0]: "10.244.1.0": want a CIDR such as 10.0.0.0/8 or fd00::/8`,
	}},
	{"pod CIDR with host bits", node(`{podCIDRs: [10.244.1.7/24]}`), []string{
		`f.yaml, document 0, spec.podCIDRs[0]: "10.244.1.7/24": want a CIDR without bits behind its length: 10.244.1.0/24`,
	}},
	{"two pod CIDRs of one family", node(`{podCIDRs: [10.244.1.0/24, 10.244.2.0/24]}`), []string{
		`f.yaml, document 0, spec.podCIDRs[1]: "10.244.2.0/24": want at most one for IPv4 and one for IPv6`,
	}},
	{"service without ports", service(`{selector: {app: a}}`), []string{
		"f.yaml, document 0, spec.ports: missing: want at least one port",
	}},
	{"bad service port", service(`{ports: [{port: 0}]}`), []string{
		"f.yaml, document 0, spec.ports[0].port: 0: want a port from 1 to 65535",
	}},
	{"ports without names", service(`{ports: [{port: 80}, {port: 81, name: b}]}`), []string{
		"f.yaml, document 0, spec.ports[0].name: missing: want a name for each of several ports",
	}},
	{"bad cluster IP", service(`{clusterIP: ten, ports: [{port: 80}]}`), []string{
		`f.yaml, document 0, spec.clusterIPs[0]: "ten": want an IPv4 or IPv6 address`,
	}},
	{"bad address of a load balancer", service(`{type: LoadBalancer, ports: [{port: 80}]}`) + "status: {loadBalancer: {ingress: [{ip: ten, ipMode: Way}]}}\n", []string{
		`f.yaml, document 0, status.loadBalancer.ingress[0].ip: "ten": want an IPv4 or IPv6 address`,
		`f.yaml, document 0, status.loadBalancer.ingress[0].ipMode: "Way": want one of VIP, Proxy`,
	}},
	{"nodePort of a ClusterIP service", service(`{ports: [{port: 80, nodePort: 30000}]}`), []string{
		"f.yaml, document 0, spec.ports[0].nodePort: 30000: want no nodePort in a Service of type ClusterIP",
	}},
	{"bad target port", service(`{ports: [{port: 80, targetPort: "Web Port"}]}`), []string{
		`f.yaml, document 0, spec.ports[0].targetPort: "Web Port": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)`,
	}},
	{"endpoint of the other family", "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a}\naddressType: IPv4\nendpoints: [{addresses: ['fd00::1']}]\n", []string{
		`f.yaml, document 0, endpoints[0].addresses[0]: "fd00::1": want an IPv4 address, as addressType says`,
	}},
	{"bad selector operator", policy(`{podSelector: {matchExpressions: [{key: app, operator: Is, values: [a]}]}}`), []string{
		`f.yaml, document 0, spec.podSelector.matchExpressions[0].operator: "Is": want In, NotIn, Exists or DoesNotExist`,
	}},
	{"selector operator without values", policy(`{podSelector: {matchExpressions: [{key: app, operator: In}]}}`), []string{
		"f.yaml, document 0, spec.podSelector.matchExpressions[0].values: missing: want at least one value for operator In",
	}},
	{"bad selector value", policy(`{podSelector: {matchLabels: {app: "-a"}}}`), []string{
		`f.yaml, document 0, spec.podSelector.matchLabels[app]: "-a": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')`,
	}},
	{"bad CIDR", policy(`{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/33}}]}]}`), []string{
		`f.yaml, document 0, spec.ingress[0].from[0].ipBlock.cidr: "10.0.0.0/33": want a CIDR such as 10.0.0.0/8 or fd00::/8`,
	}},
	{"exception outside", policy(`{podSelector: {}, egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/16]}}]}]}`), []string{
		`f.yaml, document 0, spec.egress[0].to[0].ipBlock.except[0]: "11.0.0.0/16": want a CIDR strictly inside of 10.0.0.0/8`,
	}},
	{"empty peer", policy(`{podSelector: {}, ingress: [{from: [{}]}]}`), []string{
		"f.yaml, document 0, spec.ingress[0].from[0]: missing: want ipBlock, podSelector or namespaceSelector",
	}},
	{"port range the wrong way round", policy(`{podSelector: {}, ingress: [{ports: [{port: 90, endPort: 80}]}]}`), []string{
		"f.yaml, document 0, spec.ingress[0].ports[0].endPort: 80: want no less than port, 90",
	}},
	{"misspelled policy type", policy(`{podSelector: {}, policyTypes: [ingress]}`), []string{
		`f.yaml, document 0, spec.policyTypes[0]: "ingress": want one of Ingress, Egress`,
	}},
	{"cluster policy without a priority", clusterPolicy(`{tier: Admin, subject: {namespaces: {}}}`), []string{
		"f.yaml, document 0, spec.priority: missing: want 0 to 1000; less is evaluated earlier",
	}},
	{"priority out of range", clusterPolicy(`{tier: Admin, priority: 1001, subject: {namespaces: {}}}`), []string{
		"f.yaml, document 0, spec.priority: 1001: want 0 to 1000",
	}},
	{"misspelled tier", clusterPolicy(`{tier: admin, priority: 1, subject: {namespaces: {}}}`), []string{
		`f.yaml, document 0, spec.tier: "admin": want one of Admin, Baseline`,
	}},
	{"no tier", clusterPolicy(`{priority: 1, subject: {namespaces: {}}}`), []string{
		`f.yaml, document 0, spec.tier: "": want one of Admin, Baseline`,
	}},
	{"no subject", clusterPolicy(`{tier: Baseline, priority: 1, subject: {}}`), []string{
		"f.yaml, document 0, spec.subject: missing: want namespaces or pods",
	}},
	{"two subjects", clusterPolicy(`{tier: Baseline, priority: 1, subject: {namespaces: {}, pods: {podSelector: {}}}}`), []string{
		"f.yaml, document 0, spec.subject: has namespaces and pods: want exactly one of namespaces or pods",
	}},
	{"subject without podSelector", clusterPolicy(`{tier: Baseline, priority: 1, subject: {pods: {namespaceSelector: {}}}}`), []string{
		"f.yaml, document 0, spec.subject.pods.podSelector: missing: want a selector; {} selects every pod",
	}},
	{"unknown field of a cluster policy", clusterPolicy(`{tier: Admin, priority: 1, subject: {namespaces: {}}, ingres: []}`), []string{
		`f.yaml, document 0, spec.ingres: unknown field with value []: want "ingress"`,
	}},
	{"bad selector of a cluster policy", clusterPolicy(`{tier: Admin, priority: 1, subject: {namespaces: {matchExpressions: [{key: a, operator: Equals}]}}}`), []string{
		`f.yaml, document 0, spec.subject.namespaces.matchExpressions[0].operator: "Equals": want In, NotIn, Exists or DoesNotExist`,
	}},
	{"misspelled action", clusterEgress(`{action: Allow, to: [{namespaces: {}}]}`), []string{
		`f.yaml, document 0, spec.egress[0].action: "Allow": want one of Accept, Deny, Pass`,
	}},
	{"rule without peers", clusterEgress(`{action: Deny, to: []}`), []string{
		"f.yaml, document 0, spec.egress[0].to: missing: want at least one peer",
	}},
	{"empty peer of a cluster policy", clusterEgress(`{action: Deny, to: [{}]}`), []string{
		"f.yaml, document 0, spec.egress[0].to[0]: missing: want namespaces, pods, nodes, networks or domainNames",
	}},
	{"networks of ingress", clusterPolicy(`{tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{networks: [10.0.0.0/8]}]}]}`), []string{
		`f.yaml, document 0, spec.ingress[0].from[0].networks: unknown field with value ["10.0.0.0/8"]: want one of namespaces, pods`,
	}},
	{"network with host bits", clusterEgress(`{action: Deny, to: [{networks: [10.0.0.1/8, 10.0.0.1/8]}]}`), []string{
		`f.yaml, document 0, spec.egress[0].to[0].networks[0]: "10.0.0.1/8": want a CIDR without bits behind its length: 10.0.0.0/8`,
		`f.yaml, document 0, spec.egress[0].to[0].networks[1]: "10.0.0.1/8": want a CIDR without bits behind its length: 10.0.0.0/8`,
		`f.yaml, document 0, spec.egress[0].to[0].networks[1]: "10.0.0.1/8": want each name once`,
	}},
	{"domain names of a deny", clusterEgress(`{action: Deny, to: [{domainNames: [example]}]}`), []string{
		`f.yaml, document 0, spec.egress[0].to[0].domainNames: in a rule with action "Deny": want action Accept, or other peers`,
		`f.yaml, document 0, spec.egress[0].to[0].domainNames[0]: "example": want a domain name such as example.com or *.example.com`,
	}},
	{"named port of a network", clusterEgress(`{action: Deny, to: [{networks: [10.0.0.0/8]}], protocols: [{destinationNamedPort: http}]}`), []string{
		`f.yaml, document 0, spec.egress[0].to[0]: has no named ports, and the rule names "http": want pods or namespaces, or ports by number`,
	}},
	{"port and range", clusterEgress(`{action: Deny, to: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 80, range: {start: 90, end: 80}}}}]}`), []string{
		"f.yaml, document 0, spec.egress[0].protocols[0].tcp.destinationPort: has number and range: want exactly one of number or range",
		"f.yaml, document 0, spec.egress[0].protocols[0].tcp.destinationPort.range.end: 80: want more than start, 90",
	}},
	{"protocol without a port", clusterEgress(`{action: Deny, to: [{namespaces: {}}], protocols: [{udp: {}}, {}, {tcp: {destinationPort: {number: 70000}}}]}`), []string{
		"f.yaml, document 0, spec.egress[0].protocols[0].udp.destinationPort: missing: want a number or a range",
		"f.yaml, document 0, spec.egress[0].protocols[1]: missing: want tcp, udp, sctp or destinationNamedPort",
		"f.yaml, document 0, spec.egress[0].protocols[2].tcp.destinationPort.number: 70000: want a port from 1 to 65535",
	}},
	{"older cluster policy", "apiVersion: policy.networking.k8s.io/v1alpha1\nkind: AdminNetworkPolicy\nmetadata: {name: a}\n", []string{
		`f.yaml, document 0, kind: "AdminNetworkPolicy": is not supported: use a ClusterNetworkPolicy of policy.networking.k8s.io/v1beta1`,
	}},
	{"older version of a cluster policy", "apiVersion: policy.networking.k8s.io/v1alpha1\nkind: ClusterNetworkPolicy\nmetadata: {name: a}\n", []string{
		`f.yaml, document 0, apiVersion: "policy.networking.k8s.io/v1alpha1": want "policy.networking.k8s.io/v1beta1" for a ClusterNetworkPolicy`,
	}},
	{"namespace of a cluster policy", "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: a, namespace: b}\nspec: {tier: Admin, priority: 0, subject: {namespaces: {}}}\n", []string{
		`f.yaml, document 0, metadata.namespace: "b": a ClusterNetworkPolicy is in no namespace: want no such field`,
	}},
	{"not YAML", "a: [1\nb: 2\n", []string{
		"f.yaml, document 0: line 1: did not find expected ',' or ']': want YAML",
	}},
	{"not an object", "- a\n- b\n", []string{
		`f.yaml, document 0: ["a","b"]: want a Kubernetes object with apiVersion, kind and metadata`,
	}},
	{"same object twice", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: default}\n", []string{
		"f.yaml, document 1, metadata.name: ConfigMap default/a is already defined in f.yaml, document 0: want each object once",
	}},
}

func TestWrongManifests(t *testing.T) {
	for _, c := range wrong {
		t.Run(c.name, func(t *testing.T) {
			_, errs := Decode("f.yaml", []byte(c.text))
			var got []string
			for _, e := range errs {
				got = append(got, Format(e))
			}
			if len(errs) == 0 {
				t.Fatal("accepted")
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("messages (-want +got):\n%s", d)
			}
		})
	}
}
