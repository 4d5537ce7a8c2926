// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/test/testlab"
)

// stray starts weft in the network of the client, but in the root of all cgroups,
// where no socket program of weft sees it: as if the pod had a stack of its own.
func stray(t *testing.T, l *testlab.Lab, name string, args ...string) *load {
	t.Helper()
	x := &load{name: name}
	x.cmd = strayCommand(t, l, args...)
	x.cmd.Stdout, x.cmd.Stderr = &x.out, &x.out
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = x.cmd.Process.Kill() })
	return x
}

// strayCommand moves itself and becomes weft in the network of default/client.
func strayCommand(t *testing.T, l *testlab.Lab, args ...string) *exec.Cmd {
	t.Helper()
	mount, err := cgroup.Mount()
	if err != nil {
		t.Fatal(err)
	}
	const script = `echo $$ >"$0/cgroup.procs" && exec ip netns exec "$@"`
	cmd := exec.CommandContext(context.Background(), "sh", append([]string{"-c", script, mount, podNetNS(l, "client"), filepath.Join(l.Bin, "weft")}, args...)...)
	cmd.Env = append(os.Environ(), l.Env()...)
	return cmd
}

// strayTalks are talks of a stray.
func strayTalks(t *testing.T, l *testlab.Lab, name string, args ...string) *load {
	t.Helper()
	return stray(t, l, name, append([]string{"talk", "--count", "0", "--interval", "50ms", "--timeout", "500ms"}, args...)...)
}

// containers are the processes of a pod's container.
func containers(t *testing.T, l *testlab.Lab, pod, container string) (pids []int) {
	t.Helper()
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range st.Pods {
		if p.Namespace+"/"+p.Name != pod {
			continue
		}
		text, err := os.ReadFile(filepath.Join(p.Cgroup, container, "cgroup.procs"))
		if err != nil {
			t.Fatal(err)
		}
		for _, field := range strings.Fields(string(text)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, pid)
		}
	}
	if pids == nil {
		t.Fatalf("no process in container %s of %s", container, pod)
	}
	return pids
}

// endpointsReady waits until a Service of the namespace shop has so many ready pods.
func endpointsReady(t *testing.T, l *testlab.Lab, service string, n int) {
	t.Helper()
	await(t, waitTime, func() error {
		st, err := l.Status(t.Context())
		if err != nil {
			return err
		}
		for _, s := range st.Services {
			if s.Name == service && s.Endpoints != n {
				return fmt.Errorf("%s has %d ready pods, want %d", service, s.Endpoints, n)
			}
		}
		return nil
	})
}

// fatal is how many requests may fail when a server of three dies: those that it
// had, and those of the time until the lab has seen it and the agents know. At 500
// requests a second, a third of them to this server, 40 are those of 240 ms.
const fatal = 40

