// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weft-mesh/weft/test/testlab"
)

// write makes a manifest file and returns its path.
func write(t *testing.T, manifests string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "more.yaml")
	if err := os.WriteFile(path, []byte(manifests), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// agentPid is the process of a node's agent.
func agentPid(t *testing.T, l *testlab.Lab, node string) int {
	t.Helper()
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range st.Nodes {
		if n.Name == node && n.Agent.Pid > 0 {
			return n.Agent.Pid
		}
	}
	t.Fatalf("%s has no agent", node)
	return 0
}

// tombstones are the notes that the plugin has left for the agent of a node.
func tombstones(t *testing.T, l *testlab.Lab, node string) []fs.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(l.Dir(), "nodes", node, "cni", "del"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return entries
}

// TestHungAgent: an agent that does not move is not waited for for ever. The
// pod's DEL succeeds and leaves a note, apply and delete say which node is not
// in force; once the agent goes on, it catches up.
func TestHungAgent(t *testing.T) {
	l := testlab.New(t)
	server := `weft, serve, http, --port, "8080"`
	gone := pod("gone", "node1", "sleep, infinity")
	l.Up(t, gone+pod("client", "node1", "sleep, infinity")+pod("server", "node2", server))
	pid := agentPid(t, l, "node1")
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	_, err := l.Weft(t.Context(), "lab", "delete", "-f", write(t, gone), "--timeout", "8s")
	if err == nil || !strings.Contains(err.Error(), "node1: not in force") || strings.Contains(err.Error(), "node2: not in force") {
		t.Errorf("delete says %v, want that node1 is not in force", err)
	}
	await(t, waitTime, func() error {
		st, err := l.Status(t.Context())
		if err != nil {
			return err
		}
		if len(st.Pods) != 2 {
			return fmt.Errorf("there are %d pods, want 2: the DEL does not need the agent", len(st.Pods))
		}
		return nil
	})
	if n := len(tombstones(t, l, "node1")); n != 1 {
		t.Errorf("%d notes for the agent, want 1", n)
	}
	_, err = l.Weft(t.Context(), "lab", "apply", "-f", write(t, pod("new", "node2", "sleep, infinity")), "--timeout", "4s")
	if err == nil || !strings.Contains(err.Error(), "node1: not in force") || strings.Contains(err.Error(), "node2: not in force") {
		t.Errorf("apply says %v, want that node1 is not in force", err)
	}
	t.Logf("apply says: %v", err)
	// What is in force needs no agent.
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range st.Pods {
		if p.Name == "server" {
			l.Must(t, testlab.InPod("default/client", "weft", "get", "http://"+p.IPs[0]+":8080/")...)
		}
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	await(t, waitTime, func() error {
		st, err := l.Agent(t.Context(), "node1")
		if err != nil {
			return err
		}
		if len(st.Pods) != 1 || len(tombstones(t, l, "node1")) != 0 {
			return fmt.Errorf("pods %v, notes %v: the agent has not caught up", st.Pods, tombstones(t, l, "node1"))
		}
		return nil
	})
	l.Must(t, "lab", "apply", "-f", write(t, pod("new", "node2", "sleep, infinity")))
}

// TestKillDuringApply: the agent dies while pods are being wired. Apply says so;
// with an agent again, everything is wired once and nothing twice.
func TestKillDuringApply(t *testing.T) {
	l := testlab.New(t)
	l.Up(t, pod("first", "node1", "sleep, infinity"))
	var all strings.Builder
	const pods = 24
	for i := range pods {
		all.WriteString(pod(fmt.Sprintf("p%d", i), fmt.Sprintf("node%d", i%2+1), "sleep, infinity"))
	}
	file := write(t, all.String())
	for range 3 {
		applied := make(chan error, 1)
		go func() {
			_, err := l.Weft(t.Context(), "lab", "apply", "-f", file, "--timeout", "40s")
			applied <- err
		}()
		await(t, waitTime, func() error {
			st, err := l.Agent(t.Context(), "node1")
			if err != nil {
				return err
			}
			if len(st.Pods) < 3 {
				return fmt.Errorf("only %d pods", len(st.Pods))
			}
			return nil
		})
		l.Must(t, "lab", "agent", "kill", "node1")
		if err := <-applied; err == nil || !strings.Contains(err.Error(), "the agent was stopped") {
			t.Errorf("apply says %v, want that the agent was stopped", err)
		}
		l.Must(t, "lab", "agent", "start", "node1")
		l.Must(t, "lab", "apply", "-f", file)
		checkUnique(t, l, pods+1)
		l.Must(t, "lab", "delete", "-f", file)
	}
	st, err := l.Agent(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	if len(st.Pods) != 1 {
		t.Errorf("the agent has %d pods, want 1", len(st.Pods))
	}
}

// checkUnique wants so many pods, ready, each with addresses of its own that its
// agent knows as well.
func checkUnique(t *testing.T, l *testlab.Lab, want int) {
	t.Helper()
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(st.Pods) != want {
		t.Errorf("%d pods, want %d", len(st.Pods), want)
	}
	owner := map[string]string{}
	for _, p := range st.Pods {
		if !p.Ready || len(p.IPs) != 2 {
			t.Errorf("%s is not ready, or has not two addresses: %v", p.Name, p.IPs)
		}
		for _, ip := range p.IPs {
			if other, ok := owner[ip]; ok {
				t.Errorf("%s and %s both have %s", other, p.Name, ip)
			}
			owner[ip] = p.Name
		}
	}
	known := 0
	for _, node := range []string{"node1", "node2"} {
		a, err := l.Agent(t.Context(), node)
		if err != nil {
			t.Fatal(err)
		}
		known += len(a.Pods)
		for _, p := range a.Pods {
			if owner[p.IPs[0]] != p.Name {
				t.Errorf("the agent of %s knows %s as %s, it is of %q", node, p.IPs[0], p.Name, owner[p.IPs[0]])
			}
		}
	}
	if known != want {
		t.Errorf("the agents know %d pods, want %d", known, want)
	}
}
