// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// memory is a target that fails as fault says. A failed operation may have had
// its effect all the same.
type memory struct {
	mu                       sync.Mutex
	have                     map[string]int
	updates, deletes, prunes int
	fault                    func(op string) (effect bool, err error)
}

func (m *memory) do(op string, count *int, effect func()) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	*count++
	if m.fault != nil {
		if done, err := m.fault(op); err != nil {
			if done {
				effect()
			}
			return err
		}
	}
	effect()
	return nil
}

func (m *memory) Update(_ context.Context, k string, v int) error {
	return m.do("update "+k, &m.updates, func() { m.have[k] = v })
}

func (m *memory) Delete(_ context.Context, k string) error {
	return m.do("delete "+k, &m.deletes, func() { delete(m.have, k) })
}

func (m *memory) Prune(_ context.Context, want map[string]int) error {
	return m.do("prune", &m.prunes, func() {
		maps.DeleteFunc(m.have, func(k string, _ int) bool { _, ok := want[k]; return !ok })
	})
}

func (m *memory) operations() [3]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return [3]int{m.updates, m.deletes, m.prunes}
}

// rig is a reconciler that runs, in a bubble of fake time, until its test ends.
type rig struct {
	t *testing.T
	*Reconciler[string, int]
	target *memory

	mu       sync.Mutex
	want     map[string]int
	revision uint64
}

func run(t *testing.T, target *memory, want map[string]int) *rig {
	t.Helper()
	g := &rig{t: t, target: target, want: want, revision: 1}
	r, err := New(Config[string, int]{
		Name: "memory", Target: target, Log: slog.New(slog.DiscardHandler), MinBackoff: time.Second, MaxBackoff: 10 * time.Second,
		Desired: func() (map[string]int, uint64) {
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.want, g.revision
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	g.Reconciler = r
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return g
}

// set changes what is wanted and waits until nothing moves any more.
func (g *rig) set(want map[string]int) {
	g.mu.Lock()
	g.want = want
	g.revision++
	g.mu.Unlock()
	g.Trigger()
	synctest.Wait()
}

func (g *rig) check(when string, have map[string]int, operations [3]int) {
	g.t.Helper()
	if d := cmp.Diff(have, g.target.have); d != "" {
		g.t.Errorf("%s (-want +got):\n%s", when, d)
	}
	if got := g.target.operations(); got != operations {
		g.t.Errorf("%s: %v updates, deletes, prunes, want %v", when, got, operations)
	}
}

func TestOnlyChangesAreApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := run(t, &memory{have: map[string]int{"stale": 1, "a": 7}}, map[string]int{"a": 1, "b": 1})
		synctest.Wait()
		g.check("start", map[string]int{"a": 1, "b": 1}, [3]int{2, 0, 1})
		g.set(map[string]int{"a": 1, "b": 2, "c": 3})
		g.check("change", map[string]int{"a": 1, "b": 2, "c": 3}, [3]int{4, 0, 1})
		g.set(map[string]int{"c": 3})
		g.check("removal", map[string]int{"c": 3}, [3]int{4, 2, 1})
		g.set(map[string]int{"c": 3})
		g.check("nothing", map[string]int{"c": 3}, [3]int{4, 2, 1})
		if s, _ := g.Status(); s.Applied != 4 || s.Desired != 4 || s.Pending != 0 || s.Keys != 1 {
			t.Errorf("status %+v", s)
		}
	})
}

func TestSweepRestoresWhatOthersChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := run(t, &memory{have: map[string]int{}}, map[string]int{"a": 1})
		synctest.Wait()
		g.target.mu.Lock()
		g.target.have = map[string]int{"foreign": 1}
		g.target.mu.Unlock()
		time.Sleep(5 * time.Minute) // of the bubble
		synctest.Wait()
		g.check("after the interval", map[string]int{"a": 1}, [3]int{2, 0, 2})
	})
}

// Renew does so at once, and what failed does not wait for its turn.
func TestRenew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := true
		m := &memory{have: map[string]int{}, fault: func(op string) (bool, error) {
			if broken && op == "update b" {
				return false, errFault
			}
			return true, nil
		}}
		g := run(t, m, map[string]int{"a": 1, "b": 2})
		time.Sleep(time.Minute) // b waits for 10 s each time by now
		synctest.Wait()
		start := time.Now()
		g.target.mu.Lock()
		g.target.have, broken = map[string]int{"foreign": 1}, false
		before := [3]int{m.updates, m.deletes, m.prunes}
		g.target.mu.Unlock()
		g.Renew()
		synctest.Wait()
		g.check("renewed", map[string]int{"a": 1, "b": 2}, [3]int{before[0] + 2, before[1], before[2] + 1})
		if d := time.Since(start); d != 0 {
			t.Errorf("it took %s", d)
		}
		time.Sleep(time.Minute)
		g.check("renewed once", map[string]int{"a": 1, "b": 2}, [3]int{before[0] + 2, before[1], before[2] + 1})
	})
}

