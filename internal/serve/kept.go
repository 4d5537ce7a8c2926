// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// kept is a transport of exactly one connection, for one request at a time. That
// of net/http would ask again by itself when a connection it had kept was reset,
// and now and then open another one without need: neither may be hidden from
// whoever asks whether connections survive. A connection that failed is replaced
// for the next request.
type kept struct {
	dialer net.Dialer // from one port, the connection ends by a reset
	reader *bufio.Reader
	ended  bool // the last body was read to its end, and the server goes on

	mu     sync.Mutex
	conn   net.Conn // protected by mu; nil before the first request and after a failure
	closed bool     // protected by mu
}

// closeWith closes the connection when ctx ends; stop is for the end of all
// requests.
func (k *kept) closeWith(ctx context.Context) (stop func()) {
	cancel := context.AfterFunc(ctx, k.close)
	return func() {
		cancel()
		k.close()
	}
}

func (k *kept) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	if tcp, ok := k.conn.(*net.TCPConn); ok && k.dialer.LocalAddr != nil {
		tcp.SetLinger(0)
	}
	if k.conn != nil {
		k.conn.Close()
	}
}

// RoundTrip is http.RoundTripper's.
func (k *kept) RoundTrip(req *http.Request) (*http.Response, error) {
	conn, err := k.connect(req)
	if err != nil {
		return nil, err
	}
	k.ended = false
	deadline, _ := req.Context().Deadline() // none is the zero time, which is none
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if err := req.Write(conn); err != nil {
		return nil, fmt.Errorf("send the request: %w", err)
	}
	resp, err := http.ReadResponse(k.reader, req)
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	resp.Body = &keptBody{ReadCloser: resp.Body, kept: k, last: resp.Close}
	return resp, nil
}

// connect returns the connection if it is good for another request, else a new
// one.
func (k *kept) connect(req *http.Request) (net.Conn, error) {
	if req.URL.Scheme != "http" {
		return nil, fmt.Errorf("scheme %q: want http on a connection that is kept", req.URL.Scheme)
	}
	k.mu.Lock()
	conn := k.conn
	k.mu.Unlock()
	if conn != nil {
		if k.ended {
			return conn, nil
		}
		conn.Close()
	}
	port := req.URL.Port()
	if port == "" {
		port = "80"
	}
	conn, err := k.dialer.DialContext(req.Context(), "tcp", net.JoinHostPort(req.URL.Hostname(), port))
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		conn.Close()
		return nil, net.ErrClosed
	}
	k.conn, k.reader = conn, bufio.NewReader(conn)
	return conn, nil
}

// keptBody notes that a body was read to its end.
type keptBody struct {
	io.ReadCloser
	kept *kept
	last bool // the server closes the connection after it
}

func (b *keptBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		b.kept.ended = !b.last
	}
	return n, err
}

// keptClient is a client with a connection of its own until ctx ends.
func keptClient(ctx context.Context, timeout time.Duration, d net.Dialer) (client *http.Client, stop func()) {
	k := &kept{dialer: d}
	return &http.Client{Transport: k, Timeout: timeout}, k.closeWith(ctx)
}
