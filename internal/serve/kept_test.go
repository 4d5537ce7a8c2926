// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"
)

// countingServer counts connections.
func countingServer(t *testing.T, h http.Handler) (url string, connections *atomic.Int64) {
	t.Helper()
	connections = &atomic.Int64{}
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			connections.Add(1)
		}
	}
	srv.Start()
	t.Cleanup(srv.Close)
	return srv.URL, connections
}

func TestKeptConnections(t *testing.T) {
	url, connections := countingServer(t, Handler("me"))
	for _, path := range []string{"/", "/?bytes=100000", "/?bytes=0"} {
		connections.Store(0)
		cfg := GetConfig{URL: url + path, Count: 200, Timeout: 5 * time.Second, Concurrency: 4, KeepAlive: true, Upload: 10000}
		sum := Get(context.Background(), cfg, func(string, []byte) {})
		if sum.Failed != 0 || sum.Requests != 200 || connections.Load() != 4 {
			t.Errorf("%s: %v (%v) on %d connections: want 200 requests on 4", path, sum, sum.First, connections.Load())
		}
	}
}

// A connection that the server drops before it answers is a failed request, not
// one that is quietly made again.
func TestKeptConnectionThatIsDropped(t *testing.T) {
	var requests atomic.Int64
	url, connections := countingServer(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if requests.Add(1)%5 == 0 {
			panic(http.ErrAbortHandler)
		}
	}))
	cfg := GetConfig{URL: url, Count: 20, Timeout: 5 * time.Second, Concurrency: 1, KeepAlive: true}
	sum := Get(context.Background(), cfg, func(string, []byte) {})
	if sum.Failed != 4 || requests.Load() != 20 || connections.Load() != 4 {
		t.Errorf("%v (%v), %d requests on %d connections: want 4 of 20 failed, on 4", sum, sum.First, requests.Load(), connections.Load())
	}
}

func TestKeptConnectionTimesOut(t *testing.T) {
	url, _ := countingServer(t, Handler("me"))
	cfg := GetConfig{URL: url + "/?delay=10s", Count: 1, Timeout: 20 * time.Millisecond, Concurrency: 1, KeepAlive: true}
	if sum := Get(context.Background(), cfg, func(string, []byte) {}); sum.Failed != 1 {
		t.Errorf("%v: want a failure", sum)
	}
	cfg.Timeout = time.Minute
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(20*time.Millisecond, cancel)
	if sum := Get(ctx, cfg, func(string, []byte) {}); sum.Requests != 0 {
		t.Errorf("%v: want that an interrupted request does not count", sum)
	}
}
