// SPDX-License-Identifier: Apache-2.0

// Package agent composes the node agent: a manifest folder and the CNI plugin
// write tables, pure computations read them, reconcilers put the results in
// force in the kernel, and the node API tells what is there. It holds no logic
// of its own beyond the order in which these start and stop.
package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weft-mesh/weft/internal/admin"
	"github.com/weft-mesh/weft/internal/datapath/conntrack"
	"github.com/weft-mesh/weft/internal/datapath/event"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/reason"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/enforce"
	"github.com/weft-mesh/weft/internal/flow"
	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/metrics"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/services"
	"github.com/weft-mesh/weft/internal/source/cni"
	"github.com/weft-mesh/weft/internal/source/file"
	"github.com/weft-mesh/weft/internal/state"
	"github.com/weft-mesh/weft/internal/version"
)

// agent is one running agent. Fields are set once, in the order of start.
type agent struct {
	cfg     *Config
	log     *slog.Logger
	started time.Time
	health  *components

	pins       *os.File   // locked: the folder of pins is this agent's
	pool       *ipam.Pool // locked: the runDir is this agent's
	net        *netdev.Net
	tables     *state.Tables
	identities *identity.Allocator
	source     *file.Source
	gate       *gate

	maps      *pin.Maps
	kernel    *kernel
	enforce   *enforce.Enforcer
	services  *services.Driver
	collector *conntrack.Collector
	forward   *forwarding
	status    *statusCache
}

// Run reads the configuration file and runs the agent until ctx ends. What is
// in force in the kernel then stays in force, and the next agent adopts it.
func Run(ctx context.Context, configPath string, stderr io.Writer) error {
	cfg, err := LoadConfig(configPath)
	if err != nil {
		return err
	}
	log := newLogger(cfg.Log, stderr).With("node", cfg.Node)
	a, err := newAgent(cfg, log)
	if err != nil {
		return err
	}
	defer a.close()
	log.Info("agent starts", "version", version.String(), "pinPath", cfg.PinPath, "runDir", cfg.RunDir)
	err = a.run(ctx)
	log.Info("agent ends", "err", err)
	return err
}

func newLogger(c LogConfig, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Level)) // checked by validate
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

func newAgent(cfg *Config, log *slog.Logger) (_ *agent, err error) {
	a := &agent{cfg: cfg, log: log, started: time.Now(), gate: &gate{}}
	a.health = newComponents("source", "node", "datapath", "policy", "services", "cni", "addresses", "routes")
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	if a.tables, err = state.New(); err != nil {
		return nil, err
	}
	if err := a.takeFolders(); err != nil {
		return nil, err
	}
	floor, err := cni.LargestIdentity(a.pool.All())
	if err != nil {
		return nil, fmt.Errorf("read the identities of pods: %w", err)
	}
	a.identities, err = identity.New(filepath.Join(cfg.RunDir, "identities.json"), a.tables, identity.Options{Floor: floor})
	if err != nil {
		return nil, err
	}
	a.source, err = file.New(file.Config{Folder: cfg.Source.Folder}, a.tables, log)
	if err != nil {
		return nil, err
	}
	if a.net, err = netdev.Open(); err != nil {
		return nil, err
	}
	a.status = &statusCache{agent: a}
	return a, nil
}

// takeFolders locks what two agents must not share, before anything of it is
// changed: another agent may be at work with it.
func (a *agent) takeFolders() (err error) {
	if err := os.MkdirAll(a.cfg.RunDir, 0o700); err != nil {
		return fmt.Errorf("make runDir: %w", err)
	}
	if a.pins, err = lockPins(a.cfg.PinPath); err != nil {
		return err
	}
	boot, err := ipam.BootID()
	if err != nil {
		return err
	}
	// The CIDRs come with the node's row.
	a.pool, err = ipam.Open(ipam.Options{Path: filepath.Join(a.cfg.RunDir, "ipam.json"), BootID: boot, Now: ipam.SinceBoot, Log: a.log})
	if err != nil {
		return fmt.Errorf("open the address pool: %w", err)
	}
	return nil
}

