// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weft-mesh/weft/test/testlab"
)

const (
	kills = 10 // of the agent of each node
	// connections of each of the four loads.
	connections = 50
)

// load is a `weft get` or `weft talk` that goes on until it is told to stop.
type load struct {
	name string
	cmd  *exec.Cmd
	out  output
}

// output is what a command has printed so far.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// startLoad asks a server from a pod, on connections that are kept.
func startLoad(t *testing.T, l *testlab.Lab, name, from, url string) *load {
	t.Helper()
	x := &load{name: name}
	x.start(t, l, from, "--keepalive", "--concurrency", strconv.Itoa(connections), "--count", "0", "--interval", "20ms", url)
	return x
}

func (x *load) start(t *testing.T, l *testlab.Lab, from string, args ...string) {
	t.Helper()
	x.run(t, l, testlab.InPod(from, append([]string{"weft", "get", "--quiet"}, args...)...))
}

// run starts weft with these arguments.
func (x *load) run(t *testing.T, l *testlab.Lab, args []string) {
	t.Helper()
	x.cmd = l.Command(context.Background(), args...)
	x.cmd.Stdout, x.cmd.Stderr = &x.out, &x.out
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = x.cmd.Process.Kill() })
}

var summary = regexp.MustCompile(`(\d+) (?:requests|messages), (\d+) failed`)

// stop ends the load; every one of its requests must have been answered.
func (x *load) stop(t *testing.T) {
	t.Helper()
	total, failed := x.end(t)
	if total == "0" || failed != "0" {
		t.Errorf("%s: want requests, and none that failed", x.name)
	}
}

// refused ends the load; not one of its requests may have been answered.
func (x *load) refused(t *testing.T) {
	t.Helper()
	if total, failed := x.end(t); total == "0" || failed != total {
		t.Errorf("%s: want requests, and each to fail", x.name)
	}
}

// end interrupts the load and returns how many requests it made and how many of
// them failed.
func (x *load) end(t *testing.T) (total, failed string) {
	t.Helper()
	if err := x.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Errorf("%s: stop: %v", x.name, err)
	}
	err := x.cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Errorf("%s: %v", x.name, err)
	}
	text := strings.TrimSpace(x.out.String())
	t.Logf("%s: %s", x.name, ends(text))
	m := summary.FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("%s: no summary", x.name)
	}
	return m[1], m[2]
}

// ends is the beginning and the end of what may be long.
func ends(text string) string {
	const some = 200
	if len(text) <= 2*some {
		return text
	}
	return text[:some] + " … " + text[len(text)-some:]
}

// tcp reads counters of TCP in the network of a pod.
func tcp(t *testing.T, l *testlab.Lab, pod string) map[string]string {
	t.Helper()
	out := l.Must(t, testlab.InPod(pod, "cat", "/proc/net/snmp")...)
	var rows [][]string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "Tcp:") {
			rows = append(rows, strings.Fields(line))
		}
	}
	counters := map[string]string{}
	for i, name := range rows[0] {
		switch name {
		case "ActiveOpens", "PassiveOpens", "AttemptFails", "EstabResets", "CurrEstab", "OutRsts":
			counters[name] = rows[1][i]
		}
	}
	return counters
}

// links are those of a node's programs: "DEVICE HOOK PROGRAM" and the link's id.
func links(t *testing.T, l *testlab.Lab, node string) map[string]uint32 {
	t.Helper()
	out := map[string]uint32{}
	await(t, waitTime, func() error {
		st, err := l.Agent(t.Context(), node)
		if err != nil {
			return err
		}
		for _, p := range st.Programs {
			out[p.Device+" "+p.Attach+" "+p.Name] = p.LinkID
		}
		for _, p := range st.Pods {
			for _, program := range []string{" tcx ingress from_pod", " tcx egress to_pod"} {
				if _, ok := out[p.Interface+program]; !ok {
					return fmt.Errorf("%s has no link %q, of %s: %v", node, p.Interface+program, p.Name, out)
				}
			}
		}
		return nil
	})
	return out
}

// view is what must be the same after the agents were killed.
type view struct {
	Pods  map[string]string            // table of pods by node
	Links map[string]map[string]uint32 // by node
	TCP   map[string]map[string]string // counters by pod
}

func look(t *testing.T, l *testlab.Lab) view {
	t.Helper()
	v := view{Pods: map[string]string{}, Links: map[string]map[string]uint32{}, TCP: map[string]map[string]string{}}
	for _, node := range []string{"node1", "node2"} {
		v.Pods[node] = l.Must(t, testlab.OnNode(node, "weft", "table", "list", "pod", "-o", "json")...)
		v.Links[node] = links(t, l, node)
	}
	for _, pod := range []string{"client1", "client2", "server1", "server2"} {
		v.TCP[pod] = tcp(t, l, "default/"+pod)
	}
	return v
}

