// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/state"
)

// fixture is a source on a folder of its own.
type fixture struct {
	t   *testing.T
	dir string
	*Source
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "manifests")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return fixtureAt(t, dir)
}

func fixtureAt(t *testing.T, dir string) *fixture {
	t.Helper()
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Folder: dir}, tables, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return &fixture{t, dir, s}
}

func (f *fixture) write(name, text string) {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		f.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) remove(name string) {
	f.t.Helper()
	if err := os.Remove(filepath.Join(f.dir, name)); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) mustLoad() {
	f.t.Helper()
	if err := f.load(); err != nil {
		f.t.Fatal(err)
	}
}

// workloads are "namespace/name=value of label v" of every workload.
func (f *fixture) workloads() string {
	var all []string
	for w := range f.tables.Workloads.All(f.tables.DB.ReadTxn()) {
		all = append(all, state.Key(w.Namespace, w.Name)+"="+w.Labels["v"])
	}
	return strings.Join(all, " ")
}

func (f *fixture) problems() []string {
	var all []string
	for e := range f.tables.SourceErrors.All(f.tables.DB.ReadTxn()) {
		all = append(all, manifest.Format(*e))
	}
	return all
}

func (f *fixture) check(when, workloads string, problems ...string) {
	f.t.Helper()
	if got := f.workloads(); got != workloads {
		f.t.Errorf("%s: workloads %q, want %q", when, got, workloads)
	}
	if d := cmp.Diff(problems, f.problems()); d != "" {
		f.t.Errorf("%s: problems (-want +got):\n%s", when, d)
	}
}

// pod is a pod whose label v tells versions apart.
func pod(name, v string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s, labels: {v: %q}}\nspec: {containers: [{name: c}]}\n---\n", name, v)
}

func badPod(name string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec: {containers: 1}\n---\n", name)
}

func TestRows(t *testing.T) {
	f := newFixture(t)
	data, err := os.ReadFile("../manifest/testdata/good.yaml")
	if err != nil {
		t.Fatal(err)
	}
	f.write("all.yaml", string(data))
	f.mustLoad()
	txn := f.tables.DB.ReadTxn()
	w, _, _ := f.tables.Workloads.Get(txn, state.WorkloadByName.Query("shop/web-0"))
	want := &state.Workload{
		Namespace: "shop", Name: "web-0", Node: "node1", Labels: map[string]string{"app": "web"}, ServiceAccount: "web",
		IPs:   []netip.Addr{netip.MustParseAddr("10.244.1.5"), netip.MustParseAddr("fd00:10:244:1::5")},
		Phase: "Running", Ready: true, Ports: []state.Port{{Name: "http", Port: 80, Protocol: "TCP"}},
	}
	if d := cmp.Diff(want, w, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("workload (-want +got):\n%s", d)
	}
	n, _, _ := f.tables.Nodes.Get(txn, state.NodeByName.Query("node1"))
	if n == nil || len(n.IPs) != 2 || len(n.PodCIDRs) != 2 {
		t.Errorf("node %+v", n)
	}
	e, _, _ := f.tables.Endpoints.Get(txn, state.EndpointByName.Query("shop/web-abc"))
	if e == nil || e.Service != "web" {
		t.Errorf("endpoint %+v", e)
	}
	c, _, _ := f.tables.Policies.Get(txn, state.PolicyByName.Query("ClusterNetworkPolicy//tenants"))
	if c == nil || c.NetworkPolicy != nil || c.ClusterNetworkPolicy == nil || len(c.ClusterNetworkPolicy.Egress) != 2 {
		t.Errorf("cluster policy %+v", c)
	}
	for name, got := range map[string]int{
		"namespaces": f.tables.Namespaces.NumObjects(txn) - 2, // shop, and default because of a pod
		"services":   f.tables.Services.NumObjects(txn) - 2, "policies": f.tables.Policies.NumObjects(txn) - 3,
	} {
		if got != 0 {
			t.Errorf("%s: %d too many", name, got)
		}
	}
	d, _, _ := f.tables.Namespaces.Get(txn, state.NamespaceByName.Query("default"))
	if d == nil || d.Labels["kubernetes.io/metadata.name"] != "default" {
		t.Errorf("implied namespace %+v", d)
	}
}

