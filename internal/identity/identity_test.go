// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/state"
)

// node is one allocator and what a restart needs to know.
type node struct {
	t    *testing.T
	path string
	*Allocator
}

func start(t *testing.T, path string) *node {
	t.Helper()
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	a, err := New(path, tables, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return &node{t, path, a}
}

func (n *node) restart() *node { return start(n.t, n.path) }

func (n *node) assign(c Content) uint64 {
	n.t.Helper()
	id, err := n.Assign(c.Namespace, c.NamespaceLabels, c.ServiceAccount, c.Labels)
	if err != nil {
		n.t.Fatal(err)
	}
	return id
}

func newPath(t *testing.T) string { return filepath.Join(t.TempDir(), "identities.json") }

func TestNames(t *testing.T) {
	for id, want := range map[uint64]string{Node: "node", RemoteNode: "remote-node", World: "world", Unknown: "unknown", 300: "300"} {
		if got := Name(id); got != want {
			t.Errorf("Name(%d) = %q, want %q", id, got, want)
		}
	}
}

func TestEveryPartOfTheContentCounts(t *testing.T) {
	n := start(t, newPath(t))
	base := Content{Namespace: "a", NamespaceLabels: map[string]string{"x": "1"}, ServiceAccount: "s", Labels: map[string]string{"y": "2", "z": "3"}}
	variants := []Content{base, base, base, base, base}
	variants[1].Namespace = "b"
	variants[2].NamespaceLabels = nil
	variants[3].ServiceAccount = ""
	variants[4].Labels = map[string]string{"y": "2", "z": "4"}
	seen := map[uint64]int{}
	for i, c := range variants {
		id := n.assign(c)
		if other, ok := seen[id]; ok || id < First {
			t.Errorf("variant %d has number %d, as variant %d", i, id, other)
		}
		seen[id] = i
		row, ok := n.Lookup(id)
		if !ok || row.Namespace != c.Namespace || !maps.Equal(row.Labels, c.Labels) {
			t.Errorf("row of %d is %+v", id, row)
		}
	}
	same := Content{Namespace: "a", NamespaceLabels: map[string]string{}, ServiceAccount: "default"}
	if n.assign(same) != n.assign(Content{Namespace: "a"}) {
		t.Error("a nil map and an empty one, or no service account and \"default\", have different numbers")
	}
}

// TestModel runs random assignments, prunings and restarts beside a map and
// checks: same content, same number, until dropped; no number for two contents
// ever.
func TestModel(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		n := start(t, newPath(t))
		model := map[int]uint64{}   // live contents
		history := map[uint64]int{} // every number ever, with its content
		now := time.Unix(0, 0)
		for range 60 {
			switch op := rng.IntN(10); {
			case op < 6:
				i := rng.IntN(12)
				id := n.assign(numbered(i))
				if want, ok := model[i]; ok && id != want {
					t.Fatalf("seed %d: content %d has number %d, had %d", seed, i, id, want)
				}
				if was, ok := history[id]; ok && (was != i || model[i] != id) {
					t.Fatalf("seed %d: number %d is used again for %d, was %d", seed, id, i, was)
				}
				model[i], history[id] = id, i
			case op < 8:
				n = n.restart()
			default:
				dropTwice(t, n, rng, model, &now)
			}
		}
	}
}

func numbered(i int) Content {
	return Content{Namespace: fmt.Sprint(i % 3), Labels: map[string]string{"n": fmt.Sprint(i)}}
}

// dropTwice lets a random part of the identities age beyond the grace period.
func dropTwice(t *testing.T, n *node, rng *rand.Rand, model map[int]uint64, now *time.Time) {
	t.Helper()
	keep := map[uint64]bool{}
	for i, id := range model {
		if rng.IntN(2) == 0 {
			keep[id] = true
		} else {
			delete(model, i)
		}
	}
	for range 2 {
		if _, err := n.Prune(keep, *now); err != nil {
			t.Fatal(err)
		}
		*now = now.Add(DefaultGrace)
	}
	if got := n.tables.Identities.NumObjects(n.tables.DB.ReadTxn()); got != len(model) {
		t.Fatalf("table has %d rows after pruning, want %d", got, len(model))
	}
}

func TestPruneWaitsForTheGracePeriod(t *testing.T) {
	n := start(t, newPath(t))
	id := n.assign(numbered(1))
	t0 := time.Unix(1000, 0)
	prune := func(at time.Duration, want int, inUse ...uint64) {
		t.Helper()
		set := map[uint64]bool{}
		for _, id := range inUse {
			set[id] = true
		}
		if got, err := n.Prune(set, t0.Add(at)); err != nil || got != want {
			t.Fatalf("after %v: dropped %d, %v; want %d", at, got, err, want)
		}
	}
	prune(0, 0)
	prune(DefaultGrace-1, 0)
	prune(DefaultGrace, 0, id) // used again: the wait begins anew
	prune(2*DefaultGrace, 0)
	n.assign(numbered(1)) // so does an assignment
	prune(3*DefaultGrace, 0)
	prune(4*DefaultGrace, 1)
	if _, ok := n.Lookup(id); ok {
		t.Error("row is still there")
	}
	if again := n.restart().assign(numbered(1)); again <= id {
		t.Errorf("number %d after %d was dropped", again, id)
	}
}

