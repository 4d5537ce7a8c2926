// SPDX-License-Identifier: Apache-2.0

// Package cni wires pods of this node on behalf of the CNI plugin: it gives
// addresses, makes the link, puts the pod's datapath in force and writes the
// pod's row. It is the source of the pod table.
//
// An attachment is one record, stored with its addresses by package ipam in one
// write. The record comes before the link and goes after it, so that whatever a
// crash leaves behind has a record, and Restore can finish or undo it.
//
// A link is down until the datapath of its pod is in force, and gone before that
// is taken away: a pod has no way into the node that is not guarded.
//
// Locks: each container has one, held for a whole Add, Del, Reattach or change
// of identity; nothing is locked before it but for the wait for the pod's rows.
package cni

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/state"
)

// Datapath puts what a pod's row says in force in the kernel. Both verbs may
// be repeated, and are called for different pods at the same time.
type Datapath interface {
	// Attach returns once the pod's traffic is handled; on a repeat it takes
	// over what differs, such as a new identity.
	Attach(ctx context.Context, pod *state.Pod) error
	// Detach succeeds for a pod that is not attached and for one whose
	// interface has gone.
	Detach(ctx context.Context, pod *state.Pod) error
}

// Checker is implemented by a Datapath that can tell whether a pod is
// attached; Check then asks it.
type Checker interface {
	Attached(ctx context.Context, pod *state.Pod) error
}

// Identities gives the number of a (namespace, namespace labels, service
// account, pod labels).
type Identities interface {
	Assign(namespace string, nsLabels map[string]string, serviceAccount string, labels map[string]string) (uint64, error)
}

// Network is what this package needs of *netdev.Net.
type Network interface {
	PreparePodLink(netdev.PodLinkSpec) (*netdev.PodLink, error)
	ActivatePodLink(netdev.PodLinkSpec) error
	JoinPodLink(netdev.PodLinkSpec) error
	Addresses() ([]netip.Addr, error)
	CheckPodLink(netdev.PodLinkSpec) error
	LinkByName(name string) (netdev.Link, bool, error)
	PodLinks() ([]netdev.Link, error)
	DeleteLink(name string) error
}

// Config of a Server.
type Config struct {
	// Node is the name of this node's row.
	Node string
	// StateDir is the folder that the plugin is configured with.
	StateDir string
	// MTU of pod interfaces, in bytes; SetMTU changes it.
	MTU int
	// Wait bounds how long an Add waits for the pod's row; 0 is 10 s.
	Wait time.Duration
	// Parallel bounds how many pods are wired at the same time; 0 is 16.
	Parallel int
	// Sweep is how often tombstones are looked for; 0 is 5 s.
	Sweep time.Duration
}

// Defaults of Config.
const (
	DefaultWait     = 10 * time.Second
	DefaultParallel = 16
	DefaultSweep    = 5 * time.Second
)

// minMTU is what IPv6 needs of a link.
const minMTU = 1280

// undoTimeout bounds what is done after a call was given up or has failed.
const undoTimeout = 30 * time.Second

// retryDelay is between two attempts at a pod whose datapath refused.
const retryDelay = time.Second

func (c *Config) setDefaults() {
	if c.Wait == 0 {
		c.Wait = DefaultWait
	}
	if c.Parallel == 0 {
		c.Parallel = DefaultParallel
	}
	if c.Sweep == 0 {
		c.Sweep = DefaultSweep
	}
}

func (c *Config) validate() error {
	switch {
	case c.Node == "":
		return errors.New("cni: node name must be set")
	case c.StateDir == "":
		return errors.New("cni: state folder must be set")
	case c.Wait < 0 || c.Parallel < 0 || c.Sweep < 0:
		return errors.New("cni: wait, parallel and sweep must not be negative")
	}
	return validateMTU(c.MTU)
}

// Options are what a Server is made of.
type Options struct {
	Config     Config
	Tables     *state.Tables
	Pool       *ipam.Pool // its CIDRs follow the node's row
	Network    Network
	Datapath   Datapath
	Identities Identities
	Log        *slog.Logger
}