// TestNothingInForceIsLost walks through every rule of the package comment.
func TestNothingInForceIsLost(t *testing.T) {
	f := newFixture(t)
	const notList = `spec.containers: 1: want a list`
	f.write("a.yaml", pod("a", "1")+pod("b", "1"))
	f.write("z.yaml", pod("z", "1"))
	f.mustLoad()
	f.check("at first", "default/a=1 default/b=1 default/z=1")

	f.write("a.yaml", badPod("a")+pod("b", "2"))
	f.write("new.yaml", badPod("new"))
	f.mustLoad()
	f.check("bad document, known object", "default/a=1 default/b=2 default/z=1",
		"a.yaml, document 0, "+notList, "new.yaml, document 0, "+notList)

	f.write("a.yaml", badPod("a"))
	f.mustLoad()
	f.check("another document of a bad file removed", "default/a=1 default/z=1",
		"a.yaml, document 0, "+notList, "new.yaml, document 0, "+notList)

	f.write("a.yaml", pod("a", "3")+pod("b", "3"))
	f.remove("new.yaml")
	f.mustLoad()
	f.check("mended", "default/a=3 default/b=3 default/z=1")

	f.write("a.yaml", "{{ nothing to be read\n---\n"+pod("b", "4"))
	f.mustLoad()
	f.check("bad document, unknown object", "default/a=3 default/b=4 default/z=1",
		"a.yaml, document 0: line 1: did not find expected ',' or '}': want YAML")

	f.write("c.yaml", pod("a", "5"))
	f.mustLoad()
	f.check("a good definition elsewhere replaces a kept one", "default/a=5 default/b=4 default/z=1",
		"a.yaml, document 0: line 1: did not find expected ',' or '}': want YAML")

	f.write("a.yaml", "")
	f.mustLoad()
	f.check("emptied", "default/a=5 default/z=1")
}

func TestFileThatCannotBeRead(t *testing.T) {
	f := newFixture(t)
	f.write("a.yaml", pod("a", "1"))
	f.mustLoad()
	f.write("a.yaml", strings.Repeat("#", manifest.MaxFileSize+1))
	f.mustLoad()
	f.check("too large", "default/a=1", "a.yaml, document 0: file has 4194305 bytes: want at most 4194304")
	f.remove("a.yaml")
	if err := os.Symlink("/dev/zero", filepath.Join(f.dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	f.mustLoad()
	f.check("a device", "default/a=1", "a.yaml, document 0: read the file: want a regular file")
	f.remove("a.yaml")
	f.mustLoad()
	f.check("removed", "")
}

func TestOneObjectInTwoFiles(t *testing.T) {
	f := newFixture(t)
	f.write("b.yaml", pod("a", "b"))
	f.mustLoad()
	f.write("a.yaml", pod("a", "a"))
	f.mustLoad()
	f.check("the second comes later", "default/a=b",
		"a.yaml, document 0, metadata.name: Pod default/a is already defined in b.yaml, document 0: want each object once")
	f.remove("b.yaml")
	f.mustLoad()
	f.check("the first goes", "default/a=a")

	fresh := fixtureAt(t, f.dir)
	fresh.write("b.yaml", pod("a", "b"))
	fresh.mustLoad()
	fresh.check("both at the start", "default/a=a",
		"b.yaml, document 0, metadata.name: Pod default/a is already defined in a.yaml, document 0: want each object once")
}

func TestMissingFolderKeepsEverything(t *testing.T) {
	f := newFixture(t)
	f.write("a.yaml", pod("a", "1"))
	f.write("generation", "7\n")
	f.mustLoad()
	if err := os.Rename(f.dir, f.dir+".away"); err != nil {
		t.Fatal(err)
	}
	f.mustLoad()
	f.check("renamed away", "default/a=1",
		fmt.Sprintf("%s, document 0: read the manifest folder: open %s: no such file or directory", f.dir, f.dir))
	if g := f.Generation(); g != 7 {
		t.Errorf("generation %d, want 7", g)
	}
}

func TestBadGeneration(t *testing.T) {
	f := newFixture(t)
	f.write("generation", "7")
	f.mustLoad()
	f.write("generation", "seven")
	f.mustLoad()
	f.check("bad", "", `generation, document 0: "seven": want a decimal number of at most 64 bits`)
	if g := f.Generation(); g != 7 {
		t.Errorf("generation %d, want 7", g)
	}
}

func TestOnlyChangedRowsAreWritten(t *testing.T) {
	f := newFixture(t)
	f.write("a.yaml", pod("a", "1")+pod("b", "1"))
	f.mustLoad()
	rev := func(name string) uint64 {
		_, r, _ := f.tables.Workloads.Get(f.tables.DB.ReadTxn(), state.WorkloadByName.Query("default/"+name))
		return r
	}
	a, b, table := rev("a"), rev("b"), f.tables.Workloads.Revision(f.tables.DB.ReadTxn())
	f.write("a.yaml", "# a comment\n"+pod("a", "1")+pod("b", "1"))
	f.mustLoad()
	if got := f.tables.Workloads.Revision(f.tables.DB.ReadTxn()); got != table {
		t.Errorf("a comment changes the table from revision %d to %d", table, got)
	}
	f.write("a.yaml", pod("a", "1")+pod("b", "2"))
	f.mustLoad()
	if rev("a") != a || rev("b") == b {
		t.Errorf("revisions a %d → %d, b %d → %d: want a new one for b only", a, rev("a"), b, rev("b"))
	}
}

func TestProblemsAreBounded(t *testing.T) {
	f := newFixture(t)
	f.write("a.yaml", strings.Repeat("--- 1\n", 300))
	f.mustLoad()
	p := f.problems()
	if len(p) != maxFileErrors || !strings.Contains(strings.Join(p, "\n"), "(and 200 more bad documents in this file)") {
		t.Errorf("%d rows: %s", len(p), p)
	}
}

// run starts Run and ends it with the test.
func (f *fixture) run() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	f.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			f.t.Errorf("Run: %v", err)
		}
	})
	return ctx
}

