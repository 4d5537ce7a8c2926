// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

func site(t *testing.T) *Site {
	t.Helper()
	nstest.Need(t)
	s, err := NewSite()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		names, err := filepath.Glob(NetnsPath(namePrefix) + "*")
		if err != nil || len(names) > 0 {
			t.Errorf("left behind: %v, %v", names, err)
		}
	})
	return s
}

func self() []string { return []string{"/proc/self/exe", "bench-process"} }

// Every baseline carries IPv4 and IPv6, and every load.
func TestBaselines(t *testing.T) {
	for _, b := range []Baseline{Host, HostAcross, Plain, PlainAcross, PlainVXLAN} {
		for _, ipv6 := range []bool{false, true} {
			t.Run(string(b)+map[bool]string{false: " IPv4", true: " IPv6"}[ipv6], func(t *testing.T) {
				target, err := site(t).Build(b, 0, ipv6)
				if err != nil {
					t.Fatal(err)
				}
				plan := Plan{Targets: []Target{target}, Rounds: 1, Self: self(), Loads: []Load{
					{Mode: RR, Bytes: 200, Connections: 4, Duration: 20 * time.Millisecond},
					{Mode: CRR, Bytes: 200, Connections: 1, Duration: 20 * time.Millisecond},
					{Mode: Stream, Connections: 1, Duration: 20 * time.Millisecond},
				}}
				if _, err := plan.Run(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// A against A, both of one kind: the whole run, its shape and its arithmetic.
func TestRunComparesInTurns(t *testing.T) {
	s := site(t)
	a, err := s.Build(Plain, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Build(Plain, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	a.Name, b.Name = "a", "b"
	load := Load{Mode: RR, Bytes: 200, Connections: 1, Warmup: 10 * time.Millisecond, Duration: 50 * time.Millisecond}
	plan := Plan{Targets: []Target{a, b}, Loads: []Load{load}, Rounds: 3, Self: self(), Calibration: 50 * time.Millisecond}
	r, err := plan.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := r.Cases[0]
	var order []string
	for _, s := range c.Samples {
		order = append(order, s.Target)
	}
	if want := []string{"a", "b", "b", "a", "a", "b", "b", "a"}; !slices.Equal(order, want) {
		t.Errorf("order %v, want %v: the warm-up, then three rounds", order, want)
	}
	if len(r.Idle) != 2 || len(c.Summaries) != 2 || len(c.Comparisons) != 1 || r.Facts.Kernel == "" {
		t.Errorf("result %+v", r)
	}
	// How close is for a quiet machine to tell; here only that it is a ratio.
	if got := c.Comparisons[0]; got.Target != "a" || got.Baseline != "b" || got.Rate.Median < 0.3 || got.Rate.Median > 3 {
		t.Errorf("comparison %+v", got)
	}
}

func TestRunNeedsItsServer(t *testing.T) {
	target, err := site(t).Build(Host, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	plan := Plan{Targets: []Target{target}, Rounds: 1, Self: self(), Loads: []Load{{Mode: RR, Bytes: 1, Connections: 1, Duration: time.Millisecond}}}
	plan.Targets[0].Addr = target.Addr.Next()
	if _, err := plan.Run(t.Context()); err == nil {
		t.Error("no error from an address that is not the server's")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	plan.Targets[0].Addr = target.Addr
	if _, err := plan.Run(ctx); err == nil {
		t.Error("no error from a run that was told to end")
	}
}

// What a killed weft bench leaves, the next one removes.
func TestNewSiteRemovesWhatIsAbandoned(t *testing.T) {
	nstest.Need(t)
	const name = namePrefix + "4194399-1-client" // above the highest process number
	if err := netdev.CreateNetNS(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netdev.DeleteNetNS(name) })
	if _, err := NewSite(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(NetnsPath(name)); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", name, err)
	}
}

// `ip netns add` may come at any time: what it does to the folder of namespaces
// must not keep ours from being removed.
func TestSiteBesideIPNetNS(t *testing.T) {
	s := site(t)
	if _, err := s.Build(Host, 0, false); err != nil {
		t.Fatal(err)
	}
	other := namePrefix + "other"
	if out, err := exec.Command("ip", "netns", "add", other).CombinedOutput(); err != nil {
		t.Fatalf("ip netns add: %v: %s", err, out)
	}
	if err := errors.Join(s.Close(), netdev.DeleteNetNS(other)); err != nil {
		t.Error(err)
	}
}
