// SPDX-License-Identifier: Apache-2.0

// Package serve holds the small servers and clients that examples, tests and the
// demo run in pods.
package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// MaxBody is the largest body that ?bytes=N gives.
const MaxBody = 1 << 30

// drainTime is how long requests that are under way get when a server stops.
const drainTime = 5 * time.Second

// Answer is what the HTTP server says about a request.
type Answer struct {
	Server string `json:"server"`
	Client string `json:"client"` // address and port, as the server saw it
	Local  string `json:"local"`  // address and port that the client asked
	Method string `json:"method"`
	Host   string `json:"host"`
	Path   string `json:"path"`
	// Received is how many bytes came with the request.
	Received int64 `json:"received,omitempty"`
}

// HTTP serves on port, all addresses, until ctx ends: every path is answered
// with an Answer under the server's name, ?bytes=N with N bytes, ?delay=DURATION
// after a while, ?status=CODE with that code, and /healthz with "ok".
func HTTP(ctx context.Context, port int, name string, log io.Writer) error {
	listener, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	fmt.Fprintf(log, "%s: http on port %d\n", name, listener.Addr().(*net.TCPAddr).Port)
	srv := &http.Server{Handler: Handler(name), ReadHeaderTimeout: 10 * time.Second}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		drain, cancel := context.WithTimeout(context.Background(), drainTime)
		defer cancel()
		stopped <- srv.Shutdown(drain)
	})
	defer stop()
	if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", err)
	}
	return <-stopped
}

// Handler is what HTTP serves.
func Handler(name string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") })
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { answer(w, r, name) })
	return mux
}

func answer(w http.ResponseWriter, r *http.Request, name string) {
	q := r.URL.Query()
	status, size, delay, err := wishes(q.Get("status"), q.Get("bytes"), q.Get("delay"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	received, err := io.Copy(io.Discard, r.Body)
	if err != nil {
		return // the client has gone
	}
	select {
	case <-time.After(delay):
	case <-r.Context().Done():
		return
	}
	w.Header().Set("Server", name)
	if size >= 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
		w.WriteHeader(status)
		io.CopyN(w, filler{}, size)
		return
	}
	local := ""
	if a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		local = a.String()
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(Answer{Server: name, Client: r.RemoteAddr, Local: local, Method: r.Method, Host: r.Host, Path: r.URL.Path, Received: received})
}

// wishes reads the parameters of a request; size is -1 where none is asked for.
func wishes(status, bytes, delay string) (code int, size int64, wait time.Duration, err error) {
	code, size = http.StatusOK, -1
	if status != "" {
		if code, err = strconv.Atoi(status); err != nil || code < 200 || code > 599 {
			return 0, 0, 0, fmt.Errorf("status %q: want 200 to 599", status)
		}
	}
	if bytes != "" {
		if size, err = strconv.ParseInt(bytes, 10, 64); err != nil || size < 0 || size > MaxBody {
			return 0, 0, 0, fmt.Errorf("bytes %q: want 0 to %d", bytes, MaxBody)
		}
	}
	if delay != "" {
		if wait, err = time.ParseDuration(delay); err != nil || wait < 0 || wait > time.Minute {
			return 0, 0, 0, fmt.Errorf("delay %q: want 0s to 1m", delay)
		}
	}
	return code, size, wait, nil
}

// filler is an endless body of the same line.
type filler struct{}

const fillerLine = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcde\n"

func (filler) Read(p []byte) (int, error) {
	return copy(p, strings.Repeat(fillerLine, len(p)/len(fillerLine)+1)), nil
}