// TestBackendDies: a server is killed under load. A bounded number of requests
// fails, and once the endpoint is not ready none does; also not when it is back.
func TestBackendDies(t *testing.T) {
	l := testlab.New(t)
	l.Up(t, shop(t))
	inside, outside := "http://"+webIP+"/", "http://172.30.0.1:30080/"
	answered(t, l, "shop/client", inside)
	answered(t, l, "outside", outside)
	start := func(when string) []*load {
		return []*load{
			requests(t, l, "cluster IP, "+when, "shop/client", "500", inside),
			requests(t, l, "outside, "+when, "outside", "100", outside),
		}
	}
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range st.Pods {
		if p.Labels["app"] != "web" {
			continue
		}
		loads := start("while " + p.Name + " dies")
		begin := time.Now()
		await(t, waitTime, func() error {
			if d := time.Since(begin); d < 300*time.Millisecond { // the loads are under way
				return fmt.Errorf("only %v of load", d)
			}
			return nil
		})
		for _, pid := range containers(t, l, "shop/"+p.Name, "server") {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
		endpointsReady(t, l, "web", 2)
		after := start("after " + p.Name + " has died")
		endpointsReady(t, l, "web", 3)
		for _, x := range loads {
			total, failed := x.end(t)
			if n, err := strconv.Atoi(failed); err != nil || n > fatal || total == "0" {
				t.Errorf("%s: %s of %s failed, want at most %d", x.name, failed, total, fatal)
			}
		}
		for _, x := range after {
			x.stop(t)
		}
	}
}

// TestOldPorts: a connection on the ports of an earlier one chooses a server anew,
// when the earlier one has ended. When it has not, as client or server have gone
// without a word, it works as well, and not with a server that is none any more.
func TestOldPorts(t *testing.T) {
	all := ""
	for _, name := range []string{"a", "b", "c", "d"} {
		all += quickTalker(name)
	}
	l := talkLab(t, all+says(""))
	from := []oldPorts{
		{l, "outside", "172.30.0.1", ":" + saysPort, "weft-" + l.Name + "-underlay", func(name string, args ...string) *load {
			return client(t, l, name, "outside", append([]string{"weft"}, args...)...)
		}},
		{l, "pod, by packets", saysIP, ":7", podNetNS(l, "client"), func(name string, args ...string) *load {
			return stray(t, l, name, args...)
		}},
	}
	for _, o := range from {
		for _, proto := range []string{"", "/udp"} {
			o.talk(proto, "--each", "--count", "20", "-q").finish(t, 20)
		}
		o.ended(t)
		o.silentClient(t)
		o.silentServer(t)
	}
}

// quickTalker is a talker, one of a to d, that does not wait when it is to end.
func quickTalker(name string) string {
	node := map[string]string{"a": "node1", "b": "node2", "c": "node2", "d": "node1"}[name]
	return strings.Replace(talker(name, node, 0), "terminationGracePeriodSeconds: 3", "terminationGracePeriodSeconds: 0", 1)
}

// podNetNS is the network of a pod of the namespace default.
func podNetNS(l *testlab.Lab, name string) string { return "weft-" + l.Name + "-pod-default-" + name }

// oldPorts is a client that has one source port only.
type oldPorts struct {
	lab         *testlab.Lab
	name        string
	address, to string // of the Service, and ":PORT"
	netns       string // of the client
	start       func(name string, args ...string) *load
}

func (o oldPorts) talk(proto string, more ...string) *load {
	return o.start(o.name, append([]string{"talk", "--source-port", "5557", "--reset", "--timeout", "5s", o.address + o.to + proto}, more...)...)
}

// hold keeps a connection, and returns it and its server.
func (o oldPorts) hold(t *testing.T) (x *load, server string) {
	t.Helper()
	x = o.talk("", "--count", "0", "--interval", "20ms")
	begun(t, x)
	return x, x.server()
}

// again makes a connection from the same port, not to the server that has gone.
func (o oldPorts) again(t *testing.T, when, gone string) {
	t.Helper()
	began := time.Now()
	x := o.talk("", "--count", "3")
	x.finish(t, 3)
	if x.server() == gone {
		t.Errorf("%s, %s: %s answered on the old ports, and is no server any more", o.name, when, gone)
	}
	t.Logf("%s, %s: %s went, %s answers after %v", o.name, when, gone, x.server(), time.Since(began))
}

// ended: the connection ends after its server is out of the Service.
func (o oldPorts) ended(t *testing.T) {
	x, doomed := o.hold(t)
	o.lab.Must(t, "lab", "apply", "-f", write(t, strings.Replace(quickTalker(doomed), "app: talker", "app: other", 1)))
	x.stop(t)
	o.again(t, "ended", doomed)
	o.lab.Must(t, "lab", "apply", "-f", write(t, quickTalker(doomed)))
}

// silentClient: the client goes, and no packet says so.
func (o oldPorts) silentClient(t *testing.T) {
	x, server := o.hold(t)
	o.vanish(t, x)
	if n := tcp(t, o.lab, "default/"+server)["CurrEstab"]; n == "0" {
		t.Errorf("%s: the server knows that the client has gone", o.name)
	}
	o.again(t, "after a client that said nothing", "")
}

// silentServer: both go, the server with its pod.
func (o oldPorts) silentServer(t *testing.T) {
	x, doomed := o.hold(t)
	ip(t, "-n", podNetNS(o.lab, doomed), "link", "set", "eth0", "down")
	o.vanish(t, x)
	file := write(t, quickTalker(doomed))
	o.lab.Must(t, "lab", "delete", "-f", file)
	o.again(t, "after a server that said nothing", doomed)
	o.lab.Must(t, "lab", "apply", "-f", file)
}

// vanish ends a client while none of its packets gets out.
func (o oldPorts) vanish(t *testing.T, x *load) {
	t.Helper()
	ip(t, "-n", o.netns, "route", "add", "blackhole", o.address)
	defer ip(t, "-n", o.netns, "route", "del", "blackhole", o.address)
	x.end(t)
}

func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// finish waits for a load that ends by itself, after so many messages of which none
// failed.
func (x *load) finish(t *testing.T, n int) {
	t.Helper()
	err := x.cmd.Wait()
	if want := fmt.Sprintf("%d messages, 0 failed", n); err != nil || !strings.Contains(x.out.String(), want) {
		t.Errorf("%s: %v, want %s: %s", x.name, err, want, ends(x.out.String()))
	}
}

// TestRecreatedUnderUDP: a pod that is deleted and comes again with the address that
// it had, being the node's, is reached again by sockets that have talked to it; and a
// Service that has lost all endpoints refuses until it has one.
func TestRecreatedUnderUDP(t *testing.T) {
	server := strings.Replace(talker("a", "node2", 0), "spec:\n", "spec:\n  hostNetwork: true\n", 1)
	l := talkLab(t, server+says(""))
	const quick = "--timeout=300ms"
	clients := []*load{
		talks(t, l, "connected", "default/client", quick, "--reopen", saysIP+":7/udp"),
		talks(t, l, "unconnected", "default/client", quick, "--unconnected", saysIP+":7/udp"),
		strayTalks(t, l, "by packets", quick, "--unconnected", saysIP+":7/udp"),
		talks(t, l, "outside, other node", "outside", quick, "--unconnected", "172.30.0.1:"+saysPort+"/udp"),
		talks(t, l, "outside", "outside", quick, "--unconnected", "172.30.0.2:"+saysPort+"/udp"),
	}
	begun(t, clients...)
	file := write(t, server)
	for range 2 {
		l.Must(t, "lab", "delete", "-f", file)
		failures(t, clients, 2)
		l.Must(t, "lab", "apply", "-f", file)
		answers(t, clients, 3)
	}
	for _, x := range clients {
		x.end(t)
	}
}

// failures waits until each client has so many more.
func failures(t *testing.T, clients []*load, n int) {
	t.Helper()
	more(t, clients, n, "failures", errorsOf)
}

// answers waits until each client has so many more.
func answers(t *testing.T, clients []*load, n int) {
	t.Helper()
	more(t, clients, n, "answers", func(x *load) int { return len(heard.FindAllString(x.out.String(), -1)) })
}

func more(t *testing.T, clients []*load, n int, what string, count func(*load) int) {
	t.Helper()
	before := map[*load]int{}
	for _, x := range clients {
		before[x] = count(x)
	}
	await(t, waitTime, func() error {
		for _, x := range clients {
			if got := count(x) - before[x]; got < n {
				return fmt.Errorf("%s has %d more %s, want %d: %s", x.name, got, what, n, ends(x.out.String()))
			}
		}
		return nil
	})
}
