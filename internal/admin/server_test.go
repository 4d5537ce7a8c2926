// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/admin/dial"
	"github.com/weft-mesh/weft/internal/state"
)

const deadline = 10 * time.Second

// flows is a Flows of a test.
type flows func(context.Context, *weftv1.ObserveRequest, func(*weftv1.ObserveResponse) error) error

func (f flows) Observe(ctx context.Context, r *weftv1.ObserveRequest, send func(*weftv1.ObserveResponse) error) error {
	return f(ctx, r, send)
}

func providers(t *testing.T) Providers {
	t.Helper()
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	return Providers{
		Tables: tables,
		Status: func() *weftv1.StatusResponse { return &weftv1.StatusResponse{Node: "node1", Ready: true} },
		Flows: flows(func(ctx context.Context, _ *weftv1.ObserveRequest, send func(*weftv1.ObserveResponse) error) error {
			if err := send(&weftv1.ObserveResponse{Item: &weftv1.ObserveResponse_Lost{Lost: &weftv1.Lost{Count: 1}}}); err != nil {
				return err
			}
			<-ctx.Done()
			return status.FromContextError(ctx.Err()).Err()
		}),
	}
}

type running struct {
	*Server
	path string
	stop context.CancelFunc
	done chan error
	log  *bytes.Buffer // read it after stop
}

// start runs a server until the test ends.
func start(t *testing.T, path string, p Providers) *running {
	t.Helper()
	log := &bytes.Buffer{}
	s, err := New(Config{Socket: path}, p, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &running{Server: s, path: path, stop: stop, done: make(chan error, 1), log: log}
	go func() { r.done <- s.Run(ctx) }()
	select {
	case <-s.Listening():
	case err := <-r.done:
		t.Fatalf("server ended: %v", err)
	case <-time.After(deadline):
		t.Fatal("server does not listen")
	}
	t.Cleanup(func() { r.halt(t) })
	return r
}

func (r *running) halt(t *testing.T) {
	t.Helper()
	r.stop()
	select {
	case err, ok := <-r.done:
		if ok && err != nil {
			t.Errorf("Run: %v", err)
		}
		if ok {
			close(r.done)
		}
	case <-time.After(deadline):
		t.Error("server does not stop")
	}
}

func client(t *testing.T, path string) weftv1.NodeClient {
	t.Helper()
	conn, err := dial.Agent(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return weftv1.NewNodeClient(conn)
}

func sock(t *testing.T) string { return filepath.Join(t.TempDir(), "run", "weft.sock") }

func TestCalls(t *testing.T) {
	p := providers(t)
	txn := p.Tables.DB.WriteTxn(p.Tables.Namespaces)
	p.Tables.Namespaces.Insert(txn, &state.Namespace{Name: "shop"})
	txn.Commit()
	p.WaitApplied = func(_ context.Context, g uint64) (uint64, []string, error) {
		return g + 1, []string{"pod.yaml: bad"}, nil
	}
	s := start(t, sock(t), p)
	c := client(t, s.path)
	st, err := c.Status(t.Context(), &weftv1.StatusRequest{})
	if err != nil || st.Node != "node1" {
		t.Errorf("Status: %v, %v", st, err)
	}
	list, err := c.ListTable(t.Context(), &weftv1.ListTableRequest{Name: "namespace"})
	if err != nil || len(list.Rows) != 1 || list.Rows[0].Cells[0] != "shop" || string(list.Rows[0].Json) != `{"name":"shop"}` {
		t.Errorf("ListTable: %v, %v", list, err)
	}
	_, err = c.ListTable(t.Context(), &weftv1.ListTableRequest{Name: "pods"})
	if status.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "want one of endpoint, identity") {
		t.Errorf("ListTable of an unknown table: %v", err)
	}
	w, err := c.WaitApplied(t.Context(), &weftv1.WaitAppliedRequest{Generation: 7})
	if err != nil || w.Generation != 8 || len(w.SourceErrors) != 1 {
		t.Errorf("WaitApplied: %v, %v", w, err)
	}
}

func TestWaitAppliedWithoutFolder(t *testing.T) {
	s := start(t, sock(t), providers(t))
	_, err := client(t, s.path).WaitApplied(t.Context(), &weftv1.WaitAppliedRequest{})
	if status.Code(err) != codes.FailedPrecondition {
		t.Fatalf("got %v", err)
	}
}

func TestClientDeadlineIsTold(t *testing.T) {
	p := providers(t)
	p.WaitApplied = func(ctx context.Context, _ uint64) (uint64, []string, error) {
		<-ctx.Done()
		return 0, nil, errors.Join(errors.New("waiting for routes"), ctx.Err())
	}
	s := start(t, sock(t), p)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := client(t, s.path).WaitApplied(ctx, &weftv1.WaitAppliedRequest{})
	if status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("got %v", err)
	}
}

