// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/admin"
	"github.com/weft-mesh/weft/internal/datapath/probe"
	"github.com/weft-mesh/weft/internal/state"
)

var update = flag.Bool("update", false, "write the golden files")

// golden compares got with testdata/NAME.golden.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got), go test -update writes it:\n%s", path, diff)
	}
}

// fakeFlows gives the items of a test to those who ask properly.
type fakeFlows struct {
	items []*weftv1.ObserveResponse
	asked chan *weftv1.ObserveRequest
}

func (f *fakeFlows) Observe(ctx context.Context, r *weftv1.ObserveRequest, send func(*weftv1.ObserveResponse) error) error {
	f.asked <- r
	if len(r.FromPod) > 0 && !strings.Contains(r.FromPod[0], "/") {
		return status.Error(codes.InvalidArgument, `from_pod "web": want NAMESPACE/NAME`)
	}
	for _, i := range f.items {
		if err := send(i); err != nil {
			return err
		}
	}
	if r.Follow {
		<-ctx.Done()
	}
	return nil
}

// serveAgent runs an agent's API for the test, at $WEFT_SOCKET.
func serveAgent(t *testing.T, f *fakeFlows) {
	t.Helper()
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	txn := tables.DB.WriteTxn(tables.Pods)
	tables.Pods.Insert(txn, &state.Pod{
		ContainerID: "c0ffee", Namespace: "shop", Name: "web", Interface: "wf0123456789", Identity: 256,
		IPs: []netip.Addr{netip.MustParseAddr("10.244.1.5"), netip.MustParseAddr("fd00:10:244:1::5")},
	})
	tables.Pods.Insert(txn, &state.Pod{ContainerID: "decaf", Namespace: "shop", Name: "db-with-a-long-name", Interface: "wf9876543210", Identity: 257})
	txn.Commit()
	path := filepath.Join(t.TempDir(), "weft.sock")
	s, err := admin.New(admin.Config{Socket: path}, admin.Providers{
		Status: nodeState, Tables: tables, Flows: f,
	}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-s.Listening():
	case <-time.After(10 * time.Second):
		t.Fatal("no API")
	}
	t.Setenv(socketEnv, path)
}

func nodeState() *weftv1.StatusResponse {
	return &weftv1.StatusResponse{
		Node: "node1", Version: "v0.1.0", Started: &timestamppb.Timestamp{Seconds: 1770000000}, Routing: "vxlan", Mtu: 1450,
		Components: []*weftv1.Component{{Name: "source", Ready: true}, {Name: "datapath", Message: "attach pod program to eth0: permission denied"}},
		Pods:       []*weftv1.PodStatus{{Namespace: "shop", Name: "web", ContainerId: "c0ffee", Ips: []string{"10.244.1.5", "fd00:10:244:1::5"}, Interface: "wf0123456789", Identity: 256}},
		Programs:   []*weftv1.Program{{Name: "weft_pod_ingress", Attach: "tcx ingress", Device: "wf0123456789", Id: 41, LinkId: 7}},
		Maps:       []*weftv1.MapFill{{Name: "conntrack", Entries: 1234, MaxEntries: 262144}},
		Forwarded:  []*weftv1.Counter{{Name: "same-node", Packets: 100, Bytes: 6000}},
		Events:     &weftv1.Events{Generated: 1200, Lost: 200, Received: 1000, ReportedLost: 199},
		Services: &weftv1.ServicesStatus{
			Services: 3, Ports: 4, Frontends: 9, Backends: 5, Changed: &timestamppb.Timestamp{Seconds: 1770000100}, SyncSeconds: 0.00123,
			MaglevTables: 2, MaglevBytes: 262144, External: "snat", Xdp: "XDP native on eth0", Denied: 1, Flows: 17, Cut: 2,
			Problems: []string{`Service shop/db: spec.ports[1].protocol: "SCTP": want TCP or UDP: weft does not translate SCTP`},
		},
		Generation: 7, SourceErrors: []string{"pod.yaml: document 2: spec.containers: want at least one"},
	}
}

