// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/reason"
	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/version"
)

// statusTTL is how long what is read from the kernel is told again: walking the
// maps at every question would let a curious client slow the node down.
const statusTTL = time.Second

// statusCache tells the state of the agent.
type statusCache struct {
	agent *agent

	mu       sync.Mutex // protects what follows
	read     time.Time
	programs []*weftv1.Program
	maps     []*weftv1.MapFill
}

// get is the StatusProvider.
func (c *statusCache) get() *weftv1.StatusResponse {
	a := c.agent
	r := &weftv1.StatusResponse{
		Node:       a.cfg.Node,
		Version:    version.String(),
		Started:    timestamppb.New(a.started),
		Generation: a.source.Generation(),
		Routing:    "native",
	}
	if a.cfg.Datapath.Tunnel == "vxlan" {
		r.Routing = "vxlan"
	}
	datapath := false
	r.Ready = a.health.each(func(name, why string) {
		r.Components = append(r.Components, &weftv1.Component{Name: name, Ready: why == "", Message: why})
		datapath = datapath || name == "datapath" && why == ""
	})
	r.SourceErrors = a.sourceErrors()
	if !datapath {
		return r // maps and programs are not there yet
	}
	r.Mtu = uint32(podMTU(a.cfg, a.kernel.settings()))
	r.Pods = a.pods()
	c.fillFromKernel(r)
	r.Events = a.events()
	r.Services = a.servicesStatus()
	return r
}

func (a *agent) events() *weftv1.Events {
	observer := a.gate.observer()
	if observer == nil {
		return nil
	}
	generated, lost, err := observer.Made()
	if err != nil {
		a.log.Error("read the state of flow events", "err", err)
		return nil
	}
	stats := observer.Stats()
	return &weftv1.Events{Generated: generated, Lost: lost, Received: stats.Received, ReportedLost: stats.LostKernel}
}

func (a *agent) sourceErrors() []string {
	var out []string
	for e := range a.tables.SourceErrors.All(a.tables.DB.ReadTxn()) {
		out = append(out, manifest.Format(*e))
	}
	return out
}

func (a *agent) pods() []*weftv1.PodStatus {
	var out []*weftv1.PodStatus
	for p := range a.tables.Pods.All(a.tables.DB.ReadTxn()) {
		s := &weftv1.PodStatus{
			Namespace: p.Namespace, Name: p.Name, ContainerId: p.ContainerID, Interface: p.Interface, Identity: p.Identity,
		}
		for _, ip := range p.IPs {
			s.Ips = append(s.Ips, ip.String())
		}
		out = append(out, s)
	}
	return out
}

func (c *statusCache) fillFromKernel(r *weftv1.StatusResponse) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.read) > statusTTL {
		if err := c.readKernel(); err != nil {
			c.agent.log.Error("read the state of the datapath", "err", err)
		}
		c.read = time.Now()
	}
	r.Programs, r.Maps = c.programs, c.maps
	counts, err := reason.Counts(c.agent.maps)
	if err != nil {
		c.agent.log.Error("read counters", "err", err)
	}
	for _, n := range counts {
		counter := &weftv1.Counter{Name: reason.Name(n.Reason), Packets: n.Packets, Bytes: n.Bytes}
		if reason.IsDrop(n.Reason) {
			r.Drops = append(r.Drops, counter)
		} else {
			r.Forwarded = append(r.Forwarded, counter)
		}
	}
}

func (c *statusCache) readKernel() error {
	attached, err := c.agent.maps.Attachments()
	if err != nil {
		return err
	}
	c.programs = nil
	for _, a := range attached {
		hook := "tcx " + a.Hook
		if a.IsXDP() {
			hook = strings.Replace(a.Hook, "xdp_", "XDP ", 1)
		}
		c.programs = append(c.programs, &weftv1.Program{
			Name: a.Program, Attach: hook, Device: a.Device, Id: a.ProgramID, LinkId: a.LinkID,
		})
	}
	fills, err := c.agent.maps.Fills()
	if err != nil {
		return err
	}
	c.maps = nil
	for _, f := range fills {
		c.maps = append(c.maps, &weftv1.MapFill{Name: f.Name, Entries: f.Entries, MaxEntries: f.MaxEntries})
	}
	return nil
}

// waitApplied is the WaitApplied provider of the node API.
func (a *agent) waitApplied(ctx context.Context, generation uint64) (uint64, []string, error) {
	if err := a.source.Wait(ctx, generation); err != nil {
		return 0, nil, notInForce(ctx, err)
	}
	server := a.gate.cni.Load()
	if server == nil {
		return 0, nil, errStarting
	}
	if err := server.Reidentify(ctx); err != nil {
		return 0, nil, notInForce(ctx, err)
	}
	if err := a.applyPolicy(ctx); err != nil {
		return 0, nil, notInForce(ctx, err)
	}
	if err := a.services.Apply(); err != nil {
		return 0, nil, notInForce(ctx, err)
	}
	return a.source.Generation(), a.sourceErrors(), nil
}

func notInForce(ctx context.Context, err error) error {
	code := codes.Internal
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		code = codes.DeadlineExceeded
	}
	return status.Error(code, err.Error())
}
