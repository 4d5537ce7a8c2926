// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// maxRate is the most requests a second.
const maxRate = 100000

// GetConfig says how to ask a URL.
type GetConfig struct {
	URL         string
	Count       int           // requests in all; 0 until ctx ends
	Interval    time.Duration // between the requests of one worker
	Timeout     time.Duration // of one request
	Concurrency int           // workers; at least 1
	KeepAlive   bool          // each worker keeps its connection
	// Rate, where it is more than 0, begins that many requests each second,
	// whatever becomes of earlier ones, instead of the workers.
	Rate float64
	// Duration begins no request after it; 0 is without end.
	Duration time.Duration
	// SourcePort is the client's, whose connections end by a reset, so that it
	// is free again; 0 is any free one.
	SourcePort int
	Upload     int64 // bytes to send with each request, by POST; 0 is GET
}

// Validate checks what users choose.
func (c GetConfig) Validate() error {
	switch {
	case c.Count < 0:
		return fmt.Errorf("count %d: want 0 or more", c.Count)
	case c.Interval < 0:
		return fmt.Errorf("interval %s: want 0s or more", c.Interval)
	case c.Timeout <= 0:
		return fmt.Errorf("timeout %s: want more than 0s", c.Timeout)
	case c.Upload < 0 || c.Upload > MaxBody:
		return fmt.Errorf("upload %d: want 0 to %d", c.Upload, MaxBody)
	case c.Rate < 0 || c.Rate > maxRate:
		return fmt.Errorf("rate %g: want 0 to %d", c.Rate, maxRate)
	case c.Rate > 0 && (c.KeepAlive || c.Concurrency > 1 || c.Interval > 0):
		return errors.New("rate: want no keepalive, concurrency and interval beside it")
	case c.Duration < 0:
		return fmt.Errorf("duration %s: want 0s or more", c.Duration)
	case c.SourcePort < 0 || c.SourcePort > 65535:
		return fmt.Errorf("source port %d: want 0 to 65535", c.SourcePort)
	case c.SourcePort > 0 && (c.Rate > 0 || c.Concurrency > 1 || c.KeepAlive):
		return errors.New("source port: want one request at a time")
	case c.Concurrency < 1:
		return fmt.Errorf("concurrency %d: want 1 or more", c.Concurrency)
	}
	return nil
}

// Summary is how a series of requests went.
type Summary struct {
	Requests int
	Failed   int
	First    error // the first failure
	// Servers is how many answers each server gave, by its header Server.
	Servers map[string]int
	Latency *hdrhistogram.Histogram
	Elapsed time.Duration
}

// String is one line with times in milliseconds.
func (s *Summary) String() string {
	ms := func(q float64) float64 { return float64(s.Latency.ValueAtQuantile(q)) / 1000 }
	return fmt.Sprintf("%d requests, %d failed, %.1f/s, latency ms: min %.3f p50 %.3f p90 %.3f p99 %.3f max %.3f",
		s.Requests, s.Failed, float64(s.Requests)/s.Elapsed.Seconds(), float64(s.Latency.Min())/1000, ms(50), ms(90), ms(99), float64(s.Latency.Max())/1000)
}

// getter is one run of Get.
type getter struct {
	cfg  GetConfig
	left atomic.Int64
	end  time.Time // zero: none

	mu  sync.Mutex
	sum Summary // protected by mu
}

// Get asks, and returns how it went; each is called for every request that got
// an answer, one at a time. A request that ctx interrupts does not count.
func Get(ctx context.Context, cfg GetConfig, each func(status string, body []byte)) *Summary {
	g := &getter{cfg: cfg}
	g.left.Store(int64(cfg.Count))
	g.sum.Latency = hdrhistogram.New(1, time.Hour.Microseconds(), 3)
	g.sum.Servers = map[string]int{}
	began := time.Now()
	if cfg.Duration > 0 {
		g.end = began.Add(cfg.Duration)
	}
	var wg sync.WaitGroup
	if cfg.Rate > 0 {
		g.pace(ctx, &wg, each)
	} else {
		for range cfg.Concurrency {
			wg.Go(func() { g.work(ctx, each) })
		}
	}
	wg.Wait()
	g.sum.Elapsed = time.Since(began)
	return &g.sum
}

func (g *getter) work(ctx context.Context, each func(string, []byte)) {
	client, stop := g.client(ctx)
	defer stop()
	for g.more() {
		if !g.ask(ctx, client, each) {
			return
		}
		if g.cfg.Interval == 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(g.cfg.Interval):
		}
	}
}

// pace begins requests at a fixed rate.
func (g *getter) pace(ctx context.Context, wg *sync.WaitGroup, each func(string, []byte)) {
	client, stop := g.client(ctx)
	defer stop()
	began := time.Now()
	for n := 0; g.more(); n++ {
		at := began.Add(time.Duration(float64(n) / g.cfg.Rate * float64(time.Second)))
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(at)):
		}
		wg.Go(func() { g.ask(ctx, client, each) })
	}
}

// more tells whether another request is to begin.
func (g *getter) more() bool {
	if !g.end.IsZero() && time.Now().After(g.end) {
		return false
	}
	return g.cfg.Count == 0 || g.left.Add(-1) >= 0
}

// ask makes one request; false is one that ctx interrupted.
func (g *getter) ask(ctx context.Context, client *http.Client, each func(string, []byte)) bool {
	began := time.Now()
	if g.cfg.SourcePort > 0 {
		// Its connection is closed when the next one begins, not some time later.
		var stop func()
		client, stop = keptClient(ctx, g.cfg.Timeout, dialerFrom(g.cfg.SourcePort, false))
		defer stop()
	}
	status, server, body, err := g.once(ctx, client)
	if ctx.Err() != nil {
		return false
	}
	g.record(status, server, body, err, time.Since(began), each)
	return true
}

// client is a worker's own.
func (g *getter) client(ctx context.Context) (client *http.Client, stop func()) {
	if g.cfg.KeepAlive {
		return keptClient(ctx, g.cfg.Timeout, net.Dialer{})
	}
	transport := &http.Transport{DisableKeepAlives: true}
	return &http.Client{Transport: transport, Timeout: g.cfg.Timeout}, transport.CloseIdleConnections
}

func (g *getter) once(ctx context.Context, client *http.Client) (status, server string, body []byte, err error) {
	req, err := g.request(ctx)
	if err != nil {
		return "", "", nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", "", nil, err
	}
	defer resp.Body.Close()
	// The beginning is for people; the rest only has to arrive.
	body, err = io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
	}
	if err == nil && resp.StatusCode >= 400 {
		err = errors.New(resp.Status)
	}
	return resp.Status, resp.Header.Get("Server"), body, err
}

func (g *getter) request(ctx context.Context) (*http.Request, error) {
	if g.cfg.Upload == 0 {
		return http.NewRequestWithContext(ctx, http.MethodGet, g.cfg.URL, nil)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.cfg.URL, io.LimitReader(filler{}, g.cfg.Upload))
	if err != nil {
		return nil, err
	}
	req.ContentLength = g.cfg.Upload
	return req, nil
}

func (g *getter) record(status, server string, body []byte, err error, took time.Duration, each func(string, []byte)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sum.Requests++
	if err != nil {
		g.sum.Failed++
		if g.sum.First == nil {
			g.sum.First = err
		}
	} else {
		g.sum.Servers[server]++
		g.sum.Latency.RecordValue(max(took.Microseconds(), 1)) // an hour is not reached: Timeout
	}
	if status != "" {
		each(status, body)
	}
}
