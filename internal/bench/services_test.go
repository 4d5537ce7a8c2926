// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/source/manifest"
)

// A whole run with few services: every connection succeeds, each way of a
// change is measured, and nothing is left behind.
func TestServices(t *testing.T) {
	nstest.Need(t)
	plan := ServicesPlan{
		Counts: []int{3, 50}, Changes: 2, Budget: 10 * time.Second,
		Rounds: 1, Duration: 50 * time.Millisecond, Self: self(),
	}
	r, err := plan.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range r.Nodes {
		if n.Start <= 0 || n.Sync <= 0 || n.Sync > n.Start || n.Memory == nil || n.Memory.Heap == 0 || n.Memory.Kernel == 0 {
			t.Errorf("%s: start %v, sync %v, memory %+v", n.Target, n.Start, n.Sync, n.Memory)
		}
		if len(n.Changes) != 2 || len(n.Changes[0].Milliseconds) != 2 || n.Changes[1].P50 <= 0 {
			t.Errorf("%s: changes %+v", n.Target, n.Changes)
		}
	}
	var out strings.Builder
	if err := r.Print(&out); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"weft@3", "weft@50 ÷ weft@3", "weft@50 ÷ direct", "file", "row"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
	checkNothingLeft(t)
}

func checkNothingLeft(t *testing.T) {
	t.Helper()
	mount, err := cgroup.Mount()
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"/run/netns", mount, pinRoot, os.TempDir()} {
		if left, err := filepath.Glob(filepath.Join(folder, fmt.Sprintf("%s%d*", namePrefix, os.Getpid()))); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
	}
}

// A run that ends early leaves nothing behind either.
func TestServicesEndsEarly(t *testing.T) {
	nstest.Need(t)
	ctx, cancel := context.WithCancel(t.Context())
	plan := ServicesPlan{
		Counts: []int{3}, Changes: 1, Budget: 10 * time.Second, Rounds: 1, Duration: 50 * time.Millisecond, Self: self(),
		Progress: func(step string) {
			if strings.Contains(step, "first connection") {
				cancel()
			}
		},
	}
	if _, err := plan.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that it is canceled", err)
	}
	checkNothingLeft(t)
}

func TestServicesPlanValidate(t *testing.T) {
	good := ServicesPlan{Counts: []int{10, 20}, Budget: time.Second}
	if err := good.validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*ServicesPlan){
		"ascending":      func(p *ServicesPlan) { p.Counts = []int{20, 10} },
		"at least one":   func(p *ServicesPlan) { p.Counts = nil },
		"0 services":     func(p *ServicesPlan) { p.KubeProxyCounts = []int{0} },
		"600000 service": func(p *ServicesPlan) { p.Counts = []int{600000} },
		"within 0s":      func(p *ServicesPlan) { p.Budget = 0 },
	} {
		p := good
		change(&p)
		if err := p.validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// The objects are what weft's own check of manifests accepts, and no two
// services share an address.
func TestFleet(t *testing.T) {
	f := fleet(300)
	seen := map[string]bool{}
	for i := range int(f) {
		for _, o := range []any{f.service(i), f.slice(i, f.endpoints(i))} {
			b, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			if _, errs := manifest.Decode("fleet.json", b); len(errs) > 0 {
				t.Fatalf("%s: %v", b, errs)
			}
		}
		for _, a := range append(f.endpoints(i), nth(firstService, i)) {
			if seen[a.String()] {
				t.Errorf("%s twice", a)
			}
			seen[a.String()] = true
		}
	}
	if got, want := nth(netip.MustParseAddr("10.96.1.250"), 10), netip.MustParseAddr("10.96.2.4"); got != want {
		t.Errorf("10 after 10.96.1.250 is %s, want %s", got, want)
	}
	objects, err := f.objects()
	if err != nil || len(objects) != 3*int(f) {
		t.Errorf("%d objects, %v", len(objects), err)
	}
}

func TestQuantile(t *testing.T) {
	var twenty []float64
	for i := range 20 {
		twenty = append(twenty, float64(20-i))
	}
	for _, c := range []struct {
		values []float64
		q      float64
		want   float64
	}{{nil, 0.5, 0}, {[]float64{7}, 0.99, 7}, {twenty, 0.5, 10}, {twenty, 0.99, 20}, {twenty, 0, 1}} {
		if got := quantile(c.values, c.q); got != c.want {
			t.Errorf("quantile %v of %v is %v, want %v", c.q, c.values, got, c.want)
		}
	}
}

func TestParseMapInfo(t *testing.T) {
	id, size, ok := parseMapInfo([]byte("pos:\t0\nflags:\t02000002\nmap_type:\t1\nmemlock:\t4096\nmap_id:\t17\nfrozen:\t0\n"))
	if id != "17" || size != 4096 || !ok {
		t.Errorf("id %q, %d bytes, %v", id, size, ok)
	}
	if _, _, ok := parseMapInfo([]byte("pos:\t0\nmemlock:\t4096\nprog_id:\t3\n")); ok {
		t.Error("a program is taken for a map")
	}
}

// A probe waits for what is not there yet, and for the right backend.
func TestProbe(t *testing.T) {
	load := Load{Mode: who, Connections: 1, Duration: time.Second}
	s, err := NewServer(load, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	keepRuntimeAway(t)
	ended := make(chan error, 1)
	go func() {
		_, err := s.Run()
		ended <- err
	}()
	a := ask{Service: s.Addr(), Want: netip.MustParseAddr("127.0.0.1"), Patience: 5 * time.Second}
	quiet := func() error { return nil }
	if f, err := a.wait(quiet); err != nil || f.Failed != "" || f.Tries != 1 {
		t.Errorf("got %+v, %v", f, err)
	}
	a.Want, a.Patience = netip.MustParseAddr("127.0.0.2"), 10*time.Millisecond
	if f, err := a.wait(quiet); err != nil || f.Failed == "" || f.Tries < 2 || f.Errors > 0 {
		t.Errorf("got %+v, %v, want that another one answers", f, err)
	}
	s.Stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if f, err := a.wait(quiet); err != nil || f.Failed == "" || f.Errors != f.Tries || f.Last == "" {
		t.Errorf("got %+v, %v, want that nobody answers", f, err)
	}
}
