// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/layout"
)

// shutdownTime is how long requests that are under way get when the lab ends.
const shutdownTime = 5 * time.Second

// Run is the daemon of a lab: it listens until it is told to stop or ctx ends.
func Run(ctx context.Context, cfg Config, lay layout.Layout, log *slog.Logger) error {
	l, err := New(cfg, lay, log)
	if err != nil {
		return err
	}
	listener, err := net.Listen("unix", lay.Socket())
	if err != nil {
		return fmt.Errorf("listen for commands: %w", err)
	}
	stop := make(chan struct{}, 1)
	srv := &http.Server{Handler: l.handler(stop), ReadHeaderTimeout: time.Second}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(listener) }()
	select {
	case err := <-failed:
		return errors.Join(fmt.Errorf("listen for commands: %w", err), l.shutdown())
	case <-ctx.Done():
		err = l.shutdown()
	case <-stop: // shut down already
	}
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	return errors.Join(err, srv.Shutdown(ctx))
}

func (l *Lab) handler(stop chan<- struct{}) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+api.PathUp, l.files(func(ctx context.Context, files []api.File) *api.Result {
		if failed := l.setup(ctx); failed != nil {
			return failed
		}
		return l.apply(ctx, files)
	}))
	mux.HandleFunc("POST "+api.PathApply, l.files(l.apply))
	mux.HandleFunc("POST "+api.PathDelete, l.files(l.delete))
	mux.HandleFunc("POST "+api.PathAgent, l.serveAgent)
	mux.HandleFunc("GET "+api.PathStatus, func(w http.ResponseWriter, r *http.Request) { answer(w, l.status(r.Context())) })
	mux.HandleFunc("GET "+api.PathTarget, l.serveTarget)
	mux.HandleFunc("POST "+api.PathStop, func(w http.ResponseWriter, _ *http.Request) {
		err := l.shutdown()
		if err != nil {
			refuse(w, http.StatusInternalServerError, err)
		} else {
			answer(w, struct{}{})
		}
		stop <- struct{}{}
	})
	return mux
}

// files serves a verb that takes manifests.
func (l *Lab) files(verb func(context.Context, []api.File) *api.Result) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var body api.Files
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			refuse(w, http.StatusBadRequest, fmt.Errorf("decode the request: %w", err))
			return
		}
		ctx, cancel := l.deadline(r, body.Timeout)
		defer cancel()
		l.stream(w, func() *api.Result { return verb(ctx, body.Files) })
	}
}

// deadline is the context of a request, which ends with the lab too.
func (l *Lab) deadline(r *http.Request, timeout time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	stop := context.AfterFunc(l.ctx, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

func (l *Lab) serveAgent(w http.ResponseWriter, r *http.Request) {
	var body api.AgentVerb
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		refuse(w, http.StatusBadRequest, fmt.Errorf("decode the request: %w", err))
		return
	}
	if l.node(body.Node) == nil {
		var names []string
		for _, n := range l.nodes {
			names = append(names, n.Name)
		}
		refuse(w, http.StatusNotFound, fmt.Errorf("there is no node %q: want one of %s", body.Node, strings.Join(names, ", ")))
		return
	}
	ctx, cancel := l.deadline(r, body.Timeout)
	defer cancel()
	l.stream(w, func() *api.Result { return l.agentVerb(ctx, body.Node, body.Verb) })
}

func (l *Lab) serveTarget(w http.ResponseWriter, r *http.Request) {
	t, err := l.target(r.FormValue("pod"), r.FormValue("container"))
	if err != nil {
		refuse(w, http.StatusNotFound, err)
		return
	}
	answer(w, t)
}

// stream sends progress while verb runs, then its result.
func (l *Lab) stream(w http.ResponseWriter, verb func() *api.Result) {
	lines, stop := l.listen()
	defer stop()
	result := make(chan *api.Result, 1)
	go func() { result <- verb() }()
	enc := json.NewEncoder(w)
	send := func(line api.Line) {
		enc.Encode(line) // a client that has gone does not stop the verb
		if f, ok := w.(http.Flusher); ok {
			f.Flush()
		}
	}
	for {
		select {
		case text := <-lines:
			send(api.Line{Progress: text})
		case res := <-result:
			for len(lines) > 0 {
				send(api.Line{Progress: <-lines})
			}
			send(api.Line{Result: res})
			return
		}
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, code int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(api.Error{Error: err.Error()})
}