func (a *agent) close() {
	if a.kernel != nil {
		a.logError("close programs", a.kernel.close())
	}
	if a.maps != nil {
		a.logError("close maps", a.maps.Close())
	}
	if a.net != nil {
		a.logError("close netlink", a.net.Close())
	}
	if a.pool != nil {
		a.logError("close the address pool", a.pool.Close())
	}
	if a.pins != nil {
		a.logError("unlock pins", a.pins.Close())
	}
}

func (a *agent) logError(what string, err error) {
	if err != nil {
		a.log.Error("clean-up", "step", what, "err", err)
	}
}

func (a *agent) socket() string { return filepath.Join(a.cfg.RunDir, "weft.sock") }

// run serves the API from the beginning, so that whoever waits can see what the
// agent itself waits for.
func (a *agent) run(ctx context.Context) error {
	health := a.cfg.Health.Address
	if health == "-" {
		health = ""
	}
	server, err := admin.New(admin.Config{Socket: a.socket(), Health: health}, admin.Providers{
		Status:      a.status.get,
		Tables:      a.tables,
		Flows:       a.gate,
		Node:        a.cfg.Node,
		Policy:      a.gate.Policy,
		Services:    a.servicesOf,
		Deny:        a.gate.Deny,
		Edge:        a.edge,
		Cookie:      a.net.Cookie,
		Metrics:     metrics.Handler(a.status.get),
		WaitApplied: a.waitApplied,
		Cni:         a.gate,
	}, a.log)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return server.Run(ctx) })
	g.Go(func() error { return a.source.Run(ctx) })
	g.Go(func() error {
		err := a.start(ctx, g)
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return nil // told to stop while waiting
		}
		return err
	})
	return g.Wait()
}

// start brings the parts up in the order in which they need each other. The
// datapath of an earlier agent works on all the while.
func (a *agent) start(ctx context.Context, g *errgroup.Group) error {
	if err := a.waitForSource(ctx); err != nil {
		return err
	}
	self, err := a.waitForNode(ctx)
	if err != nil {
		return err
	}
	if err := a.openDatapath(self); err != nil {
		return err
	}
	server, err := a.openCNI(self)
	if err != nil {
		return err
	}
	if err := a.restorePods(ctx, server); err != nil {
		return err
	}
	if err := a.startFlows(ctx, g); err != nil {
		return err
	}
	a.forward = newForwarding(a)
	g.Go(func() error { return a.forward.run(ctx) })
	g.Go(func() error { return a.collector.Run(ctx) })
	g.Go(func() error { return a.enforce.Run(ctx) })
	g.Go(func() error { return a.services.Run(ctx) })
	g.Go(func() error { return a.keepNeighbors(ctx) })
	g.Go(func() error { return a.followNode(ctx, self, server) })
	g.Go(func() error { return a.pruneIdentities(ctx) })
	g.Go(func() error { return server.Run(ctx) })
	if err := a.forward.waitFirst(ctx); err != nil {
		return err
	}
	a.gate.open(server)
	a.health.ready("cni")
	a.log.Info("agent is ready", "after", time.Since(a.started))
	return nil
}

