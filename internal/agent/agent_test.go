// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/reconcile"
	"github.com/weft-mesh/weft/internal/state"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// testConfig is of an agent with folders of its own.
func testConfig(t *testing.T, pinPath string) *Config {
	t.Helper()
	cfg, err := parseConfig(fmt.Appendf(nil, "node: node1\nrunDir: %s\npinPath: %s\nsource: {folder: %s}\n", t.TempDir(), pinPath, t.TempDir()))
	check(t, err)
	return cfg
}

var quiet = slog.New(slog.DiscardHandler)

// A second agent with a folder of the first is refused before it has changed
// anything, and may start once the first has ended.
func TestTwoAgents(t *testing.T) {
	pins := bpffs.New(t)
	cfg := testConfig(t, filepath.Join(pins, "a"))
	first, err := newAgent(cfg, quiet)
	check(t, err)
	sameRunDir, samePins := *cfg, *cfg
	sameRunDir.PinPath = filepath.Join(pins, "b")
	samePins.RunDir = t.TempDir()
	for want, c := range map[string]*Config{
		"ipam.json.lock: resource temporarily unavailable (is another agent": &sameRunDir,
		"lock pinPath " + cfg.PinPath + ": resource temporarily unavailable": &samePins,
	} {
		if _, err := newAgent(c, quiet); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if list, _ := os.ReadDir(cfg.PinPath); len(list) != 0 {
		t.Errorf("there are pins by now: %v", list)
	}
	first.close()
	for _, c := range []*Config{&sameRunDir, &samePins} {
		a, err := newAgent(c, quiet)
		check(t, err)
		a.close()
	}
}

// identities.json is lost, while a pod has a number of it.
func TestIdentitiesLost(t *testing.T) {
	cfg := testConfig(t, filepath.Join(bpffs.New(t), "a"))
	a, err := newAgent(cfg, quiet)
	check(t, err)
	check(t, a.pool.SetCIDRs([]netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}))
	data, err := json.Marshal(map[string]any{"identity": 1234})
	check(t, err)
	_, _, err = a.pool.Allocate(ipam.Key{ContainerID: "c1", Interface: "eth0"}, data)
	check(t, err)
	a.close()
	if _, err := os.Stat(filepath.Join(cfg.RunDir, "identities.json")); !os.IsNotExist(err) {
		t.Fatalf("there is a file of identities: this test tests nothing (%v)", err)
	}
	b, err := newAgent(cfg, quiet)
	check(t, err)
	defer b.close()
	id, err := b.identities.Assign("shop", nil, "", nil)
	check(t, err)
	if id != 1235 {
		t.Errorf("the first number beside 1234 is %d", id)
	}
}

func TestMTUTooSmallForPods(t *testing.T) {
	n := &state.Node{IPs: []netip.Addr{netip.MustParseAddr("172.30.0.1")}}
	for tunnel, least := range map[string]int{"none": 1280, "vxlan": 1330} {
		cfg := testConfig(t, "/sys/fs/bpf/weft")
		cfg.Datapath.Tunnel = tunnel
		if _, err := settings(cfg, &netdev.Uplink{Name: "eth0", MTU: least}, n); err != nil {
			t.Errorf("tunnel %s, MTU %d: %v", tunnel, least, err)
		}
		_, err := settings(cfg, &netdev.Uplink{Name: "eth0", MTU: least - 1}, n)
		if want := "of eth0 leaves 1279 for pods: want at least 1280"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("tunnel %s: error %v, want %q", tunnel, err, want)
		}
	}
}

// nowhere is a target that takes everything.
type nowhere[V any] struct{}

func (nowhere[V]) Update(context.Context, netip.Prefix, V) error   { return nil }
func (nowhere[V]) Delete(context.Context, netip.Prefix) error      { return nil }
func (nowhere[V]) Prune(context.Context, map[netip.Prefix]V) error { return nil }
func nothing[V any]() (map[netip.Prefix]V, uint64)                 { return nil, 1 }
func reconciler[V any]() *reconcile.Reconciler[netip.Prefix, V] {
	return must(reconcile.New(reconcile.Config[netip.Prefix, V]{Name: "nowhere", Target: nowhere[V]{}, Desired: nothing[V], Log: quiet}))
}

// What a computation waits for ends with it, however often one is asked for.
func TestTurnsLeaveNothingBehind(t *testing.T) {
	tables, err := state.New()
	check(t, err)
	ids, err := identity.New(filepath.Join(t.TempDir(), "identities.json"), tables, identity.Options{})
	check(t, err)
	n, err := netdev.Open()
	check(t, err)
	defer n.Close()
	f := &forwarding{
		cfg: testConfig(t, "/sys/fs/bpf/weft"), tables: tables, net: n, identities: ids, kernel: &kernel{},
		health: newComponents("addresses"), log: quiet, wake: make(chan struct{}, 1),
		addresses: reconciler[ipcache.Entry](), routes: reconciler[netdev.Route](),
	}
	before := runtime.NumGoroutine()
	const turns = 100
	for range turns {
		f.trigger()
		f.turn(t.Context())
	}
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() >= before+turns/2 && time.Now().Before(deadline) {
		runtime.Gosched()
	}
	if now := runtime.NumGoroutine(); now >= before+turns/2 {
		t.Errorf("%d goroutines before %d turns, %d after", before, turns, now)
	}
}
