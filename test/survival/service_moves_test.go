// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/test/testlab"
)

const (
	saysIP   = "10.96.1.1" // of the Service says, of all talkers
	saysPort = "30041"     // the same, from outside
)

// talker is a pod that answers lines and datagrams, and once told to end goes on
// for some seconds before its process is told.
func talker(name, node string, seconds int) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: talker}}
spec:
  nodeName: %s
  terminationGracePeriodSeconds: %d
  containers:
    - name: server
      command: [weft, serve, talk, --port, "7"]
      readinessProbe: {tcpSocket: {port: 7}, periodSeconds: 1}
      lifecycle: {preStop: {sleep: {seconds: %d}}}
`, name, node, seconds+3, seconds)
}

// says is the Service of the talkers, with more lines of spec.
func says(more string) string {
	return `---
apiVersion: v1
kind: Service
metadata: {name: says}
spec:
  type: NodePort
  clusterIP: ` + saysIP + more + `
  selector: {app: talker}
  ports:
    - {name: tcp, port: 7, nodePort: ` + saysPort + `}
    - {name: udp, port: 7, protocol: UDP, nodePort: ` + saysPort + `}
`
}

// talkLab has talkers and a client on the first node.
func talkLab(t *testing.T, manifests string) *testlab.Lab {
	t.Helper()
	l := testlab.New(t)
	l.Up(t, manifests+pod("client", "node1", "sleep, infinity"))
	await(t, waitTime, func() error {
		_, err := l.Weft(t.Context(), testlab.InPod("default/client", "weft", "talk", "--timeout", "1s", saysIP+":7")...)
		return err
	})
	return l
}

var heard = regexp.MustCompile(`(?m)^\d+ \d+ bytes in .*: (\S+) heard `)

// server is who has answered a client last, "" for nobody yet.
func (x *load) server() string {
	all := heard.FindAllStringSubmatch(x.out.String(), -1)
	if all == nil {
		return ""
	}
	return all[len(all)-1][1]
}

// begun waits until every client has an answer.
func begun(t *testing.T, clients ...*load) {
	t.Helper()
	await(t, waitTime, func() error {
		for _, x := range clients {
			if x.server() == "" {
				return fmt.Errorf("%s has no answer: %s", x.name, x.out.String())
			}
		}
		return nil
	})
}

// errorsOf is how many messages of a client have failed so far.
func errorsOf(x *load) int { return strings.Count(x.out.String(), " error after ") }

// TestOnlyAffectedSocketsAreCut: of connected UDP sockets that talk through a
// Service, those whose server goes see an error and go on with another server. The
// others do not, nor those that talk to a pod itself. A server goes by its label,
// and then nobody but the agent tells the sockets, or with its pod.
func TestOnlyAffectedSocketsAreCut(t *testing.T) {
	pods := map[string]string{}
	var all string
	for name, node := range map[string]string{"a": "node1", "b": "node2", "c": "node2", "d": "node1"} {
		pods[name] = talker(name, node, 1)
		all += pods[name]
	}
	l := talkLab(t, all+says(""))
	t.Run("relabelled", func(t *testing.T) {
		onlyAffected(t, l, func(doomed string) {
			l.Must(t, "lab", "apply", "-f", write(t, strings.Replace(pods[doomed], "app: talker", "app: other", 1)))
			delete(pods, doomed)
		})
	})
	t.Run("deleted", func(t *testing.T) {
		onlyAffected(t, l, func(doomed string) { l.Must(t, "lab", "delete", "-f", write(t, pods[doomed])) })
	})
}

// onlyAffected starts clients, lets remove take the server of some of them away,
// and looks at who has noticed.
func onlyAffected(t *testing.T, l *testlab.Lab, remove func(doomed string)) {
	var clients []*load
	for i := range 12 {
		clients = append(clients, talks(t, l, fmt.Sprintf("client %d", i), "default/client", "--reopen", saysIP+":7/udp"))
	}
	begun(t, clients...)
	doomed := clients[0].server()
	straight := straightTo(t, l)
	began := append(slices.Clone(clients), slices.Collect(maps.Values(straight))...)
	begun(t, began...)
	before := map[*load]string{}
	cut := 0
	for _, x := range clients {
		if before[x] = x.server(); before[x] == doomed {
			cut++
		}
	}
	remove(doomed)
	await(t, waitTime, func() error {
		for _, x := range clients {
			if before[x] == doomed && x.server() == doomed {
				return fmt.Errorf("%s still talks to %s, which is gone", x.name, doomed)
			}
		}
		return nil
	})
	for _, x := range clients {
		_, failed := x.end(t)
		switch {
		case before[x] == doomed && failed != "1":
			t.Errorf("%s: %s failed, want one: it talked to %s, which went", x.name, failed, doomed)
		case before[x] != doomed && (failed != "0" || x.server() != before[x]):
			t.Errorf("%s: %s failed, and %s answers, want none by %s, which stayed", x.name, failed, x.server(), before[x])
		}
	}
	t.Logf("%d of %d sockets were cut, as %s went", cut, len(clients), doomed)
	for name, x := range straight {
		if _, failed := x.end(t); failed != "0" && !(name == doomed && gone(t, l, name)) {
			t.Errorf("%s: %s failed, want none: the pod is there", x.name, failed)
		}
	}
}

// straightTo starts clients of the talkers' own addresses, by name of the talker.
func straightTo(t *testing.T, l *testlab.Lab) map[string]*load {
	t.Helper()
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	clients := map[string]*load{}
	for _, p := range st.Pods {
		if p.Name != "client" {
			clients[p.Name] = talks(t, l, "straight to "+p.Name, "default/client", "--reopen", p.IPs[0]+":7/udp")
		}
	}
	return clients
}

// gone tells whether there is no such pod any more.
func gone(t *testing.T, l *testlab.Lab, name string) bool {
	t.Helper()
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range st.Pods {
		if p.Name == name {
			return false
		}
	}
	return true
}

// datagrams is how many have come to a pod's sockets.
func datagrams(t *testing.T, l *testlab.Lab, pod string) string {
	t.Helper()
	out := l.Must(t, testlab.InPod(pod, "cat", "/proc/net/snmp")...)
	m := regexp.MustCompile(`(?m)^Udp: (\d+) `).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("no counters of UDP in %q", out)
	}
	return m[1]
}

// TestServiceDeletedUnderUDP: a Service is deleted while clients send datagrams to
// it. They get errors, and the server gets nothing any more; when the Service is
// back, they go on.
func TestServiceDeletedUnderUDP(t *testing.T) {
	l := talkLab(t, talker("a", "node2", 0)+says(""))
	clients := []*load{
		talks(t, l, "connected", "default/client", "--timeout", "300ms", "--reopen", saysIP+":7/udp"),
		talks(t, l, "unconnected", "default/client", "--timeout", "300ms", "--reopen", "--unconnected", saysIP+":7/udp"),
		talks(t, l, "unconnected, one socket", "default/client", "--timeout", "300ms", "--unconnected", saysIP+":7/udp"),
		talks(t, l, "outside, other node", "outside", "--timeout", "300ms", "--reopen", "172.30.0.1:"+saysPort+"/udp"),
		talks(t, l, "outside", "outside", "--timeout", "300ms", "--reopen", "172.30.0.2:"+saysPort+"/udp"),
		talks(t, l, "outside, unconnected", "outside", "--timeout", "300ms", "--unconnected", "172.30.0.1:"+saysPort+"/udp"),
	}
	begun(t, clients...)
	file := write(t, says(""))
	for round := range 2 {
		l.Must(t, "lab", "delete", "-f", file)
		before := datagrams(t, l, "default/a")
		failed := map[*load]int{}
		for _, x := range clients {
			failed[x] = errorsOf(x)
		}
		await(t, waitTime, func() error {
			for _, x := range clients {
				if n := errorsOf(x) - failed[x]; n < 3 {
					return fmt.Errorf("%s: %d messages failed without the Service, want three", x.name, n)
				}
			}
			return nil
		})
		if after := datagrams(t, l, "default/a"); after != before {
			t.Errorf("round %d: the server got datagrams of a Service that is gone: %s before, %s after", round, before, after)
		}
		answers := map[*load]int{}
		for _, x := range clients {
			answers[x] = len(heard.FindAllString(x.out.String(), -1))
		}
		l.Must(t, "lab", "apply", "-f", file)
		await(t, waitTime, func() error {
			for _, x := range clients {
				if len(heard.FindAllString(x.out.String(), -1)) < answers[x]+3 {
					return fmt.Errorf("%s does not go on: %s", x.name, ends(x.out.String()))
				}
			}
			return nil
		})
	}
	for _, x := range clients {
		x.end(t)
	}
}

// held is a client outside that talks to one server, whichever others there are.
func held(t *testing.T, l *testlab.Lab, to, server string) *load {
	t.Helper()
	for {
		x := talks(t, l, "outside, held to "+server+" by "+to, "outside", to)
		if begun(t, x); x.server() == server {
			return x
		}
		x.stop(t)
	}
}

// TestTrafficPolicySwitch: externalTrafficPolicy goes to Local and back while
// clients outside ask. With a server on each node, nothing fails.
func TestTrafficPolicySwitch(t *testing.T) {
	l := talkLab(t, talker("a", "node1", 0)+talker("b", "node2", 0)+says(""))
	var loads []*load
	for _, to := range []string{"172.30.0.1:" + saysPort, "172.30.0.2:" + saysPort} {
		for range 4 {
			loads = append(loads, client(t, l, "new connections to "+to, "outside", "weft", "talk", "-q", "--each", "--count", "0", "--interval", "10ms", to))
		}
		loads = append(loads, talks(t, l, "new sockets to "+to, "outside", "-q", "--each", to+"/udp"))
		for _, server := range []string{"a", "b"} {
			loads = append(loads, held(t, l, to, server), held(t, l, to+"/udp", server))
		}
	}
	files := []string{write(t, says("\n  externalTrafficPolicy: Local")), write(t, says("\n  externalTrafficPolicy: Cluster"))}
	for i := range 12 {
		l.Must(t, "lab", "apply", "-f", files[i%2])
		if out := l.Must(t, testlab.OnNode("outside", "weft", "talk", "-q", "--each", "--count", "30", "172.30.0.1:"+saysPort)...); strings.Contains(out, "b ") == (i%2 == 0) {
			t.Errorf("after switch %d node1 is answered by %s", i, out)
		}
	}
	for _, x := range loads {
		x.stop(t)
	}
}

// TestTerminatingDrains: a pod that ends gets no new connections where another one
// is ready, and what it has goes on until it is killed.
func TestTerminatingDrains(t *testing.T) {
	pods := map[string]string{"a": talker("a", "node1", 3), "b": talker("b", "node2", 3)}
	l := talkLab(t, pods["a"]+pods["b"]+says(""))
	inside := talks(t, l, "inside", "default/client", saysIP+":7")
	begun(t, inside)
	doomed := inside.server()
	other := map[string]string{"a": "b", "b": "a"}[doomed]
	outside := held(t, l, "172.30.0.1:"+saysPort, doomed)
	began := time.Now()
	deleted := make(chan error, 1)
	go func() {
		_, err := l.Weft(context.Background(), "lab", "delete", "-f", write(t, pods[doomed]))
		deleted <- err
	}()
	await(t, waitTime, func() error {
		out, err := l.Weft(t.Context(), testlab.OnNode("node1", "weft", "service", "show", "default/says")...)
		if err == nil && !strings.Contains(out, "terminating") {
			err = fmt.Errorf("%s is not terminating: %s", doomed, out)
		}
		return err
	})
	noticed := time.Since(began)
	for _, args := range [][]string{
		testlab.InPod("default/client", "weft", "talk", "-q", "--each", "--count", "100", saysIP+":7"),
		testlab.InPod("default/client", "weft", "talk", "-q", "--each", "--count", "100", saysIP+":7/udp"),
		testlab.OnNode("outside", "weft", "talk", "-q", "--each", "--count", "100", "172.30.0.2:"+saysPort),
		testlab.OnNode("outside", "weft", "talk", "-q", "--each", "--count", "100", "172.30.0.1:"+saysPort),
	} {
		if out := l.Must(t, args...); !strings.Contains(out, "answered by "+other+" 100\n") {
			t.Errorf("while %s ends: %s", doomed, out)
		}
	}
	for _, x := range []*load{inside, outside} {
		drained(t, x, doomed, began)
	}
	if err := <-deleted; err != nil {
		t.Error(err)
	}
	t.Logf("terminating was in force after %v", noticed)
}

// drained wants a connection to have gone on, without an error, until the grace
// period of its server was over.
func drained(t *testing.T, x *load, server string, began time.Time) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- x.cmd.Wait() }()
	select {
	case err := <-done:
		if _, cut := err.(*exec.ExitError); !cut {
			t.Errorf("%s: want the connection to end with its server: %v", x.name, err)
		}
	case <-time.After(waitTime):
		t.Fatalf("%s: still connected: %s", x.name, ends(x.out.String()))
	}
	took := time.Since(began)
	t.Logf("%s: connected for %v after the delete; %s", x.name, took, ends(x.out.String()))
	const grace = 6 * time.Second
	if n := errorsOf(x); n != 1 || x.server() != server || took < grace-time.Second {
		t.Errorf("%s: %d errors, %s answered, ended after %v; want one by %s at the end of %v", x.name, n, x.server(), took, server, grace)
	}
}

// TestAffinitySurvivesRestart: clients keep their server while agents die, stop,
// and come back.
func TestAffinitySurvivesRestart(t *testing.T) {
	const sticky = "\n  sessionAffinity: ClientIP"
	l := talkLab(t, talker("a", "node1", 0)+talker("b", "node2", 0)+talker("c", "node2", 0)+talker("d", "node1", 0)+says(sticky))
	asks := map[string][]string{}
	for _, proto := range []string{"", "/udp"} {
		asks["inside"+proto] = testlab.InPod("default/client", "weft", "talk", "-q", "--each", "--count", "20", saysIP+":7"+proto)
		for node := 1; node <= 2; node++ {
			n := strconv.Itoa(node)
			asks["outside, node"+n+proto] = testlab.OnNode("outside", "weft", "talk", "-q", "--each", "--count", "20", "172.30.0."+n+":"+saysPort+proto)
		}
	}
	servers := map[string]string{}
	ask := func(when string) {
		for name, args := range asks {
			_, by, _ := strings.Cut(strings.TrimSpace(l.Must(t, args...)), "answered by ")
			if servers[name] == "" && strings.HasSuffix(by, " 20") {
				servers[name] = by
			}
			if by != servers[name] {
				t.Errorf("%s, %s: answered by %s, before by %q", name, when, by, servers[name])
			}
		}
	}
	ask("at first")
	for i := range 2 {
		for _, node := range []string{"node1", "node2"} {
			l.Must(t, "lab", "agent", "kill", node)
		}
		ask(fmt.Sprintf("without agents %d", i))
		for _, node := range []string{"node1", "node2"} {
			l.Must(t, "lab", "agent", "start", node)
			l.Must(t, "lab", "agent", "restart", node)
		}
		ask(fmt.Sprintf("after restart %d", i))
	}
	t.Logf("servers: %v", servers)
}
