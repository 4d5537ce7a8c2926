// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// talkServer runs until the test ends or stop is called, which returns when the
// server has ended.
func talkServer(t *testing.T, name string, drain time.Duration) (address string, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	out, in := io.Pipe()
	ended := make(chan error, 1)
	s := &TalkServer{Name: name, Drain: drain}
	go func() { ended <- s.Run(ctx, in) }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var port int
	if _, err := fmt.Sscanf(line, name+": talk on port %d by TCP and UDP", &port); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	t.Cleanup(cancel)
	return fmt.Sprintf("127.0.0.1:%d", port), func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func talk(t *testing.T, cfg TalkConfig) (replies []Reply) {
	t.Helper()
	if cfg.Size == 0 {
		cfg.Size = 32
	}
	cfg.Timeout = 5 * time.Second
	if err := Talk(t.Context(), cfg, func(r Reply) { replies = append(replies, r) }); err != nil {
		t.Fatal(err)
	}
	return replies
}

func TestTalk(t *testing.T) {
	address, stop := talkServer(t, "me", 0)
	defer stop()
	for _, c := range []struct {
		name    string
		cfg     TalkConfig
		size    int // of the answer; 0 where it does not matter
		sockets int
	}{
		{"TCP", TalkConfig{Target: address, Count: 5}, 0, 1},
		{"TCP, a connection each", TalkConfig{Target: address, Count: 5, Each: true}, 0, 5},
		{"UDP", TalkConfig{Target: address + "/udp", Count: 5, Size: 1400}, 1400, 1},
		{"UDP, large", TalkConfig{Target: address + "/udp", Count: 2, Size: 60000}, 60000, 1},
		{"UDP, not connected", TalkConfig{Target: address + "/udp", Count: 5, Size: 1400, Unconnected: true}, 1400, 1},
	} {
		replies := talk(t, c.cfg)
		if len(replies) != c.cfg.Count {
			t.Fatalf("%s: %d replies", c.name, len(replies))
		}
		locals := map[string]bool{}
		for i, r := range replies {
			size := c.cfg.Size
			if size == 0 {
				size = 32
			}
			want := fmt.Sprintf("me heard %d bytes from ", size)
			if r.Err != nil || r.Server != "me" || !strings.HasPrefix(r.Text, want) || !strings.HasSuffix(r.Text, fmt.Sprintf(": #%d", i+1)) || r.Peer != address {
				t.Errorf("%s: %+v", c.name, r)
			}
			if c.size > 0 && r.Size != c.size {
				t.Errorf("%s: an answer of %d bytes: want %d", c.name, r.Size, c.size)
			}
			locals[r.Local] = true
		}
		if len(locals) != c.sockets {
			t.Errorf("%s: from %v: want %d sockets", c.name, locals, c.sockets)
		}
	}
}

// The same port is used again at once, by TCP too.
func TestTalkFromOnePort(t *testing.T) {
	address, stop := talkServer(t, "me", 0)
	defer stop()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := free.Addr().(*net.TCPAddr).Port
	free.Close()
	for _, target := range []string{address, address + "/udp"} {
		for _, r := range talk(t, TalkConfig{Target: target, Count: 5, Each: true, Reset: true, SourcePort: port}) {
			if r.Err != nil || r.Local != fmt.Sprintf("127.0.0.1:%d", port) {
				t.Errorf("%s: %+v", target, r)
			}
		}
	}
}

// A UDP client goes on after an error; a TCP client ends with its connection.
func TestTalkToNobody(t *testing.T) {
	address, stop := talkServer(t, "me", 0)
	stop()
	for _, target := range []string{address, address + "/udp"} {
		want := map[bool]int{true: 3, false: 1}[strings.HasSuffix(target, "/udp")]
		replies := talk(t, TalkConfig{Target: target, Count: 3})
		if len(replies) != want {
			t.Errorf("%s: %d replies: want %d", target, len(replies), want)
		}
		for _, r := range replies {
			if r.Err == nil {
				t.Errorf("%s: %+v", target, r)
			}
		}
	}
}

// Open connections go on after the server was told to end; new ones do not begin.
func TestTalkServerDrains(t *testing.T) {
	address, stop := talkServer(t, "me", 5*time.Second)
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(conn)
	ask := func() error {
		fmt.Fprintln(conn, "#1")
		_, err := lines.ReadString('\n')
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { stop(); close(ended) }()
	for {
		other, err := net.Dial("tcp", address)
		if err != nil {
			break
		}
		other.Close()
	}
	if err := ask(); err != nil {
		t.Errorf("while it drains: %v", err)
	}
	conn.Close()
	<-ended
}

func TestTalkConfig(t *testing.T) {
	good := TalkConfig{Target: "a:1", Size: 32, Timeout: time.Second}
	for want, change := range map[string]func(*TalkConfig){
		"count -1":          func(c *TalkConfig) { c.Count = -1 },
		"interval -1s":      func(c *TalkConfig) { c.Interval = -time.Second },
		"timeout 0s":        func(c *TalkConfig) { c.Timeout = 0 },
		"size 1: want 16":   func(c *TalkConfig) { c.Size = 1 },
		"source port 70000": func(c *TalkConfig) { c.SourcePort = 70000 },
		"target with /udp":  func(c *TalkConfig) { c.Unconnected = true },
	} {
		c := good
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
}

func TestGetAtARate(t *testing.T) {
	srv := httptest.NewServer(Handler("me"))
	defer srv.Close()
	// Each takes longer than the time between two.
	cfg := GetConfig{URL: srv.URL + "/?delay=100ms", Rate: 200, Count: 40, Timeout: 5 * time.Second, Concurrency: 1}
	sum := Get(t.Context(), cfg, func(string, []byte) {})
	if sum.Requests != 40 || sum.Failed != 0 || sum.Servers["me"] != 40 {
		t.Errorf("%v, by %v: %v", sum, sum.Servers, sum.First)
	}
	if sum.Elapsed < 200*time.Millisecond || sum.Elapsed > 3*time.Second {
		t.Errorf("took %s: want about 0.3s", sum.Elapsed)
	}
	cfg.Count, cfg.Duration = 0, 200*time.Millisecond
	if sum := Get(t.Context(), cfg, func(string, []byte) {}); sum.Requests < 20 || sum.Requests > 41 || sum.Failed != 0 {
		t.Errorf("for 200 ms: %v: %v", sum, sum.First)
	}
}

func TestGetConfigOfLoads(t *testing.T) {
	good := GetConfig{URL: "http://a", Timeout: time.Second, Concurrency: 1}
	for want, change := range map[string]func(*GetConfig){
		"rate -1: want 0":            func(c *GetConfig) { c.Rate = -1 },
		"rate: want no keepalive":    func(c *GetConfig) { c.Rate, c.KeepAlive = 10, true },
		"duration -1s":               func(c *GetConfig) { c.Duration = -time.Second },
		"source port 70000":          func(c *GetConfig) { c.SourcePort = 70000 },
		"want one request at a time": func(c *GetConfig) { c.SourcePort, c.Concurrency = 4000, 2 },
	} {
		c := good
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
}

// One port again and again reaches the server by a new connection each time.
func TestGetFromOnePort(t *testing.T) {
	srv := httptest.NewServer(Handler("me"))
	defer srv.Close()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := free.Addr().(*net.TCPAddr).Port
	free.Close()
	want := fmt.Sprintf(`"client":"127.0.0.1:%d"`, port)
	sum := Get(t.Context(), GetConfig{URL: srv.URL, Count: 5, Timeout: 5 * time.Second, Concurrency: 1, SourcePort: port}, func(_ string, body []byte) {
		if !strings.Contains(string(body), want) {
			t.Errorf("%s: want %s", body, want)
		}
	})
	if sum.Failed != 0 || sum.Requests != 5 {
		t.Errorf("%v: %v", sum, sum.First)
	}
}