var errFault = errors.New("injected")

func TestBackoffIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var at []time.Duration
		start := time.Now()
		m := &memory{have: map[string]int{}, fault: func(op string) (bool, error) {
			if op == "update a" {
				at = append(at, time.Since(start)/time.Second)
				return false, errFault
			}
			return false, nil
		}}
		g := run(t, m, map[string]int{"a": 1, "b": 1})
		synctest.Wait()
		g.set(map[string]int{"a": 1, "b": 2}) // another key's change does not hasten a
		time.Sleep(40 * time.Second)
		synctest.Wait()
		m.mu.Lock()
		defer m.mu.Unlock()
		if d := cmp.Diff([]time.Duration{0, 1, 3, 7, 15, 25, 35}, at); d != "" {
			t.Errorf("attempts at seconds (-want +got):\n%s", d)
		}
		if m.have["b"] != 2 {
			t.Errorf("b is %d: want 2", m.have["b"])
		}
		s, _ := g.Status()
		if s.Pending != 1 || s.Applied != 0 || !errors.Is(s.LastError, errFault) {
			t.Errorf("status %+v", s)
		}
	})
}

func TestNewValueIsTriedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := true
		m := &memory{have: map[string]int{}, fault: func(op string) (bool, error) {
			if bad && op != "prune" {
				return true, errFault
			}
			return false, nil
		}}
		g := run(t, m, map[string]int{"a": 1, "b": 1})
		synctest.Wait()
		m.mu.Lock()
		bad = false
		m.mu.Unlock()
		g.set(map[string]int{"a": 2}) // a has another value, b is to go although it may not be there
		g.check("at once", map[string]int{"a": 2}, [3]int{3, 1, 1})
		if s, _ := g.Status(); s.Applied != 2 || s.LastError != nil {
			t.Errorf("status %+v", s)
		}
	})
}

func TestFailedPruneHoldsTheRevisionBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := true
		m := &memory{have: map[string]int{"stale": 1}, fault: func(op string) (bool, error) {
			if bad && op == "prune" {
				return false, errFault
			}
			return false, nil
		}}
		g := run(t, m, map[string]int{"a": 1})
		synctest.Wait()
		if s, _ := g.Status(); s.Applied != 0 || s.Pending != 1 || m.have["a"] != 1 {
			t.Errorf("status %+v, target %v", s, m.have)
		}
		m.mu.Lock()
		bad = false
		m.mu.Unlock()
		if err := g.Wait(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		g.check("in the end", map[string]int{"a": 1}, [3]int{1, 0, 2})
	})
}

func TestWaitSaysWhatIsInTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{have: map[string]int{}, fault: func(op string) (bool, error) {
			if strings.HasPrefix(op, "update") {
				return false, errFault
			}
			return false, nil
		}}
		g := run(t, m, map[string]int{"a": 1})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := g.Wait(ctx, 1)
		const want = "memory: revision 1 is not in force: at revision 0 with 1 of 1 pending: context deadline exceeded: last error: update a of memory: injected"
		if err == nil || err.Error() != want {
			t.Errorf("error %q, want %q", err, want)
		}
	})
}

// TestFaults: one operation in ten fails, half of these with effect. After each
// of many random changes the target comes to hold exactly what is wanted.
func TestFaults(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			faults := rand.New(rand.NewPCG(seed, 2))
			m := &memory{have: map[string]int{"stale": 1}, fault: func(string) (bool, error) {
				if faults.IntN(10) == 0 {
					return faults.IntN(2) == 0, errFault
				}
				return false, nil
			}}
			want := map[string]int{"a": 0}
			g := run(t, m, want)
			for revision := uint64(2); revision < 60; revision++ {
				want = maps.Clone(want)
				for range 1 + rng.IntN(5) {
					k := string(rune('a' + rng.IntN(20)))
					if delete(want, k); rng.IntN(3) > 0 {
						want[k] = rng.IntN(1000)
					}
				}
				g.set(want)
				if rng.IntN(3) == 0 {
					continue // the next change comes before this one is in force
				}
				if err := g.Wait(t.Context(), revision); err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(want, m.have); d != "" {
					t.Fatalf("seed %d, revision %d (-want +got):\n%s", seed, revision, d)
				}
			}
		})
	}
}

func TestConfigIsChecked(t *testing.T) {
	if _, err := New(Config[string, int]{Name: "x"}); err == nil {
		t.Error("a reconciler without a target is accepted")
	}
}