// Server implements the gRPC service Cni.
type Server struct {
	weftv1.UnimplementedCniServer
	config     Config
	tables     *state.Tables
	pool       *ipam.Pool
	net        Network
	datapath   Datapath
	identities Identities
	log        *slog.Logger

	locks    locks
	mtu      atomic.Int64  // of pods that are wired from now on
	slots    chan struct{} // one for each pod that is being wired
	restored chan struct{} // closed by Restore

	mu      sync.Mutex
	pending map[ipam.Key]error // wired, but not in force; Run tries again; protected by mu
	wake    chan struct{}      // holds one when pending has grown
}

// New returns a Server. No call but Ready returns before Restore did.
func New(o Options) (*Server, error) {
	o.Config.setDefaults()
	if err := o.Config.validate(); err != nil {
		return nil, err
	}
	s := &Server{
		config:     o.Config,
		tables:     o.Tables,
		pool:       o.Pool,
		net:        o.Network,
		datapath:   o.Datapath,
		identities: o.Identities,
		log:        o.Log,
		locks:      locks{held: map[string]*lock{}},
		slots:      make(chan struct{}, o.Config.Parallel),
		restored:   make(chan struct{}),
		pending:    map[ipam.Key]error{},
		wake:       make(chan struct{}, 1),
	}
	s.mtu.Store(int64(o.Config.MTU))
	return s, nil
}

// SetMTU changes the MTU of pods that are wired from now on, in bytes. Others
// keep what their applications know.
func (s *Server) SetMTU(mtu int) error {
	if err := validateMTU(mtu); err != nil {
		return err
	}
	s.mtu.Store(int64(mtu))
	return nil
}

func validateMTU(mtu int) error {
	if mtu < minMTU {
		return fmt.Errorf("cni: MTU %d of pods: want at least %d", mtu, minMTU)
	}
	return nil
}

// Run follows the tables and the plugin's tombstones until ctx ends: pods get
// the identity that their labels ask for now, and those that are pending another
// try. Restore comes first.
func (s *Server) Run(ctx context.Context) error {
	follow := newFollower(s)
	sweep := time.NewTicker(s.config.Sweep)
	defer sweep.Stop()
	for ctx.Err() == nil {
		err := s.retryPending(ctx)
		changed, stepErr := follow.step(ctx)
		err = errors.Join(err, stepErr)
		var retry <-chan time.Time
		if err != nil && ctx.Err() == nil {
			s.log.Error("identities of pods are not all in force", "error", err)
			retry = time.After(retryDelay)
		}
		select {
		case <-ctx.Done():
		case <-changed[0]:
		case <-changed[1]:
		case <-changed[2]:
		case <-s.wake:
		case <-retry:
		case <-sweep.C:
			if err := s.bury(ctx); err != nil {
				s.log.Error("tombstones are not all carried out", "error", err)
			}
		}
	}
	return nil
}

// Ready fails with UNAVAILABLE and the reason while pods cannot be wired.
func (s *Server) Ready(context.Context, *weftv1.CniReadyRequest) (*weftv1.CniReadyResponse, error) {
	select {
	case <-s.restored:
	default:
		return nil, status.Error(codes.Unavailable, "pods of the previous run are being restored")
	}
	if err := s.pendingError(); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	txn := s.tables.DB.ReadTxn()
	node, _, ok := s.tables.Nodes.Get(txn, state.NodeByName.Query(s.config.Node))
	if missing := s.missingNode(node, ok); missing != "" {
		return nil, status.Error(codes.Unavailable, missing)
	}
	return &weftv1.CniReadyResponse{}, nil
}

// begin waits until Restore is done.
func (s *Server) begin(ctx context.Context) error {
	select {
	case <-s.restored:
		return nil
	default:
	}
	select {
	case <-s.restored:
		return nil
	case <-ctx.Done():
		return status.Error(codes.Unavailable, "pods of the previous run are being restored")
	}
}

// cleanup returns a context for undoing things after ctx was given up.
func cleanup(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
}