func flowItems() []*weftv1.ObserveResponse {
	at := func(us int32) *timestamppb.Timestamp {
		return &timestamppb.Timestamp{Seconds: 1770000000, Nanos: us * 1000}
	}
	flow := func(f *weftv1.Flow) *weftv1.ObserveResponse {
		return &weftv1.ObserveResponse{Item: &weftv1.ObserveResponse_Flow{Flow: f}}
	}
	lost := func(l *weftv1.Lost) *weftv1.ObserveResponse {
		return &weftv1.ObserveResponse{Item: &weftv1.ObserveResponse_Lost{Lost: l}}
	}
	web := &weftv1.FlowEndpoint{Ip: "10.244.1.5", Port: 40000, Identity: 256, Namespace: "shop", Pod: "web", Kind: "pod", Labels: map[string]string{"app": "web"}}
	db := &weftv1.FlowEndpoint{Ip: "fd00:10:244:2::9", Port: 5432, Identity: 257, Namespace: "shop", Pod: "db-with-a-long-name-0123", Kind: "pod"}
	return []*weftv1.ObserveResponse{
		flow(&weftv1.Flow{
			Time: at(1), Node: "node1", Type: weftv1.FlowType_FLOW_TYPE_NEW, Verdict: weftv1.Verdict_VERDICT_FORWARDED, Protocol: "TCP",
			Source: web, Destination: db, Direction: "egress", TcpFlags: "SYN", Packets: 1, Bytes: 60, Device: "wf0123456789", Sequence: 4,
		}),
		lost(&weftv1.Lost{Count: 3, Where: "kernel-ring", Cpu: 0, From: at(1), To: at(9)}),
		flow(&weftv1.Flow{
			Time: at(20), Node: "node1", Type: weftv1.FlowType_FLOW_TYPE_DROP, Verdict: weftv1.Verdict_VERDICT_DROPPED, Reason: "spoofed-address", Protocol: "ICMP",
			Source: web, Destination: &weftv1.FlowEndpoint{Ip: "8.8.8.8", Port: 77, Identity: 2, Kind: "world"}, Direction: "egress",
			IcmpType: 8, Packets: 1, Bytes: 84, Device: "wf0123456789", Cpu: 1, Sequence: 8,
		}),
		lost(&weftv1.Lost{Count: 12, Where: "observer", From: at(21), To: at(30)}),
		flow(&weftv1.Flow{
			Time: at(1000000 - 1), Node: "node1", Type: weftv1.FlowType_FLOW_TYPE_CLOSE, Verdict: weftv1.Verdict_VERDICT_FORWARDED, Protocol: "UDP",
			Source: db, Destination: &weftv1.FlowEndpoint{Ip: "2001:db8::1", Port: 53, Identity: 2, Kind: "world"}, Packets: 12, Bytes: 3400, Sequence: 9,
		}),
	}
}

func kernelReport() *probe.Report {
	return &probe.Report{Kernel: "6.1.0 x86_64", Features: []probe.Result{
		{Group: "base", Feature: "BTF", Status: probe.Available, Required: true, Effect: "one set of programs", Since: "5.4"},
		{Group: "pod routing", Feature: "tcx links", Status: probe.Missing, Required: true, Effect: "nothing", Since: "6.6", Option: "CONFIG_NET_XGRESS", Error: "not supported (requires >= v6.6)"},
		{Group: "pod routing", Feature: "XDP", Status: probe.Missing, Effect: "the edge runs in tcx", Since: "4.19", Error: "not supported"},
		{Group: "pod routing", Feature: "fentry", Status: probe.Unknown, Effect: "nothing is missed", Since: "5.5", Error: "operation not permitted"},
	}}
}

// command is the tree of the commands under test.
func command(s IO) *cobra.Command {
	root := &cobra.Command{Use: "weft", SilenceUsage: true, SilenceErrors: true}
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	root.AddCommand(newStatusCommand(s), newTableCommand(s), newObserveCommand(s), newVersionCommand(s),
		newCheckCommand(s, func() (*probe.Report, error) { return kernelReport(), nil }),
		newAgentCommand(s, func(_ context.Context, config string, stderr io.Writer) error {
			_, err := io.WriteString(stderr, "agent with "+config)
			return err
		}))
	return root
}

func runWeft(ctx context.Context, args ...string) (out, errOut string, err error) {
	var o, e bytes.Buffer
	root := command(IO{In: strings.NewReader(""), Out: &o, Err: &e})
	root.SetArgs(args)
	err = root.ExecuteContext(ctx)
	return o.String(), e.String(), err
}

func TestHelp(t *testing.T) {
	for _, c := range []string{"status", "table", "table list", "observe", "check", "version", "agent"} {
		t.Run(c, func(t *testing.T) {
			t.Setenv(socketEnv, "/elsewhere") // help does not depend on it
			out, _, err := runWeft(t.Context(), append(strings.Fields(c), "--help")...)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, "help-"+strings.ReplaceAll(c, " ", "-"), out)
		})
	}
}

func TestOutput(t *testing.T) {
	serveAgent(t, &fakeFlows{items: flowItems(), asked: make(chan *weftv1.ObserveRequest, 10)})
	for _, args := range []string{"status", "table list pod", "table list namespace", "observe", "check"} {
		for _, format := range []string{"table", "json"} {
			name := strings.ReplaceAll(args, " ", "-") + "-" + format
			t.Run(name, func(t *testing.T) {
				out, _, err := runWeft(t.Context(), append(strings.Fields(args), "-o", format)...)
				if want := args == "check"; (err != nil) != want {
					t.Fatal(err)
				}
				golden(t, name, out)
			})
		}
	}
}