func TestStopEndsCallsThatLast(t *testing.T) {
	p := providers(t)
	waiting := make(chan struct{})
	p.WaitApplied = func(ctx context.Context, _ uint64) (uint64, []string, error) {
		close(waiting)
		<-ctx.Done()
		return 0, nil, ctx.Err()
	}
	s := start(t, sock(t), p)
	c := client(t, s.path)
	stream, err := c.Observe(t.Context(), &weftv1.ObserveRequest{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	wait := make(chan error, 1)
	go func() {
		_, err := c.WaitApplied(context.Background(), &weftv1.WaitAppliedRequest{})
		wait <- err
	}()
	<-waiting
	s.halt(t)
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the agent is stopping") {
		t.Errorf("Observe: %v", err)
	}
	if err := <-wait; status.Code(err) != codes.Unavailable {
		t.Errorf("WaitApplied: %v", err)
	}
	left, err := os.ReadDir(filepath.Dir(s.path))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestPanicEndsTheCallOnly(t *testing.T) {
	p := providers(t)
	p.WaitApplied = func(context.Context, uint64) (uint64, []string, error) { panic("unary") }
	p.Flows = flows(func(context.Context, *weftv1.ObserveRequest, func(*weftv1.ObserveResponse) error) error {
		panic("stream")
	})
	s := start(t, sock(t), p)
	c := client(t, s.path)
	if _, err := c.WaitApplied(t.Context(), &weftv1.WaitAppliedRequest{}); status.Code(err) != codes.Internal {
		t.Errorf("unary: %v", err)
	}
	stream, err := c.Observe(t.Context(), &weftv1.ObserveRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Internal {
		t.Errorf("stream: %v", err)
	}
	if _, err := c.Status(t.Context(), &weftv1.StatusRequest{}); err != nil {
		t.Errorf("after the panics: %v", err)
	}
	s.halt(t)
	if s.Panics() != 2 || strings.Count(s.log.String(), "panic in a call") != 2 {
		t.Errorf("%d panics counted, log %s", s.Panics(), s.log)
	}
}

func TestRequestOfWrongSize(t *testing.T) {
	s := start(t, sock(t), providers(t))
	_, err := client(t, s.path).ListTable(t.Context(), &weftv1.ListTableRequest{Name: strings.Repeat("x", MaxRequest+1)})
	if status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("got %v", err)
	}
}

func TestSocketModes(t *testing.T) {
	s := start(t, sock(t), providers(t))
	for path, want := range map[string]os.FileMode{s.path: 0o600, filepath.Dir(s.path): 0o700} {
		st, err := os.Stat(path)
		if err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %v", path, st.Mode(), err, want)
		}
	}
}

func TestSecondAgentIsRefused(t *testing.T) {
	s := start(t, sock(t), providers(t))
	if _, err := listen(s.path); err == nil || !strings.Contains(err.Error(), "another agent") {
		t.Fatalf("got %v", err)
	}
	if _, err := client(t, s.path).Status(t.Context(), &weftv1.StatusRequest{}); err != nil {
		t.Fatalf("the first one: %v", err)
	}
}

func TestListenerWithoutLockIsRespected(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "another agent answers on") {
		t.Fatalf("got %v", err)
	}
	if _, err := os.Stat(path + ".lock"); !os.IsNotExist(err) {
		t.Fatalf("lock is left: %v", err)
	}
}

func TestStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "weft.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close() // as kill -9 leaves it
	if err := os.WriteFile(path+".lock", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := dial.Agent(path); err == nil || err.Error() != "no agent answers on "+path+": is weft agent running on this node?" {
		t.Fatalf("dial of a dead agent: %v", err)
	}
	s := start(t, path, providers(t))
	if _, err := client(t, s.path).Status(t.Context(), &weftv1.StatusRequest{}); err != nil {
		t.Fatal(err)
	}
}

func TestHealth(t *testing.T) {
	st := &weftv1.StatusResponse{Components: []*weftv1.Component{{Name: "source", Ready: true}, {Name: "datapath", Message: "attach pod program to eth0"}}}
	p := providers(t)
	p.Status = func() *weftv1.StatusResponse { return st }
	s, err := New(Config{Socket: sock(t), Health: "127.0.0.1:0"}, p, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.listenHealth(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.serveHealth(ctx, l) }()
	get := func(path string) (int, string) {
		resp, err := http.Get("http://" + l.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	for _, c := range []struct {
		ready bool
		path  string
		code  int
		body  string
	}{
		{false, "/healthz", 200, "ok\n"},
		{false, "/readyz", 503, `{"ready":false,"components":[{"name":"datapath","message":"attach pod program to eth0"}]}` + "\n"},
		{true, "/readyz", 200, `{"ready":true,"components":[]}` + "\n"},
		{true, "/other", 404, "404 page not found\n"},
	} {
		st.Ready = c.ready
		st.Components[1].Ready = c.ready
		if code, body := get(c.path); code != c.code || body != c.body {
			t.Errorf("%s: %d %q", c.path, code, body)
		}
	}
	stop()
	if err := <-served; err != nil {
		t.Fatal(err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{}, "socket: want a path"},
		{Config{Socket: "/" + strings.Repeat("x", 107)}, "want a path of at most 107 bytes, this one has 108"},
		{Config{Socket: "/s", Health: "9879"}, `health address "9879": want HOST:PORT`},
	} {
		if _, err := New(c.cfg, providers(t), slog.Default()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("want %q, got %v", c.want, err)
		}
	}
	if _, err := New(Config{Socket: "/s"}, Providers{}, slog.Default()); err == nil {
		t.Error("no providers: want an error")
	}
}

func TestDialWithoutAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none.sock")
	if _, err := dial.Agent(path); err == nil || !strings.Contains(err.Error(), "no agent answers on "+path) {
		t.Fatalf("got %v", err)
	}
}
