// SPDX-License-Identifier: Apache-2.0

// Package doors states which packages may import what, and why.
package doors

import (
	"go/build"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/weft-mesh/weft/"

// door is a rule about the imports of the module's packages, their tests
// included.
type door struct {
	name   string
	reason string
	// imports are packages, each with all below it.
	imports []string
	// only are the packages (each with all below it, relative to the module)
	// that may import them; the rest may not.
	only []string
	// never, instead of only, are the packages that may not; the rest may.
	never []string
	// direct looks at the packages' own imports only, tests not included.
	direct bool
}

var doors = []door{
	{
		name:    "cilium/ebpf",
		reason:  "one package owns one kernel object; everybody else uses its verbs and can be tested without a kernel",
		imports: []string{"github.com/cilium/ebpf"},
		only:    []string{"internal/datapath", "bpf"},
	},
	{
		name:    "netlink",
		reason:  "network devices, routes and namespaces are changed in one place, with one idea of what is ours",
		imports: []string{"github.com/vishvananda/netlink", "github.com/vishvananda/netns"},
		only:    []string{"internal/netdev"},
	},
	{
		name:    "client-go",
		reason:  "the Kubernetes API is one source of rows among others; nothing else may depend on a cluster",
		imports: []string{"k8s.io/client-go"},
		only:    []string{"internal/source/kube"},
	},
	{
		name:    "pure computation",
		reason:  "policy, services and routes are computed from rows alone: the same rows give the same result, in a test as on a node",
		imports: []string{"net/http", "os", "os/exec", "syscall", "net", "io/fs", "golang.org/x/sys", "google.golang.org/grpc", module + "internal/datapath", module + "internal/netdev", module + "internal/source"},
		never:   []string{"internal/policy", "internal/balance", "internal/route", "internal/addr"},
		direct:  true,
	},
	{
		name:    "no agent in the parts",
		reason:  "imports point one way: the agent, the lab and the CLI are made of the other packages",
		imports: []string{module + "internal/agent", module + "internal/cli", module + "internal/lab"},
		only:    []string{"cmd", "internal/agent", "internal/cli", "internal/lab", "internal/bench", "test"},
	},
}

// listed is a package and what its files import, those for other systems left
// out.
type listed struct {
	ImportPath           string
	Imports, TestImports []string
}

// packages reads the files of the whole module. It does so itself, instead of
// asking the go command, so that the test cache knows when a file has changed.
func packages(t *testing.T) []listed {
	t.Helper()
	const root = "../.."
	found := map[string]*listed{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && path != root && strings.HasPrefix(e.Name(), "."), e.IsDir() && e.Name() == "testdata",
			e.IsDir() && path != root && isModule(path):
			return fs.SkipDir
		case e.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		return addFile(found, root, path)
	})
	if err != nil {
		t.Fatal(err)
	}
	var all []listed
	for _, p := range found {
		all = append(all, *p)
	}
	slices.SortFunc(all, func(a, b listed) int { return strings.Compare(a.ImportPath, b.ImportPath) })
	return all
}

// isModule says whether a folder begins another module, which has its own rules.
func isModule(folder string) bool {
	_, err := os.Stat(filepath.Join(folder, "go.mod"))
	return err == nil
}

func addFile(found map[string]*listed, root, path string) error {
	folder, name := filepath.Split(path)
	if ok, err := build.Default.MatchFile(folder, name); err != nil || !ok {
		return err
	}
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(root, filepath.Clean(folder))
	if err != nil {
		return err
	}
	p := found[rel]
	if p == nil {
		p = &listed{ImportPath: module + filepath.ToSlash(rel)}
		found[rel] = p
	}
	for _, i := range file.Imports {
		imported, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			return err
		}
		if strings.HasSuffix(name, "_test.go") {
			p.TestImports = append(p.TestImports, imported)
		} else {
			p.Imports = append(p.Imports, imported)
		}
	}
	return nil
}

func TestDoors(t *testing.T) {
	all := packages(t)
	if len(all) < 5 {
		t.Fatalf("found only %d packages", len(all))
	}
	for _, d := range doors {
		for _, p := range all {
			for _, bad := range d.offences(p) {
				t.Errorf("%s imports %s: only %s may (%s)", p.ImportPath, bad, d.who(), d.reason)
			}
		}
	}
}

// TestDoorsClose shows that the rules see what they are to see.
func TestDoorsClose(t *testing.T) {
	for _, c := range []struct {
		pkg  listed
		want int
	}{
		{listed{ImportPath: module + "internal/flow", Imports: []string{"github.com/cilium/ebpf/ringbuf"}}, 1},
		{listed{ImportPath: module + "internal/flow", TestImports: []string{"github.com/cilium/ebpf"}}, 1},
		{listed{ImportPath: module + "internal/flow", Imports: []string{"github.com/cilium/ebpfx"}}, 0},
		{listed{ImportPath: module + "internal/datapath/pod", Imports: []string{"github.com/cilium/ebpf/link"}}, 0},
		{listed{ImportPath: module + "internal/datapathx", Imports: []string{"github.com/cilium/ebpf/link"}}, 1},
		{listed{ImportPath: module + "internal/lab", TestImports: []string{"github.com/vishvananda/netns"}}, 1},
		{listed{ImportPath: module + "internal/source/file", Imports: []string{"k8s.io/client-go/rest"}}, 1},
		{listed{ImportPath: module + "internal/policy", Imports: []string{"os", "net/netip"}}, 1},
		{listed{ImportPath: module + "internal/policy", TestImports: []string{"os"}}, 0},
		{listed{ImportPath: module + "internal/flow", Imports: []string{module + "internal/cli"}}, 1},
	} {
		n := 0
		for _, d := range doors {
			n += len(d.offences(c.pkg))
		}
		if n != c.want {
			t.Errorf("%+v: %d offences, want %d", c.pkg, n, c.want)
		}
	}
}

func (d door) offences(p listed) []string {
	rel := strings.TrimPrefix(p.ImportPath, module)
	if d.never != nil && !within(rel, d.never) || d.never == nil && within(rel, d.only) {
		return nil
	}
	imports := slices.Clone(p.Imports)
	if !d.direct {
		imports = append(imports, p.TestImports...)
	}
	slices.Sort(imports)
	return slices.DeleteFunc(slices.Compact(imports), func(i string) bool {
		if d.direct && !strings.Contains(i, ".") {
			return !slices.Contains(d.imports, i) // net is not net/netip
		}
		return !within(i, d.imports)
	})
}

func (d door) who() string {
	if d.never != nil {
		return "packages other than " + strings.Join(d.never, ", ")
	}
	return strings.Join(d.only, ", ")
}

// within says whether path is one of roots or below it.
func within(path string, roots []string) bool {
	return slices.ContainsFunc(roots, func(r string) bool {
		return path == r || strings.HasPrefix(path, r+"/")
	})
}
