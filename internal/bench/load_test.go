// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"
)

// TestMain lets the test binary be the generator and the server of a Runner.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "bench-process" {
		os.Exit(Process(os.Args[2], os.Args[3:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func TestLoadOverLoopback(t *testing.T) {
	const warmup, duration = 20 * time.Millisecond, 80 * time.Millisecond
	for _, load := range []Load{
		{Mode: RR, Bytes: 200, Connections: 1},
		{Mode: RR, Bytes: 1, Connections: 16},
		{Mode: RR, Bytes: maxBytes, Connections: 3},
		{Mode: RR, Bytes: 200, Connections: 4, Rate: 2000},
		{Mode: CRR, Bytes: 200, Connections: 1},
		{Mode: CC, Connections: 1},
		{Mode: Stream, Connections: 1},
	} {
		load.Warmup, load.Duration = warmup, duration
		t.Run(load.Name(), func(t *testing.T) {
			client, server := overLoopback(t, load)
			if server.Received != client.Sent || server.Requests != client.Answered {
				t.Errorf("sent %d bytes, %d answered; the server has %d bytes, %d requests",
					client.Sent, client.Answered, server.Received, server.Requests)
			}
			if load.Mode != CC && client.Bytes == 0 || client.Seconds < duration.Seconds()/2 {
				t.Errorf("measured %d bytes in %v s", client.Bytes, client.Seconds)
			}
			if l := client.Latency; load.Mode != Stream && (l == nil || l.P50 <= 0 || l.P50 > l.P99 || l.P99 > l.Max || l.HDR == "") {
				t.Errorf("latency %+v", l)
			}
			if rate := float64(client.Requests) / client.Seconds; load.Rate > 0 && (rate < load.Rate*0.7 || rate > load.Rate*1.3) {
				t.Errorf("%g requests/s, asked for %g", rate, load.Rate)
			}
		})
	}
}

func overLoopback(t *testing.T, load Load) (ClientReport, ServerReport) {
	t.Helper()
	keepRuntimeAway(t)
	s, err := NewServer(load, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	type result struct {
		report ServerReport
		err    error
	}
	served := make(chan result, 1)
	go func() {
		report, err := s.Run()
		served <- result{report, err}
	}()
	client, err := RunClient(load, s.Addr(), nil)
	s.Stop()
	server := <-served
	if err != nil || server.err != nil {
		t.Fatalf("client: %v, server: %v", err, server.err)
	}
	return client, server.report
}

// keepRuntimeAway does what environment does for processes of their own: the
// two loops hold their processors in blocking calls, so that a collection, which
// has to stop both, would wait for their timeouts.
func keepRuntimeAway(t *testing.T) {
	t.Helper()
	runtime.GC()
	percent, processors := debug.SetGCPercent(-1), runtime.GOMAXPROCS(4)
	t.Cleanup(func() {
		runtime.GOMAXPROCS(processors)
		debug.SetGCPercent(percent)
	})
}

func TestNobodyListens(t *testing.T) {
	load := Load{Mode: RR, Bytes: 1, Connections: 1, Duration: time.Millisecond}
	s, err := NewServer(load, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	report, err := RunClient(load, s.Addr(), nil)
	if err == nil || !strings.Contains(report.Error, "connect to "+s.Addr().String()) {
		t.Errorf("error %v, in the report %q", err, report.Error)
	}
}

func TestLoadValidate(t *testing.T) {
	good := Load{Mode: RR, Bytes: 200, Connections: 16, Duration: time.Second}
	if err := good.validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Load){
		`mode "udp"`:       func(l *Load) { l.Mode = "udp" },
		"0 bytes":          func(l *Load) { l.Bytes = 0 },
		"70000 bytes":      func(l *Load) { l.Bytes = 70000 },
		"0 connections":    func(l *Load) { l.Connections = 0 },
		"mode crr has one": func(l *Load) { l.Mode = CRR },
		"mode cc has one":  func(l *Load) { l.Mode = CC },
		"rate -1":          func(l *Load) { l.Rate = -1 },
		"duration 0s":      func(l *Load) { l.Duration = 0 },
	} {
		l := good
		change(&l)
		if err := l.validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want one with %q", l, err, want)
		}
	}
}

func TestParseMachineCPU(t *testing.T) {
	m, err := parseMachineCPU([]byte("cpu  100 200 300 400 50 10 20 30 0 0\ncpu0 1 2\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := MachineCPU{User: 1, Nice: 2, System: 3, Idle: 4.5, Irq: .1, Softirq: .2, Steal: .3}
	if m != want {
		t.Errorf("got %+v, want %+v", m, want)
	}
	if got := m.busy(4*time.Second, 2); got < 3.19 || got > 3.21 {
		t.Errorf("busy %v, want 2 × 4 s less 4.5 s idle and 0.3 s steal", got)
	}
	if _, err := parseMachineCPU([]byte("intr 1")); err == nil {
		t.Error("no error without a cpu line")
	}
}
