// SPDX-License-Identifier: Apache-2.0

package services

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"

	"github.com/weft-mesh/weft/internal/balance"
)

// healthCheck is what a Service wants (spec.healthCheckNodePort).
type healthCheck struct {
	port  uint16
	ready int // backends on this node
}

// healthServers answer load balancers on the health check ports of Services, in
// the form that kube-proxy has (pkg/proxy/healthcheck/service_health.go), on all
// addresses of the node.
type healthServers struct {
	mu      sync.Mutex             // protects what follows
	wanted  map[string]healthCheck // by Service, NAMESPACE/NAME
	servers map[uint16]*healthServer
	changed bool // since listen
	closed  bool
}

// healthServer is one port.
type healthServer struct {
	service string // that it is of
	server  *http.Server
	ready   atomic.Int64
	err     atomic.Pointer[error] // why it does not listen; nil where it does
}

// want takes in what a Service wants, which may be nothing.
func (h *healthServers) want(service string, ports []balance.ServicePort) {
	var c healthCheck
	for i := range ports {
		if ports[i].HealthCheckPort != 0 {
			c = healthCheck{ports[i].HealthCheckPort, ports[i].LocalReady}
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	before, was := h.wanted[service]
	switch {
	case c.port == 0 && was:
		delete(h.wanted, service)
	case c.port != 0 && (!was || before != c):
		h.wanted[service] = c
	default:
		return
	}
	h.changed = true
}

// listen brings the servers in step with what is wanted, and tries again those
// that could not listen. The first Service by name has a port that two want.
func (h *healthServers) listen() {
	h.mu.Lock()
	defer h.mu.Unlock()
	failed := false
	for _, s := range h.servers {
		failed = failed || s.err.Load() != nil
	}
	if h.closed || !h.changed && !failed {
		return
	}
	h.changed = false
	owners := h.owners()
	for port, s := range h.servers {
		if owners[port] != s.service || s.err.Load() != nil {
			s.close()
			delete(h.servers, port)
		}
	}
	for port, service := range owners {
		s := h.servers[port]
		if s == nil {
			s = &healthServer{service: service}
			h.servers[port] = s
			s.listen(port)
		}
		s.ready.Store(int64(h.wanted[service].ready))
	}
}

// owners returns which Service has each port.
func (h *healthServers) owners() map[uint16]string {
	out := map[uint16]string{}
	for _, service := range slices.Sorted(maps.Keys(h.wanted)) {
		if port := h.wanted[service].port; out[port] == "" {
			out[port] = service
		}
	}
	return out
}

// maxChecks is how many connections a health check port serves at a time: anyone
// who reaches the node may open them, and they must not take the agent's files.
const maxChecks = 128

// checkTimeout is the time that a check may take.
const checkTimeout = 2 * time.Second

func (s *healthServer) listen(port uint16) {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(int(port)))
	if err != nil {
		s.err.Store(&err)
		return
	}
	l = netutil.LimitListener(l, maxChecks)
	s.server = &http.Server{Handler: s, ReadTimeout: checkTimeout, WriteTimeout: checkTimeout, MaxHeaderBytes: 8 << 10}
	go func() {
		if err := s.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			s.err.Store(&err)
		}
	}()
}

func (s *healthServer) close() {
	if s.server != nil {
		_ = s.server.Close() // only checks are on it
	}
}

// ServeHTTP says how many ready endpoints this node has: 200 where there is one,
// else 503.
func (s *healthServer) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	ready := s.ready.Load()
	namespace, name, _ := strings.Cut(s.service, "/")
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.FormatInt(ready, 10))
	if ready == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{
		"service":             map[string]string{"namespace": namespace, "name": name},
		"localEndpoints":      ready,
		"serviceProxyHealthy": true,
	}) // a client that has gone is none of our business
}

// problems are ports that cannot be listened on.
func (h *healthServers) problems() []balance.Problem {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []balance.Problem
	for service, c := range h.wanted {
		p := balance.Problem{Object: "Service " + service, Field: "spec.healthCheckNodePort", Value: strconv.Itoa(int(c.port))}
		s := h.servers[c.port]
		switch {
		case s == nil:
			continue // about to be listened on
		case s.service != service:
			p.Want = "a port that Service " + s.service + " does not have"
		case s.err.Load() != nil:
			p.Want = fmt.Sprintf("a port that this node can listen on: %v", *s.err.Load())
		default:
			continue
		}
		out = append(out, p)
	}
	return out
}

func (h *healthServers) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, s := range h.servers {
		s.close()
	}
	clear(h.servers)
}
