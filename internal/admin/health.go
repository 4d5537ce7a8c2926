// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// healthTimeout bounds each request to the health server.
const healthTimeout = 5 * time.Second

// readiness is the answer of /readyz.
type readiness struct {
	Ready bool `json:"ready"`
	// Components that are not ready; empty when all are.
	Components []unready `json:"components"`
}

type unready struct {
	Name    string `json:"name"`
	Message string `json:"message"`
}

// listenHealth returns nil where there is to be no health server.
func (s *Server) listenHealth(ctx context.Context) (net.Listener, error) {
	if s.cfg.Health == "" {
		return nil, nil
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.cfg.Health)
	if err != nil {
		return nil, fmt.Errorf("listen for health checks: %w", err)
	}
	return l, nil
}

func (s *Server) serveHealth(ctx context.Context, l net.Listener) error {
	server := &http.Server{
		Handler:           s.healthHandler(),
		ReadHeaderTimeout: healthTimeout,
		ReadTimeout:       healthTimeout,
		WriteTimeout:      healthTimeout,
		MaxHeaderBytes:    1 << 14,
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve health checks: %w", err)
	case <-ctx.Done():
	}
	if err := server.Close(); err != nil {
		return fmt.Errorf("stop the health server: %w", err)
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve health checks: %w", err)
	}
	return nil
}

// healthHandler answers /healthz (the process lives), /readyz (pods can be wired
// and flows observed) and /metrics.
func (s *Server) healthHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		st := s.providers.Status()
		answer := readiness{Ready: st.Ready, Components: []unready{}}
		for _, c := range st.Components {
			if !c.Ready {
				answer.Components = append(answer.Components, unready{Name: c.Name, Message: c.Message})
			}
		}
		body, err := json.Marshal(answer)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if !st.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		w.Write(append(body, '\n'))
	})
	if s.providers.Metrics != nil {
		mux.Handle("GET /metrics", s.providers.Metrics)
	}
	return mux
}