// TestDamagedFile cuts the file at every length and flips every byte: each is
// refused by name, none is taken for an empty or another file.
func TestDamagedFile(t *testing.T) {
	n := start(t, newPath(t))
	n.assign(numbered(1))
	data, err := os.ReadFile(n.path)
	if err != nil {
		t.Fatal(err)
	}
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, damaged []byte) {
		t.Helper()
		if err := os.WriteFile(n.path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := New(n.path, tables, Options{})
		if err == nil || !strings.Contains(err.Error(), n.path) || !strings.Contains(err.Error(), "restore it from a backup") {
			t.Errorf("%s: error %v", what, err)
		}
	}
	for i := range len(data) - 1 { // the last byte is a line end
		check(fmt.Sprintf("cut at %d", i), data[:i])
		flipped := append([]byte(nil), data...)
		flipped[i] ^= 1
		check(fmt.Sprintf("byte %d flipped", i), flipped)
	}
}

// TestCrashWhileWriting: a file left half written aside does no harm.
func TestCrashWhileWriting(t *testing.T) {
	n := start(t, newPath(t))
	id := n.assign(numbered(1))
	if err := os.WriteFile(n.path+".new", []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := n.restart().assign(numbered(1)); got != id {
		t.Errorf("number %d, want %d", got, id)
	}
}

// TestUnwritableFolder: what could not be made durable is not handed out, and
// its number is not used again.
func TestUnwritableFolder(t *testing.T) {
	n := start(t, newPath(t))
	first := n.assign(numbered(1))
	dir := filepath.Dir(n.path)
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	if id, err := n.Assign("x", nil, "", nil); err == nil {
		t.Fatalf("assigned %d without a folder", id)
	}
	if got := n.tables.Identities.NumObjects(n.tables.DB.ReadTxn()); got != 1 {
		t.Errorf("%d rows, want 1", got)
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	if id, err := n.Assign("x", nil, "", nil); err != nil || id != first+2 {
		t.Errorf("assigned %d, %v; want %d", id, err, first+2)
	}
}

func TestConcurrentUse(t *testing.T) {
	n := start(t, newPath(t))
	const workers, contents = 8, 20
	got := make([][]uint64, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range contents {
				id, err := n.Assign("ns", nil, "", map[string]string{"n": fmt.Sprint(i)})
				if err != nil {
					t.Error(err)
				}
				got[w] = append(got[w], id)
			}
		})
	}
	wg.Wait()
	seen := map[uint64]bool{}
	for i := range contents {
		for w := range workers {
			if got[w][i] != got[0][i] {
				t.Errorf("content %d has numbers %d and %d", i, got[0][i], got[w][i])
			}
		}
		if seen[got[0][i]] {
			t.Errorf("number %d for two contents", got[0][i])
		}
		seen[got[0][i]] = true
	}
}

func TestAssignAllWritesOnce(t *testing.T) {
	n := start(t, newPath(t))
	var cs []Content
	for i := range 1000 {
		cs = append(cs, numbered(i%500))
	}
	ids, err := n.AssignAll(cs)
	if err != nil {
		t.Fatal(err)
	}
	again := n.restart()
	for i, c := range cs {
		if got := again.assign(c); got != ids[i] {
			t.Fatalf("content %d has number %d after a restart, had %d", i, got, ids[i])
		}
	}
}

func BenchmarkAssignKnown(b *testing.B) {
	tables, err := state.New()
	if err != nil {
		b.Fatal(err)
	}
	a, err := New(filepath.Join(b.TempDir(), "identities.json"), tables, Options{})
	if err != nil {
		b.Fatal(err)
	}
	labels := map[string]string{"app": "web", "pod-template-hash": "abc", "team": "a"}
	for b.Loop() {
		if _, err := a.Assign("shop", labels, "web", labels); err != nil {
			b.Fatal(err)
		}
	}
}

// The file is lost while kernel maps and pods still have its numbers.
func TestFloor(t *testing.T) {
	path := newPath(t)
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	a, err := New(path, tables, Options{Floor: 4711})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t, path, a}
	if id := n.assign(numbered(1)); id != 4712 {
		t.Errorf("the first number above 4711 is %d", id)
	}
	if err := n.Raise(4000); err != nil {
		t.Fatal(err)
	}
	if id := n.assign(numbered(2)); id != 4713 {
		t.Errorf("a lower floor changed something: %d", id)
	}
	if err := n.Raise(9000); err != nil {
		t.Fatal(err)
	}
	// Nothing was handed out, and the next start is not told of the floor.
	if id := n.restart().assign(numbered(3)); id <= 9000 {
		t.Errorf("after a restart %d is handed out", id)
	}
	if id := n.restart().assign(numbered(1)); id != 4712 {
		t.Errorf("the first content has %d by now", id)
	}
	if err := n.Raise(^uint64(0)); err == nil {
		t.Error("there are numbers above the greatest")
	}
}
