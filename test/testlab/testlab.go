// SPDX-License-Identifier: Apache-2.0

// Package testlab gives tests labs of their own: real agents, real pods, under
// a name and in a folder that nobody else has, removed at the end together with
// a look at what they left behind.
package testlab

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/lab/api"
)

// envBin names the folder of weft and weft-cni, set by Main unless somebody
// wants to test programs that are there.
const envBin = "WEFT_TEST_BIN"

// downTime bounds the removal of a lab.
const downTime = time.Minute

// goneTime is how long commands that ran in a lab may take to notice its end.
const goneTime = 5 * time.Second

// Main is TestMain of a package with labs: it builds weft and weft-cni once and
// runs the tests. It returns the exit code.
func Main(m *testing.M) int {
	if os.Geteuid() != 0 || os.Getenv(envBin) != "" {
		return m.Run() // without root every test skips
	}
	dir, err := os.MkdirTemp("", "weft-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "testlab: make a folder for programs:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", "github.com/weft-mesh/weft/cmd/weft", "github.com/weft-mesh/weft/cmd/weft-cni")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "testlab: build weft:", err)
		return 1
	}
	if err := os.Setenv(envBin, dir); err != nil {
		fmt.Fprintln(os.Stderr, "testlab:", err)
		return 1
	}
	return m.Run()
}

// SlowMain is Main for tests that take minutes: it runs none of them unless
// WEFT_SLOW is set. They are not skipped, as in CI a skipped test is a failure;
// .ci/run runs them as suites of their own.
func SlowMain(m *testing.M) int {
	if os.Getenv("WEFT_SLOW") == "" {
		fmt.Println("tests that take minutes: they run with WEFT_SLOW=1")
		return 0
	}
	return Main(m)
}

// Need skips a test that cannot make labs; in CI (CI is set) that is a failure.
func Need(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") != "" {
		t.Fatal("this test needs root, and in CI it must run")
	}
	t.Skip("this test needs root")
}

// Lab is a lab that need not be up yet.
type Lab struct {
	Name string
	Root string // folder of labs; this one's is Root/Name
	Bin  string // folder of weft and weft-cni
}

// Make gives a new lab a name and a folder. The caller calls Remove.
func Make() (*Lab, error) {
	root, err := os.MkdirTemp("", "weft-t-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for labs: %w", err)
	}
	return &Lab{Name: "t" + strings.ToLower(rand.Text()[:8]), Root: root, Bin: os.Getenv(envBin)}, nil
}

// New makes a lab that is removed at the end of the test, which fails if
// something of it is left.
func New(t testing.TB) *Lab {
	t.Helper()
	Need(t)
	l, err := Make()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(l.Logs())
		}
		if err := l.Remove(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// Env is what commands need to mean this lab.
func (l *Lab) Env() []string {
	return []string{"PATH=" + l.Bin + ":" + os.Getenv("PATH"), "WEFT_LAB=" + l.Name, "WEFT_LAB_DIR=" + l.Root}
}

// Dir is the folder of the lab.
func (l *Lab) Dir() string { return filepath.Join(l.Root, l.Name) }

// Command is weft with these arguments, for this lab.
func (l *Lab) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(l.Bin, "weft"), args...)
	cmd.Env = append(os.Environ(), l.Env()...)
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// Weft runs weft with these arguments and returns its output; what it printed
// to standard error is in the error.
func (l *Lab) Weft(ctx context.Context, args ...string) (string, error) {
	var out, problems bytes.Buffer
	cmd := l.Command(ctx, args...)
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("weft %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(problems.String()))
	}
	return out.String(), nil
}

