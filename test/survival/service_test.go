// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weft-mesh/weft/test/testlab"
)

const (
	webIP  = "10.96.1.1" // of shop/web
	talkIP = "10.96.1.2" // of shop/talk
	// farPort is of every node; its only server is on the second.
	farPort = "30090"
)

// shop is examples/services with known cluster IPs and hasty probes.
func shop(t *testing.T) string {
	t.Helper()
	var all []string
	for _, name := range []string{"10-namespace", "20-web", "30-talk", "40-client"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "examples", "services", name+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, string(text))
	}
	return strings.NewReplacer(
		"periodSeconds: 5", "periodSeconds: 1",
		"name: web\n  namespace: shop\nspec:\n  ipFamilyPolicy", "name: web\n  namespace: shop\nspec:\n  clusterIP: "+webIP+"\n  ipFamilyPolicy",
		"type: NodePort\n  ipFamilyPolicy: PreferDualStack\n  selector:\n    app: talk", "type: NodePort\n  clusterIP: "+talkIP+"\n  ipFamilyPolicy: PreferDualStack\n  selector:\n    app: talk",
	).Replace(strings.Join(all, "---\n"))
}

// far is a server of the second node and its port of every node.
const far = `---
apiVersion: v1
kind: Pod
metadata: {name: far, namespace: shop, labels: {app: far}}
spec:
  nodeName: node2
  containers: [{name: server, command: [weft, serve, http, --port, "8080"]}]
---
apiVersion: v1
kind: Service
metadata: {name: far, namespace: shop}
spec:
  type: NodePort
  selector: {app: far}
  ports: [{port: 80, targetPort: 8080, nodePort: ` + farPort + `}]
`

// webReplicas is a text of shop with another number of web servers.
func webReplicas(text string, n int) string {
	return strings.Replace(text, "replicas: 3", fmt.Sprintf("replicas: %d", n), 1)
}

// requests are made by a pod ("NS/POD"), or outside, so many each second, each on a
// connection of its own.
func requests(t *testing.T, l *testlab.Lab, name, from, rate, url string) *load {
	t.Helper()
	return client(t, l, name, from, "weft", "get", "--quiet", "--servers", "--count", "0", "--rate", rate, url)
}

// talks are what one client says to weft serve talk, until it is stopped.
func talks(t *testing.T, l *testlab.Lab, name, from string, args ...string) *load {
	t.Helper()
	return client(t, l, name, from, append([]string{"weft", "talk", "--count", "0", "--interval", "50ms", "--timeout", "500ms"}, args...)...)
}

func client(t *testing.T, l *testlab.Lab, name, from string, argv ...string) *load {
	t.Helper()
	x := &load{name: name}
	if strings.Contains(from, "/") {
		x.run(t, l, testlab.InPod(from, argv...))
	} else {
		x.run(t, l, testlab.OnNode(from, argv...))
	}
	return x
}

// answered waits until a URL, asked by a pod or outside, is answered.
func answered(t *testing.T, l *testlab.Lab, from, url string) {
	t.Helper()
	await(t, waitTime, func() error {
		argv := []string{"weft", "get", "--quiet", "--timeout", "1s", url}
		args := testlab.OnNode(from, argv...)
		if strings.Contains(from, "/") {
			args = testlab.InPod(from, argv...)
		}
		_, err := l.Weft(t.Context(), args...)
		return err
	})
}

// TestServiceRollingUpdate: all servers of a Service are replaced while pods and
// clients outside ask them. Not one request fails.
func TestServiceRollingUpdate(t *testing.T) {
	l := testlab.New(t)
	text := shop(t)
	l.Up(t, text)
	answered(t, l, "shop/client", "http://"+webIP+"/")
	answered(t, l, "outside", "http://172.30.0.1:30080/")
	loads := []*load{
		requests(t, l, "cluster IP", "shop/client", "500", "http://"+webIP+"/"),
		requests(t, l, "outside", "outside", "100", "http://172.30.0.1:30080/"),
	}
	const image = "          image: weft\n          command: [weft, serve, http"
	updated := strings.Replace(text, image, "          env: [{name: VERSION, value: \"2\"}]\n"+image, 1)
	if updated == text {
		t.Fatal("examples/services has no web server to change")
	}
	l.Must(t, "lab", "apply", "-f", write(t, updated))
	for _, x := range loads {
		x.stop(t)
		if names := strings.Count(x.out.String(), "web-"); names < 6 {
			t.Errorf("%s: only %d servers answered, want three and the three that replace them", x.name, names)
		}
	}
}

// TestServiceAgentKill: agents are killed and come back, and servers come and go,
// while pods and clients outside ask through Services. Not one request fails, also
// not one that begins while there is no agent.
func TestServiceAgentKill(t *testing.T) {
	for _, external := range []string{"snat", "dsr"} {
		t.Run(external, func(t *testing.T) {
			l := testlab.New(t)
			text := shop(t) + far
			l.Up(t, text, "--agent-config", write(t, "services: {external: "+external+"}\n"))
			if st := l.Must(t, testlab.OnNode("node1", "weft", "status")...); !strings.Contains(st, external+" to other nodes") {
				t.Errorf("want %s to other nodes: %s", external, st)
			}
			serviceAgentKill(t, l, text)
		})
	}
}

func serviceAgentKill(t *testing.T, l *testlab.Lab, text string) {
	urls := map[string]string{"node1": "http://172.30.0.1:" + farPort + "/", "node2": "http://172.30.0.2:" + farPort + "/"}
	answered(t, l, "shop/client", "http://"+webIP+"/")
	for _, url := range urls {
		answered(t, l, "outside", url)
	}
	loads := []*load{
		requests(t, l, "cluster IP", "shop/client", "200", "http://"+webIP+"/"),
		requests(t, l, "outside, servers of all nodes", "outside", "100", "http://172.30.0.1:30080/"),
		requests(t, l, "outside, server of the other node", "outside", "50", urls["node1"]),
		requests(t, l, "outside, server of the node", "outside", "50", urls["node2"]),
		talks(t, l, "UDP", "shop/client", "-q", talkIP+":7/udp"),
		talks(t, l, "UDP, new sockets", "shop/client", "-q", "--each", talkIP+":7/udp"),
		talks(t, l, "UDP, outside", "outside", "-q", "172.30.0.1:30007/udp"),
		talks(t, l, "TCP, outside", "outside", "-q", "172.30.0.2:30007"),
	}
	files := []string{write(t, webReplicas(text, 5)), write(t, text)}
	for i := range 5 {
		for _, node := range []string{"node1", "node2"} {
			l.Must(t, "lab", "agent", "kill", node)
			l.Must(t, testlab.OnNode("outside", "weft", "get", "--quiet", "--count", "5", "--timeout", "900ms", urls[node])...)
			l.Must(t, "lab", "agent", "start", node)
			l.Must(t, testlab.OnNode("outside", "weft", "get", "--quiet", "--count", "5", "--timeout", "900ms", urls[node])...)
		}
		if i < 4 {
			l.Must(t, "lab", "apply", "-f", files[i%2])
		}
	}
	for _, x := range loads {
		x.stop(t)
	}
}