// until waits for a condition, looking again at each load.
func (f *fixture) until(ctx context.Context, what string, ok func() bool) {
	f.t.Helper()
	for {
		_, changed := f.Progress()
		if ok() {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			f.t.Fatalf("%s: not so in time; workloads %q, problems %q", what, f.workloads(), f.problems())
		}
	}
}

func (f *fixture) untilWorkloads(ctx context.Context, want string) {
	f.t.Helper()
	f.until(ctx, "workloads "+want, func() bool { return f.workloads() == want })
}

func TestRunFollowsTheFolder(t *testing.T) {
	f := newFixture(t)
	ctx := f.run()
	for g := range uint64(5) {
		f.write("a.yaml", pod("a", fmt.Sprint(g)))
		f.write("generation", fmt.Sprint(g+1))
		if err := f.Wait(ctx, g+1); err != nil {
			t.Fatal(err)
		}
		if got, want := f.workloads(), fmt.Sprintf("default/a=%d", g); got != want {
			t.Fatalf("generation %d: workloads %q, want %q", g+1, got, want)
		}
	}
	f.write("b.yaml", pod("b", "1"))
	f.untilWorkloads(ctx, "default/a=4 default/b=1")
	f.remove("a.yaml")
	f.untilWorkloads(ctx, "default/b=1")
}

func TestRunWaitsForTheFolder(t *testing.T) {
	f := fixtureAt(t, filepath.Join(t.TempDir(), "not", "yet", "there"))
	ctx := f.run()
	f.until(ctx, "first load", func() bool { p, _ := f.Progress(); return p.Loads > 0 })
	if err := os.MkdirAll(f.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	f.write("a.yaml", pod("a", "1"))
	f.untilWorkloads(ctx, "default/a=1")
}

func TestRunFollowsAReplacedFolder(t *testing.T) {
	f := newFixture(t)
	f.write("a.yaml", pod("a", "1"))
	ctx := f.run()
	f.untilWorkloads(ctx, "default/a=1")
	aside := fixtureAt(t, f.dir+".next")
	if err := os.Mkdir(aside.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	aside.write("a.yaml", pod("a", "2"))
	if err := os.Rename(f.dir, f.dir+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(aside.dir, f.dir); err != nil {
		t.Fatal(err)
	}
	f.untilWorkloads(ctx, "default/a=2")
	f.write("b.yaml", pod("b", "3")) // the new folder is watched, not the old one
	f.untilWorkloads(ctx, "default/a=2 default/b=3")
}

func TestWaitEndsWithItsContext(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := f.Wait(ctx, 1); err == nil {
		t.Error("Wait returned without a load")
	}
}

func TestConfig(t *testing.T) {
	if err := (Config{}).Validate(); err == nil {
		t.Error("an empty folder is accepted")
	}
}

// TestTooManyFiles: a file beyond the limit waits, even where its name comes
// first; those in force stay.
func TestTooManyFiles(t *testing.T) {
	f := newFixture(t)
	f.write("m.yaml", pod("m", "1"))
	f.mustLoad()
	for i := range MaxFiles - 1 {
		if err := os.WriteFile(filepath.Join(f.dir, fmt.Sprintf("a%05d.yaml", i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f.mustLoad()
	f.check("at the limit", "default/m=1")
	f.write("0.yaml", pod("late", "1"))
	f.mustLoad()
	f.check("beyond", "default/m=1", fmt.Sprintf(
		"%s, document 0: folder has 10001 manifests: want at most 10000; 0.yaml and those after it are not read", f.dir))
}

// BenchmarkLoad is one load of 2,000 pods in as many files, of which one has
// changed.
func BenchmarkLoad(b *testing.B) {
	dir := b.TempDir()
	tables, err := state.New()
	if err != nil {
		b.Fatal(err)
	}
	s, err := New(Config{Folder: dir}, tables, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	write := func(i int, v string) {
		name := fmt.Sprintf("p%d", i)
		if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(pod(name, v)), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	for i := range 2000 {
		write(i, "0")
	}
	if err := s.load(); err != nil {
		b.Fatal(err)
	}
	for n := 0; b.Loop(); n++ {
		write(n%2000, fmt.Sprint(n))
		if err := s.load(); err != nil {
			b.Fatal(err)
		}
	}
}