// TestKillUnderLoad: 200 connections with requests all the time, while the agent
// of each node is killed and started ten times. Not one request fails, no
// connection is opened anew or reset, no packet is dropped, no program is taken
// off its device, and the pods are the same as before.
func TestKillUnderLoad(t *testing.T) {
	for _, tunnel := range []string{"none", "vxlan"} {
		t.Run(tunnel, func(t *testing.T) {
			l := testlab.New(t)
			server := `weft, serve, http, --port, "8080"`
			l.Up(t, pod("client1", "node1", "sleep, infinity")+pod("client2", "node2", "sleep, infinity")+
				pod("server1", "node1", server)+pod("server2", "node2", server), "--tunnel", tunnel)
			killUnderLoad(t, l, nil)
		})
	}
}

// onlyClients lets the clients ask the servers, and nobody else.
const onlyClients = `---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: only-clients}
spec:
  podSelector: {matchExpressions: [{key: app, operator: In, values: [server1, server2]}]}
  ingress: [{from: [{podSelector: {matchExpressions: [{key: app, operator: In, values: [client1, client2]}]}}]}]
`

// TestKillUnderPolicy: the same under a policy that allows the load, while a pod
// that it does not allow asks all the time: the agents come and go ten times, and
// not once is a window open.
func TestKillUnderPolicy(t *testing.T) {
	l := testlab.New(t)
	server := `weft, serve, http, --port, "8080"`
	l.Up(t, pod("client1", "node1", "sleep, infinity")+pod("client2", "node2", "sleep, infinity")+pod("stranger", "node1", "sleep, infinity")+
		pod("server1", "node1", server)+pod("server2", "node2", server)+onlyClients)
	killUnderLoad(t, l, func(t *testing.T, ips map[string][]string) []*load {
		var strangers []*load
		for _, server := range []string{"server1", "server2"} {
			x := &load{name: "stranger to " + server}
			x.start(t, l, "default/stranger", "--concurrency", "8", "--count", "0", "--timeout", "300ms", "http://"+ips[server][0]+":8080/")
			strangers = append(strangers, x)
		}
		return strangers
	})
}

// killUnderLoad runs the loads through ten kills of each agent. strangers starts
// loads of which every request must fail; nil for none, and then no packet may be
// dropped at all.
func killUnderLoad(t *testing.T, l *testlab.Lab, strangers func(*testing.T, map[string][]string) []*load) {
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ips := map[string][]string{}
	for _, p := range st.Pods {
		ips[p.Name] = p.IPs
	}
	await(t, waitTime, func() error {
		_, err := l.Weft(t.Context(), testlab.InPod("default/client1", "weft", "probe", ips["server1"][0]+":8080", ips["server2"][0]+":8080")...)
		return err
	})
	loads := []*load{
		startLoad(t, l, "same node, IPv4", "default/client1", "http://"+ips["server1"][0]+":8080/"),
		startLoad(t, l, "across, IPv4", "default/client1", "http://"+ips["server2"][0]+":8080/"),
		startLoad(t, l, "across, IPv6", "default/client2", "http://["+ips["server1"][1]+"]:8080/"),
		startLoad(t, l, "same node, IPv6", "default/client2", "http://["+ips["server2"][1]+"]:8080/"),
	}
	await(t, waitTime, func() error {
		for _, pod := range []string{"client1", "client2"} {
			if n := tcp(t, l, "default/"+pod)["CurrEstab"]; n != strconv.Itoa(2*connections) {
				return fmt.Errorf("%s has %s connections, want %d", pod, n, 2*connections)
			}
		}
		return nil
	})
	var refused []*load
	if strangers != nil {
		refused = strangers(t, ips)
	}
	before := look(t, l)
	for range kills {
		for _, node := range []string{"node1", "node2"} {
			l.Must(t, "lab", "agent", "kill", node)
			l.Must(t, "lab", "agent", "start", node)
		}
	}
	after := look(t, l)
	if d := cmp.Diff(before, after); d != "" {
		t.Errorf("after %d kills of each agent (-before +after):\n%s", kills, d)
	}
	for _, x := range loads {
		x.stop(t)
	}
	for _, x := range refused {
		x.refused(t)
	}
	for _, node := range []string{"node1", "node2"} {
		st, err := l.Agent(t.Context(), node)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range st.Drops {
			if strangers == nil || d.Name != "policy" {
				t.Errorf("%s has dropped packets: %v", node, d)
			}
		}
	}
}

// TestDownUnderLoad: what an agent leaves when it dies for good is no more than
// the lab takes down.
func TestDownUnderLoad(t *testing.T) {
	l := testlab.New(t)
	l.Up(t, pod("client", "node1", "sleep, infinity")+pod("server", "node2", `weft, serve, http, --port, "8080"`))
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range st.Nodes {
		if err := syscall.Kill(n.Agent.Pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	l.Must(t, "lab", "down")
	if left := l.Leaks(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
