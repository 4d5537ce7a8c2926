// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var opts = cmp.Options{cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()}

// world is what a Pool lives in: a file, a clock and a boot.
type world struct {
	t    testing.TB
	path string
	now  time.Duration
	boot string
}

func newWorld(t testing.TB) *world {
	return &world{t: t, path: filepath.Join(t.TempDir(), "ipam.json"), now: time.Hour, boot: "boot1"}
}

func (w *world) options(cidrs ...string) Options {
	o := Options{Path: w.path, BootID: w.boot, Now: func() time.Duration { return w.now }, Log: slog.New(slog.DiscardHandler)}
	for _, c := range cidrs {
		o.CIDRs = append(o.CIDRs, netip.MustParsePrefix(c))
	}
	return o
}

func (w *world) open(cidrs ...string) *Pool {
	w.t.Helper()
	p, err := Open(w.options(cidrs...))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { p.Close() })
	return p
}

func (w *world) add(p *Pool, id string) string {
	w.t.Helper()
	a, _, err := p.Allocate(key(id), nil)
	if err != nil {
		w.t.Fatal(err)
	}
	return join(a.IPs)
}

func (w *world) del(p *Pool, id string) {
	w.t.Helper()
	if err := p.Release(key(id)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) want(got, want string) {
	w.t.Helper()
	if got != want {
		w.t.Errorf("got %s, want %s", got, want)
	}
}

func key(id string) Key { return Key{id, "eth0"} }

func join(ips []netip.Addr) string {
	ss := make([]string, len(ips))
	for i, ip := range ips {
		ss[i] = ip.String()
	}
	return strings.Join(ss, " ")
}

func TestAllocate(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.244.1.0/24", "fd00:10:244:1::/64")
	w.want(w.add(p, "a"), "10.244.1.2 fd00:10:244:1::2")
	w.want(w.add(p, "b"), "10.244.1.3 fd00:10:244:1::3")
	w.want(w.add(p, "a"), "10.244.1.2 fd00:10:244:1::2")
	other, created, err := p.Allocate(Key{"a", "net1"}, nil)
	if err != nil || !created || join(other.IPs) != "10.244.1.4 fd00:10:244:1::4" {
		t.Errorf("another interface of a container: %v %v %v", other, created, err)
	}
}

func TestEdgesAreNeverGivenOut(t *testing.T) {
	for cidr, want := range map[string]struct{ size, last string }{
		"10.0.0.0/30":  {"1", "10.0.0.2"},
		"10.0.0.8/29":  {"5", "10.0.0.14"},
		"10.0.0.0/24":  {"253", "10.0.0.254"},
		"10.0.0.77/24": {"253", "10.0.0.254"},
		"fd00::/126":   {"2", "fd00::3"},
		"fd00::/120":   {"254", "fd00::ff"},
		"10.1.0.0/16":  {"65533", "10.1.255.254"},
	} {
		t.Run(strings.ReplaceAll(cidr, "/", "_"), func(t *testing.T) {
			w := newWorld(t)
			p := w.open(cidr)
			n, last := 0, ""
			for ; ; n++ {
				a, _, err := p.Allocate(key(strconv.Itoa(n)), nil)
				var full *FullError
				if errors.As(err, &full) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				last = join(a.IPs)
			}
			w.want(strconv.Itoa(n), want.size)
			w.want(last, want.last)
			w.want(strconv.Itoa(p.Usage()[0].Size), want.size)
		})
	}
}

func TestLargeRangesStaySmall(t *testing.T) {
	for _, cidr := range []string{"10.0.0.0/8", "fd00::/64", "fd00::/16"} {
		w := newWorld(t)
		p := w.open(cidr)
		for i := range MaxAddresses {
			w.add(p, strconv.Itoa(i))
			w.del(p, strconv.Itoa(i))
		}
		w.now += time.Hour
		first := netip.MustParsePrefix(cidr).Addr().Next().Next()
		w.want(w.add(p, "again"), first.String())
	}
}

func TestQuarantineAndOrder(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/29") // .2 to .6
	for _, id := range []string{"a", "b", "c", "d"} {
		w.add(p, id)
	}
	w.del(p, "c")
	w.now += 10 * time.Second
	w.del(p, "a")
	w.want(w.add(p, "e"), "10.0.0.6") // never used goes first
	_, _, err := p.Allocate(key("f"), nil)
	w.want(err.Error(), "pod CIDR 10.0.0.0/29 is full: of 5 addresses 3 are allocated and 2 were released too recently; the next is free in 50s")
	if _, ok := p.Get(key("f")); ok {
		t.Error("a refused allocation is there")
	}
	w.now += 50*time.Second - 1
	if _, _, err := p.Allocate(key("f"), nil); err == nil {
		t.Error("an address was reused too early")
	}
	w.now++
	w.want(w.add(p, "f"), "10.0.0.4")
	w.now += time.Minute
	w.want(w.add(p, "g"), "10.0.0.2")
	_, _, err = p.Allocate(key("h"), nil)
	w.want(err.Error(), "pod CIDR 10.0.0.0/29 is full: of 5 addresses 5 are allocated and 0 were released too recently")
}

// A family that is full must not cost the other an address.
func TestBothFamiliesOrNone(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/29", "fd00::/126")
	w.want(w.add(p, "a"), "10.0.0.2 fd00::2")
	w.want(w.add(p, "b"), "10.0.0.3 fd00::3")
	if _, _, err := p.Allocate(key("c"), nil); err == nil || !strings.Contains(err.Error(), "fd00::/126 is full") {
		t.Errorf("error %v", err)
	}
	if u := p.Usage()[0]; u.Allocated != 2 || u.Free != 3 || u.Quarantined != 0 {
		t.Errorf("usage %+v", u)
	}
}

func TestRestart(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/29")
	for _, id := range []string{"a", "b", "c"} {
		w.add(p, id)
	}
	if err := p.SetData(key("b"), json.RawMessage(`{"x":1}`)); err != nil {
		t.Fatal(err)
	}
	w.del(p, "a")
	before := p.All()
	p.Close()

	w.now += 20 * time.Second
	p = w.open("10.0.0.0/29")
	if diff := cmp.Diff(before, p.All(), opts); diff != "" {
		t.Errorf("allocations (-before +after):\n%s", diff)
	}
	w.want(w.add(p, "d"), "10.0.0.5")
	w.want(w.add(p, "e"), "10.0.0.6")
	_, _, err := p.Allocate(key("f"), nil)
	w.want(err.Error(), "pod CIDR 10.0.0.0/29 is full: of 5 addresses 4 are allocated and 1 were released too recently; the next is free in 40s")
	p.Close()
	w.now += 40 * time.Second
	w.want(w.add(w.open("10.0.0.0/29"), "f"), "10.0.0.2")
}

func TestReboot(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/29")
	for _, id := range []string{"a", "b", "c"} {
		w.add(p, id)
	}
	w.del(p, "b")
	p.Close()

	w.boot, w.now = "boot2", 25*time.Second
	p = w.open("10.0.0.0/29")
	if all := p.All(); len(all) != 0 {
		t.Errorf("allocations of another boot: %v", all)
	}
	w.want(w.add(p, "d"), "10.0.0.5")
	w.want(w.add(p, "e"), "10.0.0.6")
	_, _, err := p.Allocate(key("f"), nil)
	if err == nil || !strings.Contains(err.Error(), "3 were released too recently; the next is free in 35s") {
		t.Errorf("error %v", err)
	}
	w.now = time.Minute
	w.want(w.add(p, "f"), "10.0.0.3") // was free the longest
	w.want(w.add(p, "g"), "10.0.0.2")
}

func TestOtherCIDR(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/29")
	w.add(p, "a")
	w.add(p, "b")
	w.del(p, "b")
	p.Close()

	p = w.open()
	if _, _, err := p.Allocate(key("c"), nil); !errors.Is(err, ErrNoCIDR) {
		t.Errorf("without CIDR: %v", err)
	}
	set := func(c string) {
		t.Helper()
		if err := p.SetCIDRs([]netip.Prefix{netip.MustParsePrefix(c)}); err != nil {
			t.Fatal(err)
		}
	}
	set("10.9.0.0/29")
	w.want(w.add(p, "a"), "10.0.0.2")
	w.want(w.add(p, "c"), "10.9.0.2")
	w.del(p, "a")
	set("10.0.0.0/29")
	w.want(w.add(p, "d"), "10.0.0.4") // .2 and .3 are in quarantine
	w.want(w.add(p, "c"), "10.9.0.2")
}

func TestRefused(t *testing.T) {
	w := newWorld(t)
	for want, change := range map[string]func(*Options){
		"pod CIDR 10.0.0.0/31: too small":            func(o *Options) { o.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/31")} },
		"pod CIDR ::ffff:10.0.0.0/120: write it as":  func(o *Options) { o.CIDRs = []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/120")} },
		"want one of each family at most":            func(o *Options) { o.CIDRs = append(o.CIDRs, o.CIDRs[0]) },
		"pod CIDR invalid Prefix: want an address":   func(o *Options) { o.CIDRs = []netip.Prefix{{}} },
		"boot id must be set":                        func(o *Options) { o.BootID = "" },
		"path of the address file must be set":       func(o *Options) { o.Path = "" },
		"quarantine -1s: must not be negative":       func(o *Options) { o.Quarantine = -time.Second },
		"open lock of the address file: ":            func(o *Options) { o.Path = "/nowhere/ipam.json" },
		"read the address file: ":                    func(o *Options) { o.Path = w.t.TempDir() + "/d"; os.Mkdir(o.Path, 0o700) },
		"line 1: invalid character 'x'":              func(o *Options) { os.WriteFile(o.Path, []byte("x\n"), 0o600) },
		"version 7: this agent knows 1":              func(o *Options) { os.WriteFile(o.Path, []byte(`{"version":7}`), 0o600) },
		"line 2: invalid character 'z' looking for ": func(o *Options) { file(o.Path, `{"version":1,"boot":"boot1"}`, "z", "") },
		"line 3: neither set, delete nor free":       func(o *Options) { file(o.Path, `{"version":1,"boot":"boot1"}`, `{"free":"10.0.0.2"}`, "{}", "") },
	} {
		o := w.options("10.0.0.0/24")
		o.Path = filepath.Join(t.TempDir(), "ipam.json")
		change(&o)
		if _, err := Open(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	w.open("10.0.0.0/24")
	if _, err := Open(w.options("10.0.0.0/24")); err == nil || !strings.Contains(err.Error(), "is another agent running") {
		t.Errorf("a second pool on the file: %v", err)
	}
}

func file(path string, lines ...string) {
	_ = os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600)
}

// After a crash of the kernel the lines behind the first may be anything.
func TestGarbageOfAnotherBoot(t *testing.T) {
	w := newWorld(t)
	file(w.path, `{"version":1,"boot":"boot0"}`, `{"set":{"containerID":"a","interface":"eth0","ips":["10.0.0.2"]}}`, "\x00\x00\x00", "x")
	p := w.open("10.0.0.0/24")
	if all := p.All(); len(all) != 0 {
		t.Errorf("allocations: %v", all)
	}
}

// A file cut at any byte gives the state after the last whole line, and never
// an address twice.
func TestTornWrite(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/29", "fd00::/64")
	states := map[int][]Allocation{}
	note := func() {
		b, err := os.ReadFile(w.path)
		if err != nil {
			t.Fatal(err)
		}
		states[bytes.Count(b, []byte{'\n'})] = p.All()
	}
	note()
	w.add(p, "a")
	note()
	w.add(p, "b")
	note()
	if err := p.SetData(key("b"), json.RawMessage(`{"x":"y"}`)); err != nil {
		t.Fatal(err)
	}
	note()
	w.del(p, "a")
	note()
	w.add(p, "c")
	note()
	p.Close()
	whole, err := os.ReadFile(w.path)
	if err != nil {
		t.Fatal(err)
	}
	for cut := bytes.IndexByte(whole, '\n') + 1; cut <= len(whole); cut++ {
		w.path = filepath.Join(t.TempDir(), "ipam.json")
		if err := os.WriteFile(w.path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		p, err := Open(w.options("10.0.0.0/29", "fd00::/64"))
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		if diff := cmp.Diff(states[bytes.Count(whole[:cut], []byte{'\n'})], p.All(), opts); diff != "" {
			t.Fatalf("cut at %d (-want +got):\n%s", cut, diff)
		}
		noDuplicates(t, p)
		p.Close()
	}
}

func noDuplicates(t *testing.T, p *Pool) {
	t.Helper()
	seen := map[netip.Addr]Key{}
	for _, a := range p.All() {
		for _, ip := range a.IPs {
			if other, ok := seen[ip]; ok {
				t.Fatalf("%s and %s both have %s", other, a.Key, ip)
			}
			seen[ip] = a.Key
		}
	}
}

// A write that fails changes neither the pool nor the file.
func TestFailedWrite(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/29")
	w.add(p, "a")
	good := p.file.f
	broken, err := os.Open(w.path) // read only
	if err != nil {
		t.Fatal(err)
	}
	defer broken.Close()
	p.file.f = broken
	before := p.All()
	_, _, err1 := p.Allocate(key("b"), nil)
	err2, err3 := p.SetData(key("a"), json.RawMessage("1")), p.Release(key("a"))
	for _, err := range []error{err1, err2, err3} {
		if err == nil || !strings.Contains(err.Error(), "append to the address file") {
			t.Errorf("error %v", err)
		}
	}
	if diff := cmp.Diff(before, p.All(), opts); diff != "" {
		t.Errorf("allocations changed:\n%s", diff)
	}
	p.file.f = good
	w.want(w.add(p, "b"), "10.0.0.3")
}

// model is the dumb pool: a list of all addresses with the time since when
// each is free.
type model struct {
	addrs []netip.Addr
	free  map[netip.Addr]time.Duration // never used: -1
	owner map[string]netip.Addr
}

func newModel(cidr string) *model {
	m := &model{free: map[netip.Addr]time.Duration{}, owner: map[string]netip.Addr{}}
	p := netip.MustParsePrefix(cidr)
	for a := p.Addr().Next().Next(); p.Contains(a.Next()); a = a.Next() {
		m.addrs = append(m.addrs, a)
		m.free[a] = -1
	}
	return m
}

func (m *model) add(id string, now time.Duration) (netip.Addr, bool) {
	if a, ok := m.owner[id]; ok {
		return a, true
	}
	best := netip.Addr{}
	for _, a := range m.addrs {
		at, ok := m.free[a]
		if ok && (at < 0 || now-at >= DefaultQuarantine) && (!best.IsValid() || at < m.free[best]) {
			best = a
		}
	}
	if best.IsValid() {
		delete(m.free, best)
		m.owner[id] = best
	}
	return best, best.IsValid()
}

func (m *model) del(id string, now time.Duration) {
	if a, ok := m.owner[id]; ok {
		delete(m.owner, id)
		m.free[a] = now
	}
}

func TestAgainstModel(t *testing.T) {
	const cidr = "10.0.0.0/27"
	for seed := range uint64(30) {
		w, m := newWorld(t), newModel(cidr)
		rnd := rand.New(rand.NewPCG(seed, 1))
		p := w.open(cidr)
		for step := range 2000 {
			id := strconv.Itoa(rnd.IntN(40))
			w.now += time.Duration(1 + rnd.Int64N(int64(4*time.Second)))
			switch n := rnd.IntN(100); {
			case n < 50:
				want, ok := m.add(id, w.now)
				a, _, err := p.Allocate(key(id), nil)
				if ok != (err == nil) || ok && a.IPs[0] != want {
					t.Fatalf("seed %d step %d: Allocate = %v %v, model %v", seed, step, a, err, want)
				}
			case n < 98:
				m.del(id, w.now)
				w.del(p, id)
			case n < 99:
				p.Close()
				p = w.open(cidr)
			default:
				p.mu.Lock()
				err := p.compact()
				p.mu.Unlock()
				if err != nil {
					t.Fatal(err)
				}
			}
			if u := p.Usage()[0]; u.Allocated != len(m.owner) {
				t.Fatalf("seed %d step %d: usage %+v, model %d", seed, step, u, len(m.owner))
			}
		}
	}
}

func TestCompaction(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/24")
	for i := range 20000 {
		w.add(p, strconv.Itoa(i))
		w.del(p, strconv.Itoa(i))
		w.now += time.Second
	}
	fi, err := os.Stat(w.path)
	if err != nil {
		t.Fatal(err)
	}
	if fi.Size() > 1<<20 {
		t.Errorf("the file has %d bytes", fi.Size())
	}
	entries, err := os.ReadDir(filepath.Dir(w.path))
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	if !slices.Equal(names, []string{"ipam.json", "ipam.json.lock"}) {
		t.Errorf("files: %v", names)
	}
}

func TestParallel(t *testing.T) {
	w := newWorld(t)
	p := w.open("10.0.0.0/16", "fd00::/64")
	start := time.Now()
	var wg sync.WaitGroup
	for worker := range 50 {
		wg.Go(func() {
			for i := range 100 {
				k := key(fmt.Sprintf("%d-%d", worker, i))
				if _, _, err := p.Allocate(k, json.RawMessage(`{"phase":"wiring"}`)); err != nil {
					t.Error(err)
				}
				if err := p.SetData(k, json.RawMessage(`{"phase":"wired"}`)); err != nil {
					t.Error(err)
				}
				if i%2 == 0 {
					if err := p.Release(k); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	t.Logf("5000 allocations, 2500 releases: %s", time.Since(start))
	noDuplicates(t, p)
	if n := len(p.All()); n != 2500 {
		t.Errorf("%d allocations, want 2500", n)
	}
}

func BenchmarkAllocateRelease(b *testing.B) {
	w := newWorld(b)
	p := w.open("10.0.0.0/16", "fd00::/64")
	i := 0
	for b.Loop() {
		k := key(strconv.Itoa(i))
		if _, _, err := p.Allocate(k, nil); err != nil {
			b.Fatal(err)
		}
		if err := p.Release(k); err != nil {
			b.Fatal(err)
		}
		i, w.now = i+1, w.now+time.Millisecond*2
	}
}

func TestClock(t *testing.T) {
	id, err := BootID()
	if err != nil || len(id) != 36 {
		t.Errorf("BootID = %q %v", id, err)
	}
	if d := SinceBoot(); d <= 0 || SinceBoot() < d {
		t.Errorf("SinceBoot = %s", d)
	}
}
