// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

func TestHandler(t *testing.T) {
	srv := httptest.NewServer(Handler("me"))
	defer srv.Close()
	for _, c := range []struct {
		path string
		code int
		body func(string) bool
	}{
		{"/healthz", 200, func(b string) bool { return b == "ok\n" }},
		{"/?bytes=100000", 200, func(b string) bool { return len(b) == 100000 }},
		{"/?bytes=0", 200, func(b string) bool { return b == "" }},
		{"/?status=503", 503, func(b string) bool { return strings.Contains(b, `"server":"me"`) }},
		{"/?delay=1ms", 200, func(b string) bool { return strings.Contains(b, `"server":"me"`) }},
		{"/?bytes=-1", 400, func(b string) bool { return strings.Contains(b, `bytes "-1": want 0 to`) }},
		{"/?status=99", 400, func(b string) bool { return strings.Contains(b, `status "99": want 200 to 599`) }},
		{"/?delay=soon", 400, func(b string) bool { return strings.Contains(b, `delay "soon": want 0s to 1m`) }},
	} {
		resp, err := http.Get(srv.URL + c.path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != c.code || !c.body(string(b)) {
			t.Errorf("%s: %s, %d bytes %.80q (%v)", c.path, resp.Status, len(b), b, err)
		}
	}
}

func TestAnswer(t *testing.T) {
	srv := httptest.NewServer(Handler("me"))
	defer srv.Close()
	var a Answer
	sum := Get(context.Background(), GetConfig{URL: srv.URL + "/a/b", Count: 1, Timeout: time.Second, Concurrency: 1}, func(_ string, b []byte) {
		if err := json.Unmarshal(b, &a); err != nil {
			t.Error(err)
		}
	})
	if sum.Failed != 0 || a.Server != "me" || a.Path != "/a/b" || a.Method != "GET" || !strings.HasPrefix(a.Client, "127.0.0.1:") {
		t.Errorf("%v, answer %+v", sum, a)
	}
}

func TestGetCounts(t *testing.T) {
	srv := httptest.NewServer(Handler("me"))
	cfg := GetConfig{URL: srv.URL, Count: 50, Timeout: time.Second, Concurrency: 4, KeepAlive: true}
	n := 0
	if sum := Get(context.Background(), cfg, func(string, []byte) { n++ }); sum.Requests != 50 || n != 50 || sum.Failed != 0 {
		t.Errorf("%v, %d answers: want 50", sum, n)
	}
	cfg.URL = srv.URL + "/?status=500"
	if sum := Get(context.Background(), cfg, func(string, []byte) {}); sum.Failed != 50 {
		t.Errorf("%v: want 50 failed", sum)
	}
	srv.Close()
	if sum := Get(context.Background(), cfg, func(string, []byte) {}); sum.Failed != 50 || sum.First == nil {
		t.Errorf("%v, first %v: want 50 failed", sum, sum.First)
	}
}

func TestGetUntilInterrupted(t *testing.T) {
	srv := httptest.NewServer(Handler("me"))
	defer srv.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	n := 0
	cfg := GetConfig{URL: srv.URL, Timeout: time.Second, Concurrency: 1, Interval: time.Microsecond}
	sum := Get(ctx, cfg, func(string, []byte) {
		if n++; n == 10 {
			cancel()
		}
	})
	if sum.Failed != 0 || sum.Requests != 10 {
		t.Errorf("%v: want 10 requests and no failure", sum)
	}
}

func TestEchoAndProbe(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	read, write := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- Echo(ctx, 0, write) }()
	buf := make([]byte, 100)
	n, err := read.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	port := strings.Fields(string(buf[:n]))[3]
	for _, target := range []string{"127.0.0.1:", "[::1]:"} {
		for _, network := range []string{"", "/tcp", "/udp"} {
			if _, err := Probe(ctx, target+port+network, 100, 5*time.Second); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := Probe(ctx, "127.0.0.1:"+port+"/sctp", 100, time.Second); err == nil {
		t.Error("SCTP was accepted")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := Probe(context.Background(), "127.0.0.1:"+port, 100, time.Second); err == nil {
		t.Error("a server that has ended was reached")
	}
}

// The checksum of a valid packet, its own field included, is zero.
func TestSpoofedPacketsAreValid(t *testing.T) {
	v4 := udpPacket(SpoofConfig{Source: netip.MustParseAddr("10.1.2.3"), To: netip.MustParseAddrPort("10.4.5.6:77")})
	if checksum(v4[:20]) != 0 || int(binary.BigEndian.Uint16(v4[2:])) != len(v4) {
		t.Errorf("IPv4 header % x", v4[:20])
	}
	pseudo := append(append([]byte{}, v4[12:20]...), 0, unix.IPPROTO_UDP, 0, byte(len(v4)-20))
	if checksum(append(pseudo, v4[20:]...)) != 0 {
		t.Errorf("UDP by IPv4: % x", v4[20:])
	}
	v6 := udpPacket(SpoofConfig{Source: netip.MustParseAddr("fd00::1"), To: netip.MustParseAddrPort("[fd00::2]:77")})
	pseudo = append(append([]byte{}, v6[8:40]...), 0, 0, 0, byte(len(v6)-40), 0, 0, 0, unix.IPPROTO_UDP)
	if checksum(append(pseudo, v6[40:]...)) != 0 || int(binary.BigEndian.Uint16(v6[4:])) != len(v6)-40 {
		t.Errorf("UDP by IPv6: % x", v6)
	}
}

// What is sent over lo arrives, with the forged source.
func TestSendSpoofed(t *testing.T) {
	ns := nstest.New(t)
	for _, c := range []struct{ source, to string }{{"127.9.9.9", "127.0.0.1"}, {"::1", "::1"}} {
		err := ns.Do(func() error {
			if err := loopbackUp(); err != nil {
				return err
			}
			conn, err := net.ListenPacket("udp", net.JoinHostPort(c.to, "0"))
			if err != nil {
				return err
			}
			defer conn.Close()
			port := conn.LocalAddr().(*net.UDPAddr).Port
			to := netip.MustParseAddrPort(net.JoinHostPort(c.to, strconv.Itoa(port)))
			sent, err := SendSpoofed(context.Background(), SpoofConfig{Source: netip.MustParseAddr(c.source), To: to, Count: 3})
			if err != nil || sent != 3 {
				t.Errorf("sent %d (%v): want 3", sent, err)
			}
			if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
				return err
			}
			_, from, err := conn.ReadFrom(make([]byte, 100))
			if err == nil && from.(*net.UDPAddr).AddrPort() != netip.AddrPortFrom(netip.MustParseAddr(c.source), spoofPort) {
				t.Errorf("came from %s: want %s", from, c.source)
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", c.to, err)
		}
	}
	if _, err := SendSpoofed(context.Background(), SpoofConfig{Source: netip.MustParseAddr("::1"), To: netip.MustParseAddrPort("1.2.3.4:5")}); err == nil {
		t.Error("a mix of address families was accepted")
	}
}

// loopbackUp sets lo up in the network namespace of the thread.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}