// Must is Weft for commands that must succeed.
func (l *Lab) Must(t testing.TB, args ...string) string {
	t.Helper()
	out, err := l.Weft(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Up starts the lab with manifests given as text.
func (l *Lab) Up(t testing.TB, manifests string, args ...string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "cluster.yaml")
	if err := os.WriteFile(file, []byte(manifests), 0o644); err != nil {
		t.Fatal(err)
	}
	l.Must(t, append([]string{"lab", "up", "-f", file}, args...)...)
}

// OnNode is the arguments that run a command on a node.
func OnNode(node string, argv ...string) []string {
	return append([]string{"lab", "node", "exec", node, "--"}, argv...)
}

// InPod is the arguments that run a command in a pod, "NS/POD".
func InPod(pod string, argv ...string) []string {
	return append([]string{"lab", "exec", pod, "--"}, argv...)
}

// Status of the lab.
func (l *Lab) Status(ctx context.Context) (*api.Status, error) {
	out, err := l.Weft(ctx, "lab", "status", "-o", "json")
	if err != nil {
		return nil, err
	}
	var st api.Status
	if err := json.Unmarshal([]byte(out), &st); err != nil {
		return nil, fmt.Errorf("read the status of the lab: %w", err)
	}
	return &st, nil
}

// Counter is one of the agent's packet counters.
type Counter struct {
	Name    string `json:"name"`
	Packets uint64 `json:"packets"`
}

// Program is one that the agent has attached.
type Program struct {
	Name   string `json:"name"`
	Attach string `json:"attach"`
	Device string `json:"device"`
	ID     uint32 `json:"id"`
	LinkID uint32 `json:"linkID"`
}

// AgentStatus is what tests read of `weft status -o json`.
type AgentStatus struct {
	Ready    bool      `json:"ready"`
	Drops    []Counter `json:"drops"`
	Programs []Program `json:"programs"`
	Maps     []struct {
		Name    string `json:"name"`
		Entries uint64 `json:"entries"`
	} `json:"maps"`
	Pods []struct {
		Namespace string   `json:"namespace"`
		Name      string   `json:"name"`
		IPs       []string `json:"ips"`
		Interface string   `json:"interface"`
		Identity  uint64   `json:"identity"`
	} `json:"pods"`
	Events Events `json:"events"`
}

// Events is where flow events went.
type Events struct {
	Generated    uint64 `json:"generated"`
	Lost         uint64 `json:"lost"`
	Received     uint64 `json:"received"`
	ReportedLost uint64 `json:"reportedLost"`
}

// Agent asks the agent of a node.
func (l *Lab) Agent(ctx context.Context, node string) (*AgentStatus, error) {
	out, err := l.Weft(ctx, OnNode(node, "weft", "status", "-o", "json")...)
	if err != nil {
		return nil, err
	}
	var st AgentStatus
	if err := json.Unmarshal([]byte(out), &st); err != nil {
		return nil, fmt.Errorf("read the status of the agent of %s: %w", node, err)
	}
	return &st, nil
}

// Logs is the end of every log of the lab, for a test that has failed.
func (l *Lab) Logs() string {
	var b strings.Builder
	for _, pattern := range []string{"lab.log", "nodes/*.log", "pods/*/*.log"} {
		files, _ := filepath.Glob(filepath.Join(l.Dir(), pattern))
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				continue
			}
			fmt.Fprintf(&b, "--- %s\n%s\n", f, excerpt(strings.Split(strings.TrimSpace(string(text)), "\n")))
		}
	}
	return b.String()
}

// excerpt is the end of a log, and the beginning of a crash.
func excerpt(lines []string) string {
	const some = 15
	tail := lines[max(0, len(lines)-some):]
	crash := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "panic: ") || strings.HasPrefix(l, "fatal error: ") })
	if crash >= 0 && crash < len(lines)-some {
		tail = append(append(slices.Clone(lines[crash:min(crash+2*some, len(lines)-some)]), "..."), tail...)
	}
	return strings.Join(tail, "\n")
}

// Remove takes the lab down and says what it left.
func (l *Lab) Remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), downTime)
	defer cancel()
	_, err := l.Weft(ctx, "lab", "down")
	left := l.Leaks()
	for deadline := time.Now().Add(goneTime); len(left) > 0 && time.Now().Before(deadline); left = l.Leaks() {
		time.Sleep(20 * time.Millisecond) // commands that ran in the lab are on their way out
	}
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("lab %s has left:\n  %s", l.Name, strings.Join(left, "\n  ")))
	}
	if rm := os.RemoveAll(l.Root); rm != nil {
		err = errors.Join(err, fmt.Errorf("remove the folder of labs: %w", rm))
	}
	return err
}
