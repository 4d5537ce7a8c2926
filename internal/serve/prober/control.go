// SPDX-License-Identifier: Apache-2.0

package prober

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

// result is the answer to a Batch: JSON, one line for each, both ways.
type result struct {
	Verdicts []Verdict `json:"verdicts,omitempty"`
	Error    string    `json:"error,omitempty"` // why the batch was not taken
}

// listenControl takes orders. A socket file that a killed prober left is
// replaced.
func (s *server) listenControl(ctx context.Context, serve *sync.WaitGroup) error {
	if err := os.Remove(s.cfg.Control); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove an old socket: %w", err)
	}
	l, err := net.Listen("unix", s.cfg.Control)
	if err != nil {
		return fmt.Errorf("listen for orders: %w", err)
	}
	s.opens(l)
	serve.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed
			}
			s.opens(conn)
			serve.Go(func() { s.control(ctx, conn) })
		}
	})
	return nil
}

func (s *server) control(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	in, out := json.NewDecoder(bufio.NewReader(conn)), json.NewEncoder(conn)
	for {
		var b Batch
		if in.Decode(&b) != nil {
			return
		}
		r := result{}
		if err := b.Validate(); err != nil {
			r.Error = err.Error()
		} else {
			r.Verdicts = s.run(ctx, b)
		}
		if out.Encode(r) != nil {
			return
		}
	}
}

// Client gives orders to one prober. It is safe for use by several goroutines;
// their batches are done one after the other.
type Client struct {
	conn net.Conn

	mu sync.Mutex
	in *json.Decoder // protected by mu
}

// Dial waits until the prober with that socket takes orders, or ctx ends.
func Dial(ctx context.Context, control string) (*Client, error) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var d net.Dialer
	for {
		conn, err := d.DialContext(ctx, "unix", control)
		if err == nil {
			return &Client{conn: conn, in: json.NewDecoder(bufio.NewReader(conn))}, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the prober at %s: %w", control, err)
		}
	}
}

// Do runs a batch and returns a verdict for each of its jobs. After an error or
// the end of ctx the client is of no more use.
func (c *Client) Do(ctx context.Context, b Batch) ([]Verdict, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { c.conn.Close() })
	defer stop()
	if err := json.NewEncoder(c.conn).Encode(b); err != nil {
		return nil, fmt.Errorf("send a batch to a prober: %w", err)
	}
	var r result
	if err := c.in.Decode(&r); err != nil {
		return nil, fmt.Errorf("read the verdicts of a prober: %w", err)
	}
	if r.Error != "" {
		return nil, fmt.Errorf("prober: %s", r.Error)
	}
	if len(r.Verdicts) != len(b.Jobs) {
		return nil, fmt.Errorf("prober: %d verdicts for %d jobs", len(r.Verdicts), len(b.Jobs))
	}
	return r.Verdicts, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }
