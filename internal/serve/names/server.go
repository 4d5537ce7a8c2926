// SPDX-License-Identifier: Apache-2.0

package names

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/weft-mesh/weft/internal/source/file"
	"github.com/weft-mesh/weft/internal/state"
)

const (
	// maxUDP is the largest answer by UDP, in bytes, whatever the client allows:
	// a datagram of this size is never cut into fragments.
	maxUDP = 1232
	// drainTime is how long queries that are under way get when the server stops.
	drainTime = 5 * time.Second
)

// Config of a server.
type Config struct {
	Folder string // manifests of the cluster
	Domain string // such as "cluster.local"
	Port   int    // UDP and TCP, all addresses; 0 is a free one
	// Verbose prints each query.
	Verbose bool
}

// Server answers by UDP and TCP.
type Server struct {
	cfg    Config
	out    io.Writer
	tables *state.Tables
	source *file.Source
	zone   atomic.Pointer[Zone] // nil until the folder was read
	udp    net.PacketConn
	tcp    net.Listener
}

// Serve reads the folder and then answers until ctx ends.
func Serve(ctx context.Context, cfg Config, log *slog.Logger, out io.Writer) error {
	s, err := New(cfg, log, out)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

// New prepares a server that does nothing yet.
func New(cfg Config, log *slog.Logger, out io.Writer) (*Server, error) {
	if _, ok := dns.IsDomainName(cfg.Domain); !ok || cfg.Domain == "" {
		return nil, fmt.Errorf("domain %q: want a domain name such as cluster.local", cfg.Domain)
	}
	if cfg.Port < 0 || cfg.Port > 65535 {
		return nil, fmt.Errorf("port %d: want 0 to 65535", cfg.Port)
	}
	tables, err := state.New()
	if err != nil {
		return nil, fmt.Errorf("make tables: %w", err)
	}
	source, err := file.New(file.Config{Folder: cfg.Folder}, tables, log)
	if err != nil {
		return nil, err
	}
	return &Server{cfg: cfg, out: out, tables: tables, source: source}, nil
}

// Run is the life of the server: it listens once it knows the cluster.
func (s *Server) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 3)
	go func() { failed <- s.source.Run(ctx) }()
	if err := s.source.Wait(ctx, 0); err != nil {
		return errors.Join(err, <-failed)
	}
	s.rebuild()
	go s.follow(ctx)
	if err := s.listen(); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "names of %s on port %d by UDP and TCP\n", s.cfg.Domain, s.port())
	udp := &dns.Server{PacketConn: s.udp, Handler: s, UDPSize: dns.MaxMsgSize}
	tcp := &dns.Server{Listener: s.tcp, Handler: s}
	for _, srv := range []*dns.Server{udp, tcp} {
		go func() { failed <- srv.ActivateAndServe() }()
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	drain, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	return errors.Join(err, udp.ShutdownContext(drain), tcp.ShutdownContext(drain))
}

// listen takes the same port for both.
func (s *Server) listen() error {
	var err error
	if s.tcp, err = net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(s.cfg.Port))); err != nil {
		return fmt.Errorf("listen by TCP: %w", err)
	}
	if s.udp, err = net.ListenPacket("udp", net.JoinHostPort("", strconv.Itoa(s.port()))); err != nil {
		return errors.Join(fmt.Errorf("listen by UDP: %w", err), s.tcp.Close())
	}
	return nil
}

func (s *Server) port() int { return s.tcp.Addr().(*net.TCPAddr).Port }

// follow makes a new zone at each change of the folder.
func (s *Server) follow(ctx context.Context) {
	for {
		_, changed := s.source.Progress()
		s.rebuild()
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

func (s *Server) rebuild() {
	p, _ := s.source.Progress()
	txn := s.tables.DB.ReadTxn()
	var r Rows
	for row := range s.tables.Namespaces.All(txn) {
		r.Namespaces = append(r.Namespaces, row)
	}
	for row := range s.tables.Services.All(txn) {
		r.Services = append(r.Services, row)
	}
	for row := range s.tables.Endpoints.All(txn) {
		r.Endpoints = append(r.Endpoints, row)
	}
	for row := range s.tables.Workloads.All(txn) {
		r.Workloads = append(r.Workloads, row)
	}
	s.zone.Store(NewZone(s.cfg.Domain, uint32(p.Loads), r))
}

// ServeDNS answers one query.
func (s *Server) ServeDNS(w dns.ResponseWriter, query *dns.Msg) {
	limit := dns.MaxMsgSize
	if _, ok := w.RemoteAddr().(*net.UDPAddr); ok {
		limit = dns.MinMsgSize
	}
	m := s.zone.Load().Answer(query)
	if opt := query.IsEdns0(); opt != nil {
		m.SetEdns0(maxUDP, false)
		if opt.Version() != 0 {
			m.Answer, m.Ns, m.Rcode = nil, nil, dns.RcodeBadVers
		}
		if limit == dns.MinMsgSize {
			limit = min(max(int(opt.UDPSize()), limit), maxUDP)
		}
	}
	m.Compress = true
	m.Truncate(limit)
	if s.cfg.Verbose {
		fmt.Fprintf(s.out, "%s asks %s\n", w.RemoteAddr(), describe(m))
	}
	if err := w.WriteMsg(m); err != nil {
		fmt.Fprintf(s.out, "answer %s: %v\n", w.RemoteAddr(), err)
	}
}
