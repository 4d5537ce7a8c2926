// SPDX-License-Identifier: Apache-2.0

// Package daemon is the process that owns a running lab: its nodes, agents, pods
// and the cluster folder. It is composed of the packages beside it.
package daemon

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/weft-mesh/weft/internal/lab/folder"
	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/lab/model"
)

// folderRetry is how long to wait after the cluster folder could not be written.
const folderRetry = time.Second

// Config of a lab. It is handed to the daemon as JSON.
type Config struct {
	Name   string `json:"name"`
	Weft   string `json:"weft"`   // executable; weft-cni is beside it
	Nodes  int    `json:"nodes"`  // 1 to MaxNodes
	Tunnel string `json:"tunnel"` // "none" or "vxlan"
	MTU    int    `json:"mtu"`    // of the underlay, bytes
	// Agent is laid over the configuration of every agent.
	Agent map[string]any `json:"agent,omitempty"`
}

// MaxNodes is how many nodes fit the addresses of a lab.
const MaxNodes = 250

// Validate checks what users choose.
func (c Config) Validate() error {
	if c.Nodes < 1 || c.Nodes > MaxNodes {
		return fmt.Errorf("nodes %d: want 1 to %d", c.Nodes, MaxNodes)
	}
	if c.Tunnel != "none" && c.Tunnel != "vxlan" {
		return fmt.Errorf("tunnel %q: want none or vxlan", c.Tunnel)
	}
	if c.MTU < 1280 || c.MTU > 65535 {
		return fmt.Errorf("mtu %d: want 1280 (the least that IPv6 needs) to 65535", c.MTU)
	}
	return nil
}

// Lab is a running lab.
type Lab struct {
	cfg     Config
	layout  layout.Layout
	log     *slog.Logger
	nodes   []*labNode // immutable
	kicked  chan struct{}
	running sync.WaitGroup // workers

	ctx    context.Context // ends with the lab
	cancel context.CancelFunc

	setupOnce sync.Once
	setupErr  error

	mu        sync.Mutex
	cluster   *model.Cluster              // protected by mu
	folder    *folder.Writer              // protected by mu
	folderErr error                       // protected by mu; of the last time it was written
	dirty     bool                        // protected by mu; cluster changed and the folder was not written
	workers   map[string]*worker          // protected by mu; by NAMESPACE/NAME
	netns     map[string]bool             // protected by mu; names in use by pods
	changed   chan struct{}               // protected by mu; closed at each change, then replaced
	wake      *time.Timer                 // protected by mu; kicks when a pod has been ready for long enough
	routed    map[netip.Addr][]netip.Addr // protected by mu; routes of the world outside, to next hops

	dns atomic.Pointer[[]netip.Addr] // name servers of pods; written with mu held

	progressMu sync.Mutex
	listeners  map[chan string]struct{} // protected by progressMu
}

// NewCluster returns the empty cluster of a lab with that many nodes.
func NewCluster(nodes int) *model.Cluster {
	cfg := model.Config{
		Suffix: func() string { return randomHex(3)[:5] },
		UID:    newUID,
		Now:    func() metav1.Time { return metav1.NewTime(time.Now().Truncate(time.Second)) },
	}
	for i := 1; i <= nodes; i++ {
		cfg.Nodes = append(cfg.Nodes, modelNode(i))
	}
	return model.New(cfg)
}

func modelNode(i int) model.Node {
	return model.Node{
		Name: fmt.Sprintf("node%d", i),
		IPs:  []netip.Addr{netip.AddrFrom4([4]byte{172, 30, 0, byte(i)}), netip.MustParseAddr(fmt.Sprintf("fd00:172:30::%x", i))},
		PodCIDRs: []netip.Prefix{
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), 0}), 24),
			netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%x::/64", i)),
		},
	}
}

// New makes a lab that does nothing yet.
func New(cfg Config, lay layout.Layout, log *slog.Logger) (*Lab, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w, err := folder.New(lay.ClusterDir(), lay.TmpDir())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &Lab{
		cfg: cfg, layout: lay, log: log, ctx: ctx, cancel: cancel,
		kicked:    make(chan struct{}, 1),
		cluster:   NewCluster(cfg.Nodes),
		folder:    w,
		dirty:     true,
		workers:   map[string]*worker{},
		netns:     map[string]bool{},
		changed:   make(chan struct{}),
		listeners: map[chan string]struct{}{},
		routed:    map[netip.Addr][]netip.Addr{},
	}
	l.wake = time.AfterFunc(folderRetry, l.kick)
	for i := 1; i <= cfg.Nodes; i++ {
		n, err := newNode(l, modelNode(i))
		if err != nil {
			cancel()
			return nil, err
		}
		l.nodes = append(l.nodes, n)
	}
	return l, nil
}