func TestObserveAsksWhatTheFlagsSay(t *testing.T) {
	f := &fakeFlows{asked: make(chan *weftv1.ObserveRequest, 1)}
	serveAgent(t, f)
	_, _, err := runWeft(t.Context(), "observe", "--last", "5", "--since", "2026-01-31T12:00:00Z", "--from-pod", "shop/web,shop/db", "--to-pod", "a/",
		"--pod", "b/c", "--verdict", "dropped", "--reason", "no-route", "--protocol", "tcp", "--protocol", "udp", "--type", "new,drop")
	if err != nil {
		t.Fatal(err)
	}
	got := <-f.asked
	want := &weftv1.ObserveRequest{
		Last: 5, Since: timestamppb.New(time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)),
		FromPod: []string{"shop/web", "shop/db"}, ToPod: []string{"a/"}, Pod: []string{"b/c"},
		Verdict: []weftv1.Verdict{weftv1.Verdict_VERDICT_DROPPED}, Reason: []string{"no-route"}, Protocol: []string{"tcp", "udp"},
		Type: []weftv1.FlowType{weftv1.FlowType_FLOW_TYPE_NEW, weftv1.FlowType_FLOW_TYPE_DROP},
	}
	if got.String() != want.String() {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// TestFollowEndsWithoutError: an interrupt is how --follow ends.
func TestFollowEndsWithoutError(t *testing.T) {
	f := &fakeFlows{items: flowItems(), asked: make(chan *weftv1.ObserveRequest, 1)}
	serveAgent(t, f)
	ctx, interrupt := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, _, err := runWeft(ctx, "observe", "--follow")
		done <- err
	}()
	if !(<-f.asked).Follow {
		t.Error("does not follow")
	}
	interrupt()
	if err := <-done; err != nil {
		t.Errorf("got %v", err)
	}
}

func TestErrors(t *testing.T) {
	serveAgent(t, &fakeFlows{asked: make(chan *weftv1.ObserveRequest, 10)})
	for _, c := range []struct{ args, want string }{
		{"status --socket /nowhere/weft.sock", "no agent answers on /nowhere/weft.sock: is weft agent running on this node?"},
		{"status extra", `unknown command "extra" for "weft status"`},
		{"status -o yaml", `output "yaml": want table or json`},
		{"table list", "accepts 1 arg(s), received 0"},
		{"table list pods", `no table "pods": want one of endpoint, identity, namespace, node, pod, policy, service, source-error, workload`},
		{"observe --verdict denied", `verdict "denied": want one of forwarded, dropped`},
		{"observe --type syn", `type "syn": want one of new, update, close, drop`},
		{"observe --since yesterday", `since "yesterday": want a duration such as 90s or 1h30m, or a time such as 2026-01-31T12:00:00Z`},
		{"observe --since -1m", `since "-1m": want a duration`},
		{"observe --from-pod web", `from_pod "web": want NAMESPACE/NAME`},
		{"check", "this kernel cannot run weft, it lacks: tcx links (since Linux 6.6)"},
		{"agent", `required flag(s) "config" not set`},
	} {
		out, _, err := runWeft(t.Context(), strings.Fields(c.args)...)
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("weft %s: got %v, want %q", c.args, err, c.want)
		}
		if c.args != "check" && out != "" {
			t.Errorf("weft %s: printed %q", c.args, out)
		}
	}
}

func TestAgentRunsWithItsConfig(t *testing.T) {
	if _, errOut, err := runWeft(t.Context(), "agent", "--config", "a.yaml"); err != nil || errOut != "agent with a.yaml" {
		t.Errorf("got %q, %v", errOut, err)
	}
}

func TestCompletion(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"__complete table list ", "endpoint\nidentity\nnamespace\nnode\npod\npolicy\nservice\nsource-error\nworkload\n:4\n"},
		{"__complete observe --verdict ", "forwarded\ndropped\n:4\n"},
		{"__complete observe --type ", "new\nupdate\nclose\ndrop\n:4\n"},
		{"__complete status -o ", "table\njson\n:4\n"},
	} {
		out, _, err := runWeft(t.Context(), append(strings.Fields(c.args), "")...)
		if err != nil || out != c.want {
			t.Errorf("%s: got %q, %v", c.args, out, err)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, _, err := runWeft(t.Context(), "completion", shell); err != nil || !strings.Contains(out, "weft") {
			t.Errorf("completion %s: %v", shell, err)
		}
	}
}

func TestColumnsGrow(t *testing.T) {
	var b strings.Builder
	var c columns
	for _, row := range [][]string{{"a", "→", "x"}, {"longer", "y", ""}, {"a", "b", "c"}} {
		if err := c.write(&b, row); err != nil {
			t.Fatal(err)
		}
	}
	if want := "a  →  x\nlonger  y\na       b  c\n"; b.String() != want {
		t.Errorf("got %q", b.String())
	}
}

func TestPrintErrorEndsTheStream(t *testing.T) {
	broken := errors.New("broken pipe")
	items := flowItems()
	recv := func() (*weftv1.ObserveResponse, error) { return items[0], nil }
	if err := receive(recv, func(*weftv1.ObserveResponse) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}
