// SPDX-License-Identifier: Apache-2.0

// Package admin serves a node's API on a unix socket (see
// api/weft/v1/weft.proto) and its health by HTTP.
package admin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/admin/dial"
	"github.com/weft-mesh/weft/internal/state"
)

// Limits of the API.
const (
	// MaxRequest is the size of the largest request, in bytes.
	MaxRequest = 1 << 20
	// maxStreams is how many calls one connection may have at a time.
	maxStreams = 128
	// maxConnections is how many clients are served at a time; more wait.
	maxConnections = 256
	// handshake is how long a new connection may take to speak HTTP/2.
	handshake = 5 * time.Second
)

// Config of a Server.
type Config struct {
	// Socket is the path of the unix socket. Its folder is made (0700) where
	// it is missing. At most 107 bytes.
	Socket string
	// Health is the TCP address of /healthz, /readyz and /metrics, such as
	// "127.0.0.1:9879"; empty for none.
	Health string
	// StopTimeout is how long calls may take to end when the server stops,
	// before they are cut; 0 is 5 s.
	StopTimeout time.Duration
}

// maxSocketPath is sizeof(sun_path) without the final zero.
const maxSocketPath = 107

func (c *Config) validate() error {
	if c.Socket == "" {
		return errors.New("socket: want a path")
	}
	if len(c.Socket) > maxSocketPath {
		return fmt.Errorf("socket %s: want a path of at most %d bytes, this one has %d", c.Socket, maxSocketPath, len(c.Socket))
	}
	if c.Health != "" {
		if _, _, err := net.SplitHostPort(c.Health); err != nil {
			return fmt.Errorf("health address %q: want HOST:PORT: %w", c.Health, err)
		}
	}
	return nil
}

// StatusProvider tells the state of the agent. It must not block for long: the
// health server asks it too. The caller may change what it returns.
type StatusProvider func() *weftv1.StatusResponse

// Flows streams flows; *flow.Observer does. Its errors are gRPC statuses.
type Flows interface {
	Observe(ctx context.Context, req *weftv1.ObserveRequest, send func(*weftv1.ObserveResponse) error) error
}

// WaitApplied returns once this generation of the manifest folder, or a later
// one, is in force: which it is, and what was refused of it.
type WaitApplied func(ctx context.Context, generation uint64) (uint64, []string, error)

// Providers answer the calls.
type Providers struct {
	Status StatusProvider
	Tables *state.Tables
	Flows  Flows
	// Node is the name of the node.
	Node string
	// Policy returns what tells about policy, or a gRPC status while there is
	// nothing yet. Nil for an agent without policy.
	Policy func() (Policy, error)
	// Services returns what tells about Services, or a gRPC status while there
	// is nothing yet. Nil for an agent without Services.
	Services func() (Services, error)
	// Deny returns the deny list in the same way; nil for none.
	Deny func() (Deny, error)
	// Edge tells what sees packets from outside first. Nil: XDP is off. It must
	// not block.
	Edge func() Edge
	// Cookie returns the number of a network namespace by its path, and of the
	// node's own by ""; (*netdev.Net).Cookie does. Nil: not known.
	Cookie func(netns string) (uint64, error)
	// Metrics answers /metrics of the health server; nil for none.
	Metrics http.Handler
	// WaitApplied is nil for an agent without a manifest folder.
	WaitApplied WaitApplied
	// Cni is the service for the CNI plugin; nil for none.
	Cni weftv1.CniServer
}

// Server is the API of one agent. Use New.
type Server struct {
	cfg       Config
	providers Providers
	log       *slog.Logger
	panics    atomic.Uint64
	// listening is closed when the socket can be dialled.
	listening chan struct{}
	// stopping ends the calls that last (Observe with follow, WaitApplied).
	stopping chan struct{}
}

// New checks cfg and providers. It opens nothing yet.
func New(cfg Config, p Providers, log *slog.Logger) (*Server, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("node API: %w", err)
	}
	if p.Status == nil || p.Tables == nil || p.Flows == nil || log == nil {
		return nil, errors.New("node API: want a status provider, tables, flows and a logger")
	}
	if cfg.StopTimeout == 0 {
		cfg.StopTimeout = 5 * time.Second
	}
	return &Server{cfg: cfg, providers: p, log: log, listening: make(chan struct{}), stopping: make(chan struct{})}, nil
}

// Panics returns how many calls ended in a panic.
func (s *Server) Panics() uint64 { return s.panics.Load() }

// Listening is closed once clients can dial the socket.
func (s *Server) Listening() <-chan struct{} { return s.listening }

// Run serves until ctx is done, then lets calls end (at most
// Config.StopTimeout) and removes the socket. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	l, err := listen(s.cfg.Socket)
	if err != nil {
		return fmt.Errorf("node API: %w", err)
	}
	defer l.release()
	h, err := s.listenHealth(ctx)
	if err != nil {
		return fmt.Errorf("node API: %w", err)
	}
	close(s.listening)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.serveGRPC(ctx, l) })
	if h != nil {
		group.Go(func() error { return s.serveHealth(ctx, h) })
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("node API: %w", err)
	}
	return nil
}

func (s *Server) serveGRPC(ctx context.Context, l net.Listener) error {
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(MaxRequest),
		grpc.MaxSendMsgSize(dial.MaxResponse),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(handshake),
		grpc.UnaryInterceptor(s.unary),
		grpc.StreamInterceptor(s.stream),
	)
	weftv1.RegisterNodeServer(server, &node{providers: s.providers})
	if s.providers.Cni != nil {
		weftv1.RegisterCniServer(server, s.providers.Cni)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(netutil.LimitListener(l, maxConnections)) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve %s: %w", s.cfg.Socket, err)
	case <-ctx.Done():
	}
	close(s.stopping)
	cut := time.AfterFunc(s.cfg.StopTimeout, server.Stop)
	defer cut.Stop()
	server.GracefulStop()
	<-served
	return nil
}
