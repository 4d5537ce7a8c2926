// SPDX-License-Identifier: Apache-2.0

package services

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/weft-mesh/weft/internal/balance"
)

// healthServers answer load balancers on the health check ports of Services
// (spec.healthCheckNodePort), in the form that kube-proxy has
// (pkg/proxy/healthcheck/service_health.go).
type healthServers struct {
	log     *slog.Logger
	mu      sync.Mutex // protects what follows
	servers map[uint16]*healthServer
}

// healthServer is one port.
type healthServer struct {
	port    uint16
	service string // NAMESPACE/NAME
	server  *http.Server

	mu    sync.Mutex
	ready int   // protected by mu
	err   error // why it does not listen; protected by mu
}

// want takes in what a Service wants, which may be nothing.
func (h *healthServers) want(service string, ports []balance.ServicePort) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var port uint16
	ready := 0
	for i := range ports {
		if ports[i].HealthCheckPort != 0 {
			port, ready = ports[i].HealthCheckPort, ports[i].LocalReady
		}
	}
	for p, s := range h.servers {
		if s.service == service && p != port {
			s.close()
			delete(h.servers, p)
		}
	}
	if port == 0 {
		return
	}
	s := h.servers[port]
	if s == nil || (s.service == service && s.failure() != nil) {
		s = &healthServer{port: port, service: service}
		h.servers[port] = s
		if err := s.listen(); err != nil {
			s.fail(err)
			h.log.Error("health check port of a Service", "service", service, "port", port, "err", err)
		}
	}
	if s.service == service {
		s.mu.Lock()
		s.ready = ready
		s.mu.Unlock()
	}
}

func (s *healthServer) listen() error {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(int(s.port)))
	if err != nil {
		return err
	}
	s.server = &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second, MaxHeaderBytes: 8 << 10}
	go func() {
		if err := s.server.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
			s.fail(err)
		}
	}()
	return nil
}

func (s *healthServer) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func (s *healthServer) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *healthServer) close() {
	if s.server != nil {
		_ = s.server.Close() // only checks are on it
	}
}

// ServeHTTP says how many ready endpoints this node has: 200 where there is one,
// else 503.
func (s *healthServer) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	ready := s.ready
	s.mu.Unlock()
	namespace, name, _ := strings.Cut(s.service, "/")
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(ready))
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
	for _, port := range slices.Sorted(maps.Keys(h.servers)) {
		s := h.servers[port]
		if err := s.failure(); err != nil {
			out = append(out, balance.Problem{
				Object: "Service " + s.service, Field: "spec.healthCheckNodePort", Value: strconv.Itoa(int(port)),
				Want: fmt.Sprintf("a port that this node can listen on: %v", err),
			})
		}
	}
	return out
}

func (h *healthServers) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.servers {
		s.close()
	}
	clear(h.servers)
}
