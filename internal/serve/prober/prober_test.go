// SPDX-License-Identifier: Apache-2.0

package prober

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// needRoot skips a test of raw sockets; in CI (CI is set) that is a failure.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") != "" {
		t.Fatal("this test needs root, and in CI it must run")
	}
	t.Skip("this test needs root")
}

// start runs a prober that answers on one free port of each protocol.
func start(t *testing.T) (*Client, Config) {
	t.Helper()
	needRoot(t)
	port := freePort(t)
	cfg := Config{Name: "x/a", Control: filepath.Join(t.TempDir(), "s"), TCP: []int{port}, UDP: []int{port}, SCTP: []int{port}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, cfg, io.Discard) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	wait, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	c, err := Dial(wait, cfg.Control)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, cfg
}

// freePort is free by TCP and UDP, below the source ports of probes.
func freePort(t *testing.T) int {
	t.Helper()
	for port := 7000; port < firstPort; port++ {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{Port: port})
		if err != nil {
			continue
		}
		l.Close()
		u, err := net.ListenUDP("udp", &net.UDPAddr{Port: port})
		if err != nil {
			continue
		}
		u.Close()
		return port
	}
	t.Fatal("no port is free")
	return 0
}

func TestOutcomes(t *testing.T) {
	c, cfg := start(t)
	silent, err := net.ListenUDP("udp", &net.UDPAddr{Port: 0})
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	open, closed := uint16(cfg.TCP[0]), uint16(9)
	mute := silent.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	var jobs []Job
	var want []string
	for _, ip := range []string{"127.0.0.1", "::1"} {
		for _, protocol := range []string{TCP, UDP, SCTP} {
			jobs = append(jobs,
				Job{protocol, netip.AddrPortFrom(netip.MustParseAddr(ip), open)},
				Job{protocol, netip.AddrPortFrom(netip.MustParseAddr(ip), closed)})
			want = append(want, Reached, Refused)
		}
		jobs = append(jobs, Job{UDP, netip.AddrPortFrom(netip.MustParseAddr(ip), mute)})
		want = append(want, NoAnswer)
	}
	got, err := c.Do(t.Context(), Batch{Jobs: jobs, Timeout: 500 * time.Millisecond, Tries: 2})
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range got {
		if v.Outcome != want[i] {
			t.Errorf("%s %s: %s, want %s", jobs[i].Protocol, jobs[i].To, v, want[i])
		}
		if v.Outcome == Reached && v.Answer != cfg.Name {
			t.Errorf("%s %s: answer %q, want %q", jobs[i].Protocol, jobs[i].To, v.Answer, cfg.Name)
		}
		if v.Outcome == NoAnswer && v.Tries != 2 {
			t.Errorf("%s %s: %d tries, want 2", jobs[i].Protocol, jobs[i].To, v.Tries)
		}
	}
}

func TestManyAtOnce(t *testing.T) {
	c, cfg := start(t)
	var jobs []Job
	for range 300 {
		for _, protocol := range []string{TCP, UDP, SCTP} {
			jobs = append(jobs, Job{protocol, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(cfg.TCP[0]))})
		}
	}
	got, err := c.Do(t.Context(), Batch{Jobs: jobs, Timeout: 2 * time.Second, Tries: 3})
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range got {
		if v.Outcome != Reached {
			t.Errorf("job %d, %s: %s", i, jobs[i].Protocol, v)
		}
	}
}

func TestClientOfSeveral(t *testing.T) {
	c, cfg := start(t)
	job := Job{UDP, netip.AddrPortFrom(netip.MustParseAddr("::1"), uint16(cfg.UDP[0]))}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			v, err := c.Do(t.Context(), Batch{Jobs: []Job{job}, Timeout: 2 * time.Second, Tries: 3})
			if err != nil || v[0].Outcome != Reached {
				t.Errorf("verdicts %v, error %v", v, err)
			}
		})
	}
	wg.Wait()
}

func TestBadOrders(t *testing.T) {
	c, _ := start(t)
	to := netip.MustParseAddrPort("127.0.0.1:80")
	for want, b := range map[string]Batch{
		"timeout 0s":      {Tries: 1},
		"tries 0":         {Timeout: time.Second},
		`protocol "ICMP"`: {Timeout: time.Second, Tries: 1, Jobs: []Job{{"ICMP", to}}},
		"destination":     {Timeout: time.Second, Tries: 1, Jobs: []Job{{TCP, netip.AddrPort{}}}},
	} {
		if _, err := c.Do(t.Context(), b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

func TestConfigValidate(t *testing.T) {
	for want, c := range map[string]Config{
		"name":           {Control: "s"},
		"control":        {Name: "a"},
		"TCP port 0":     {Name: "a", Control: "s", TCP: []int{0}},
		"UDP port 53":    {Name: "a", Control: "s", UDP: []int{53, 53}},
		"SCTP port 1000": {Name: "a", Control: "s", SCTP: []int{100000}},
	} {
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

func TestSCTPPackets(t *testing.T) {
	for _, p := range []sctpPacket{
		{sport: 1, dport: 2, chunk: chunkInit, initTag: 7},
		{sport: 1, dport: 2, tag: 7, chunk: chunkInitAck, initTag: 8, cookie: "x/a"},
		{sport: 1, dport: 2, tag: 7, chunk: chunkAbort},
	} {
		b := p.marshal()
		if got, ok := parseSCTP(append([]byte(nil), b...)); !ok || got != p {
			t.Errorf("packet %+v, %t: want %+v", got, ok, p)
		}
		for i := range b {
			bad := append([]byte(nil), b...)
			bad[i] ^= 0x10
			if _, ok := parseSCTP(bad); ok {
				t.Errorf("byte %d of %+v changed: want it refused", i, p)
			}
			if _, ok := parseSCTP(b[:i:i]); ok {
				t.Errorf("first %d bytes of %+v: want them refused", i, p)
			}
		}
	}
}

func TestSourcePortsAreGivenInTurn(t *testing.T) {
	c := newPortCounter([]int{firstPort + 1})
	for _, want := range []uint16{firstPort, firstPort + 2} {
		if got := c.next(); got != want {
			t.Errorf("port %d, want %d", got, want)
		}
	}
	c.last = lastPort
	if got := c.next(); got != firstPort {
		t.Errorf("port %d after the last, want %d", got, firstPort)
	}
}