func (a *agent) waitForSource(ctx context.Context) error {
	for {
		p, changed := a.source.Progress()
		if p.Loads > 0 {
			a.health.ready("source")
			return nil
		}
		a.health.waits("source", "the manifest folder was not read yet")
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// self is what this node is: the row of its Node and the device that carries
// its traffic.
type self struct {
	node    *state.Node
	uplink  *netdev.Uplink
	setting setting.Node
}

// waitForNode returns once the node's object and its uplink are there.
func (a *agent) waitForNode(ctx context.Context) (*self, error) {
	for {
		row, _, changed, ok := a.tables.Nodes.GetWatch(a.tables.DB.ReadTxn(), state.NodeByName.Query(a.cfg.Node))
		why := fmt.Sprintf("no Node %q with an address and a pod CIDR in %s", a.cfg.Node, a.cfg.Source.Folder)
		if ok && len(row.IPs) > 0 && len(row.PodCIDRs) > 0 {
			s, err := a.lookAtNode(row)
			if err == nil {
				a.health.ready("node")
				return s, nil
			}
			why = err.Error()
		}
		a.health.waits("node", why)
		a.log.Warn("waiting for this node", "reason", why)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-changed:
		case <-time.After(5 * time.Second): // a device does not announce itself here
		}
	}
}

func (a *agent) lookAtNode(row *state.Node) (*self, error) {
	uplink, err := a.net.Uplink(a.cfg.Datapath.Uplink)
	if err != nil {
		return nil, err
	}
	s, err := settings(a.cfg, uplink, row)
	if err != nil {
		return nil, err
	}
	return &self{node: row, uplink: uplink, setting: s}, nil
}

func (a *agent) openDatapath(s *self) error {
	a.health.waits("datapath", "loading programs")
	maps, err := pin.Open(a.cfg.PinPath, pin.Sizes{
		IPCache:   a.cfg.Datapath.MaxAddresses,
		Conntrack: a.cfg.Conntrack.MaxEntries,
		NAT:       a.cfg.Conntrack.MaxMasqueraded,
		Events:    a.cfg.Flow.RingBytes,
		Policy:    a.cfg.Policy.MaxEntries,
		Classes:   a.cfg.Policy.MaxPrefixes,

		Services:       a.cfg.Services.MaxFrontends,
		Slots:          a.cfg.Services.MaxSlots,
		Backends:       a.cfg.Services.MaxBackends,
		Maglev:         a.cfg.Services.MaxTables,
		Affinity:       a.cfg.Services.MaxAffinity,
		Ranges:         a.cfg.Services.MaxSourceRanges,
		ServiceSockets: a.cfg.Services.MaxSockets,
		ServiceFlows:   a.cfg.Services.MaxFlows,
		Denied:         a.cfg.Services.MaxDenied,
	})
	if err != nil {
		return fmt.Errorf("open pinned maps: %w", err)
	}
	a.maps = maps
	root, err := cgroupRoot(a.cfg.CgroupRoot)
	if err != nil {
		return fmt.Errorf("cgroupRoot: %w", err)
	}
	a.kernel = &kernel{maps: maps, cgroup: root, xdp: string(a.cfg.Services.XDP), reloaded: make(chan struct{}, 1)}
	if err := a.openPolicy(); err != nil {
		return err
	}
	if err := a.openServices(); err != nil {
		return err
	}
	a.collector = conntrack.New(maps, a.cfg.Conntrack.lifetimes(), a.log)
	return a.loadPrograms(s)
}

func (a *agent) loadPrograms(s *self) error {
	tunnel, err := ensureTunnel(a.net, a.cfg.Datapath, &s.setting)
	if err != nil {
		return fmt.Errorf("tunnel device: %w", err)
	}
	if s.setting.Masquerade {
		if err := a.net.ReserveLocalPorts(s.setting.FirstPort, s.setting.LastPort); err != nil {
			a.log.Warn("the node's own connections may take ports of masqueraded ones", "err", err)
		}
	}
	if err := a.net.ReserveLocalPorts(s.setting.ServiceFirstPort, s.setting.ServiceLastPort); err != nil {
		a.log.Warn("the node's own connections may take ports of clients of services", "err", err)
	}
	return a.kernel.load(s.setting, s.uplink, tunnel)
}

func (a *agent) openCNI(s *self) (*cni.Server, error) {
	if err := a.pool.SetCIDRs(s.node.PodCIDRs); err != nil {
		return nil, fmt.Errorf("pod CIDRs of the node: %w", err)
	}
	server, err := cni.New(cni.Options{
		Config: cni.Config{
			Node:     a.cfg.Node,
			StateDir: filepath.Join(a.cfg.RunDir, "cni"),
			MTU:      podMTU(a.cfg, s.setting),
			Wait:     time.Duration(a.cfg.CNI.WaitForPod),
		},
		Tables:     a.tables,
		Pool:       a.pool,
		Network:    a.net,
		Datapath:   a.kernel,
		Identities: a.identities,
		Log:        a.log,
	})
	if err != nil {
		return nil, fmt.Errorf("CNI server: %w", err)
	}
	return server, nil
}

// restorePods takes up the pods of the earlier agent with the new programs, and
// then lets go of what that agent left and nobody owns.
func (a *agent) restorePods(ctx context.Context, server *cni.Server) error {
	a.health.waits("cni", "taking over the pods that are there")
	if err := server.Restore(ctx); err != nil {
		return fmt.Errorf("restore pods: %w", err)
	}
	pods, err := server.Recorded()
	if err != nil {
		return fmt.Errorf("read recorded pods: %w", err)
	}
	if err := a.kernel.prune(pods); err != nil {
		return fmt.Errorf("let go of pods that are gone: %w", err)
	}
	if err := a.enforce.Apply(); err != nil {
		a.log.Error("policy is not in force as written; what was before stays", "err", err)
	}
	if err := a.enforce.Prune(); err != nil {
		return fmt.Errorf("let go of policy that is gone: %w", err)
	}
	if err := a.maps.FinishMigration(); err != nil {
		return fmt.Errorf("finish the migration of maps: %w", err)
	}
	a.health.ready("datapath")
	return nil
}

func (a *agent) startFlows(ctx context.Context, g *errgroup.Group) error {
	ring, err := event.NewRing(a.maps)
	if err != nil {
		return err
	}
	acks := &ackFile{path: filepath.Join(a.cfg.RunDir, "events.json")}
	acknowledged, err := acks.load()
	if err != nil {
		a.log.Warn("events before this start are not accounted for", "err", err)
	}
	observer, err := flow.New(flow.Config{
		Node:         a.cfg.Node,
		Keep:         a.cfg.Flow.Keep,
		Queue:        32768, // about what the default ring holds
		MaxClients:   32,
		Acknowledged: acknowledged,
		Save:         acks.save,
		DeviceName:   deviceName,
		RuleName:     a.enforce.RuleName,
		Reasons:      reason.Drops(),
		Logger:       a.log,
	}, a.tables, ring)
	if err != nil {
		return errors.Join(err, ring.Close())
	}
	a.gate.observe(observer)
	g.Go(func() error {
		err := observer.Run(ctx)
		return errors.Join(err, ring.Close())
	})
	return nil
}

func deviceName(ifindex uint32) string {
	i, err := net.InterfaceByIndex(int(ifindex))
	if err != nil {
		return ""
	}
	return i.Name
}

// identityInterval is how often unused identities are looked for.
const identityInterval = 10 * time.Minute

func (a *agent) pruneIdentities(ctx context.Context) error {
	tick := time.NewTicker(identityInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if n, err := a.identities.Prune(a.forward.identitiesInUse(), time.Now()); err != nil {
			a.log.Error("prune identities", "err", err)
		} else if n > 0 {
			a.log.Info("identities are no longer used", "count", n)
		}
	}
}

// components is which part of the agent is ready, and what the others wait for.
type components struct {
	mu    sync.Mutex // protects states
	order []string
	state map[string]string // "" is ready
}

func newComponents(names ...string) *components {
	c := &components{order: names, state: map[string]string{}}
	for _, n := range names {
		c.state[n] = "not started"
	}
	return c
}

func (c *components) ready(name string) { c.waits(name, "") }

func (c *components) waits(name, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state[name] = why
}

// each calls f with every component in the order of start, and says whether all
// are ready.
func (c *components) each(f func(name, why string)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := true
	for _, n := range c.order {
		all = all && c.state[n] == ""
		f(n, c.state[n])
	}
	return all
}