func (l *Lab) node(name string) *labNode {
	for _, n := range l.nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// weftDir goes first in the PATH of everything that runs in the lab.
func (l *Lab) weftDir() string { return filepath.Dir(l.cfg.Weft) }

func (l *Lab) path() string { return l.weftDir() + ":" + os.Getenv("PATH") }

// update changes the cluster and has it carried out.
func (l *Lab) update(f func(*model.Cluster)) {
	l.mu.Lock()
	f(l.cluster)
	l.dirty = true
	l.mu.Unlock()
	l.kick()
}

func (l *Lab) kick() {
	select {
	case l.kicked <- struct{}{}:
	default: // one is on its way
	}
}

// reconcile carries the cluster out until the lab ends.
func (l *Lab) reconcile() {
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.kicked:
		}
		if err := l.step(); err != nil {
			l.log.Error("carrying out the cluster failed", "error", err)
			time.AfterFunc(folderRetry, l.kick)
		}
		l.notify()
	}
}

// step plans, writes the folder, and then starts and stops pods: an agent can
// know of a pod before it is wired.
func (l *Lab) step() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil {
		return nil // nobody would wait for the new workers
	}
	start, stop := l.cluster.Plan()
	if len(start)+len(stop) > 0 {
		l.kick()
	}
	generation, err := l.folder.Sync(l.cluster.Objects())
	err = errors.Join(err, l.followNameServers(), l.routeOutside())
	l.folderErr, l.dirty = err, err != nil
	if d := l.cluster.Wake(); d > 0 {
		l.wake.Reset(d)
	}
	for _, p := range stop {
		l.workers[p.Key()].stop()
	}
	for _, p := range start {
		w := newWorker(l, p.Object.DeepCopy())
		l.workers[p.Key()] = w
		l.running.Go(func() { w.run(generation) })
	}
	return err
}

// notify wakes all that wait for a change.
func (l *Lab) notify() {
	l.mu.Lock()
	close(l.changed)
	l.changed = make(chan struct{})
	l.mu.Unlock()
}

// gone takes away a pod that has ended for good.
func (l *Lab) gone(w *worker) {
	l.update(func(c *model.Cluster) {
		c.Gone(w.key)
		delete(l.workers, w.key)
		delete(l.netns, w.netns)
	})
	l.progress("pod %s: gone", w.key)
}

// reserveNetNS returns a name for a pod's network namespace that no other pod
// has; the caller holds l.mu.
func (l *Lab) reserveNetNS(namespace, name string) string {
	base := l.layout.PodNetNS(namespace, name)
	base = base[:min(len(base), 240)]
	unique := base
	for i := 2; l.netns[unique]; i++ {
		unique = fmt.Sprintf("%s-%d", base, i)
	}
	l.netns[unique] = true
	return unique
}

// progress tells all listeners, and the log.
func (l *Lab) progress(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	l.log.Info("progress", "text", text)
	l.progressMu.Lock()
	defer l.progressMu.Unlock()
	for ch := range l.listeners {
		select {
		case ch <- text:
		default: // a listener that is so slow does without
		}
	}
}

func (l *Lab) listen() (lines chan string, stop func()) {
	lines = make(chan string, 1024)
	l.progressMu.Lock()
	l.listeners[lines] = struct{}{}
	l.progressMu.Unlock()
	return lines, func() {
		l.progressMu.Lock()
		delete(l.listeners, lines)
		l.progressMu.Unlock()
	}
}

// shutdown ends all processes; what else there is of the lab is left to whoever
// removes it.
func (l *Lab) shutdown() error {
	l.mu.Lock()
	l.cancel()
	l.mu.Unlock()
	var wg sync.WaitGroup
	errs := make([]error, len(l.nodes))
	for i, n := range l.nodes {
		wg.Go(func() { errs[i] = n.shutdown() })
	}
	wg.Wait()
	l.running.Wait() // their processes are killed: each is reaped
	return errors.Join(errs...)
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// newUID returns a random UUID (RFC 9562, version 4).
func newUID() string {
	b := make([]byte, 16)
	rand.Read(b)
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
