// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/source/cni/tombstone"
)

// asPlugin makes the test binary be weft-cni, for libcni to run.
const asPlugin = "WEFT_TEST_AS_PLUGIN"

func TestMain(m *testing.M) {
	if os.Getenv(asPlugin) != "" {
		p := &Plugin{Stdout: os.Stdout, Timeouts: DefaultTimeouts}
		skel.PluginMainFuncs(p.Funcs(), Versions(), "weft-cni")
		return
	}
	os.Exit(m.Run())
}

// fakeAgent answers with err, or else well, and notes what it was asked.
type fakeAgent struct {
	weftv1.UnimplementedCniServer
	err   error
	asked proto.Message
}

func (a *fakeAgent) Add(_ context.Context, r *weftv1.CniAddRequest) (*weftv1.CniAddResponse, error) {
	a.asked = r
	return &weftv1.CniAddResponse{
		HostInterface: "wf0123456789", HostMac: "02:00:00:00:00:01", Mac: "02:00:00:00:00:02", Mtu: 1450,
		Ips: []*weftv1.CniIp{{Address: "10.244.1.2/32", Gateway: "10.244.1.1"}, {Address: "fd00::2/128", Gateway: "fd00::1"}},
		Routes: []*weftv1.CniRoute{
			{Destination: "10.244.1.1/32"}, {Destination: "0.0.0.0/0", Gateway: "10.244.1.1"},
			{Destination: "fd00::1/128"}, {Destination: "::/0", Gateway: "fd00::1"},
		},
	}, a.err
}

func (a *fakeAgent) Del(_ context.Context, r *weftv1.CniDelRequest) (*weftv1.CniDelResponse, error) {
	a.asked = r
	return &weftv1.CniDelResponse{}, a.err
}

func (a *fakeAgent) Check(_ context.Context, r *weftv1.CniCheckRequest) (*weftv1.CniCheckResponse, error) {
	a.asked = r
	return &weftv1.CniCheckResponse{}, a.err
}

func (a *fakeAgent) Ready(_ context.Context, r *weftv1.CniReadyRequest) (*weftv1.CniReadyResponse, error) {
	a.asked = r
	return &weftv1.CniReadyResponse{}, a.err
}

func (a *fakeAgent) Gc(_ context.Context, r *weftv1.CniGcRequest) (*weftv1.CniGcResponse, error) {
	a.asked = r
	return &weftv1.CniGcResponse{}, a.err
}

// serve puts a on a socket in dir.
func serve(t *testing.T, dir string, a *fakeAgent) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(dir, "weft.sock"))
	must(t, err)
	s := grpc.NewServer()
	weftv1.RegisterCniServer(s, a)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func plugin() (*Plugin, *bytes.Buffer) {
	var out bytes.Buffer
	return &Plugin{Stdout: &out, Timeouts: Timeouts{Add: time.Minute, Check: time.Minute, Del: 200 * time.Millisecond, Status: 200 * time.Millisecond, GC: time.Minute}}, &out
}

// conf is a network configuration with these fields added, or removed if nil.
func conf(dir string, change map[string]any) []byte {
	m := map[string]any{"cniVersion": "1.1.0", "name": "weft", "type": "weft-cni", "socket": filepath.Join(dir, "weft.sock"), "stateDir": filepath.Join(dir, "cni")}
	for k, v := range change {
		m[k] = v
		if v == nil {
			delete(m, k)
		}
	}
	b, _ := json.Marshal(m)
	return b
}

func args(dir string, change map[string]any) *skel.CmdArgs {
	return &skel.CmdArgs{
		ContainerID: "c1", Netns: "/nowhere", IfName: "eth0", StdinData: conf(dir, change),
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_UID=u1;K8S_POD_INFRA_CONTAINER_ID=c1",
	}
}

func wantError(t *testing.T, err error, code uint, texts ...string) {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("error %v, want code %d", err, code)
		return
	}
	for _, s := range texts {
		if !strings.Contains(e.Error(), s) {
			t.Errorf("error %q, want %q", e, s)
		}
	}
}

func TestAdd(t *testing.T) {
	dir := t.TempDir()
	agent := &fakeAgent{}
	serve(t, dir, agent)
	for _, v := range Versions().SupportedVersions() {
		p, out := plugin()
		must(t, p.Add(args(dir, map[string]any{"cniVersion": v, "prevResult": nil})))
		var got struct {
			CNIVersion string
			Interfaces []map[string]any
			IPs        []struct{ Address, Gateway string }
			Routes     []struct{ Dst, GW string }
		}
		must(t, json.Unmarshal(out.Bytes(), &got))
		if got.CNIVersion != v || len(got.Interfaces) != 2 || got.Interfaces[1]["sandbox"] != "/nowhere" || len(got.Routes) != 4 ||
			fmt.Sprint(got.IPs) != "[{10.244.1.2/32 10.244.1.1} {fd00::2/128 fd00::1}]" {
			t.Errorf("version %s: result %s", v, out)
		}
	}
	want := &weftv1.CniAddRequest{ContainerId: "c1", Netns: "/nowhere", Interface: "eth0", PodNamespace: "shop", PodName: "web", PodUid: "u1", Network: "weft"}
	if diff := cmp.Diff(want, agent.asked, protocmp.Transform()); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
}

func TestAddRefused(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		change map[string]any
		args   string
		code   uint
		want   string
	}{
		"unknown field":   {map[string]any{"sockets": "/x"}, "", types.ErrInvalidNetworkConfig, `unknown field "sockets": weft's own fields are socket and stateDir`},
		"wrong type":      {map[string]any{"socket": 7}, "", types.ErrDecodingFailure, "cannot unmarshal number into Go struct field"},
		"relative socket": {map[string]any{"socket": "weft.sock"}, "", types.ErrInvalidNetworkConfig, `socket "weft.sock": want an absolute path`},
		"relative folder": {map[string]any{"stateDir": "cni"}, "", types.ErrInvalidNetworkConfig, `stateDir "cni": want an absolute path`},
		"foreign ipam":    {map[string]any{"ipam": map[string]any{"type": "host-local"}}, "", types.ErrInvalidNetworkConfig, `ipam.type "host-local": weft gives addresses itself`},
		"host port": {
			map[string]any{"runtimeConfig": map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}}}, "",
			types.ErrUnsupportedField, "hostPort 8080 (container port 80/tcp) is not supported",
		},
		"no pod":   {nil, "IgnoreUnknown=1", types.ErrInvalidEnvironmentVariables, "CNI_ARGS must have K8S_POD_NAMESPACE and K8S_POD_NAME"},
		"no agent": {nil, "", types.ErrTryAgainLater, "the agent at " + filepath.Join(dir, "weft.sock") + " does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			p, out := plugin()
			a := args(dir, c.change)
			if c.args != "" {
				a.Args = c.args
			}
			wantError(t, p.Add(a), c.code, c.want)
			if out.Len() != 0 {
				t.Errorf("a result was printed: %s", out)
			}
		})
	}
	p, _ := plugin()
	a := args(dir, nil)
	a.StdinData = []byte("{")
	wantError(t, p.Add(a), types.ErrDecodingFailure, "unexpected end of JSON input")
}

func TestKnownFieldsPass(t *testing.T) {
	_, err := parse(conf("/x", map[string]any{
		"capabilities": map[string]bool{"portMappings": true}, "cni.dev/attachments": []any{}, "dns": map[string]any{},
		"runtimeConfig": map[string]any{"portMappings": []any{map[string]any{"containerPort": 80}}, "ipRanges": []any{}},
	}))
	must(t, err)
	c, err := parse([]byte(`{"name":"weft","cniVersion":"1.0.0","type":"weft-cni"}`))
	must(t, err)
	if c.Socket != "/run/weft/weft.sock" || c.StateDir != "/run/weft/cni" {
		t.Errorf("defaults: %+v", c)
	}
}

func TestErrorCodes(t *testing.T) {
	for code, want := range map[codes.Code]uint{
		codes.Unavailable:        types.ErrTryAgainLater,
		codes.FailedPrecondition: types.ErrTryAgainLater,
		codes.ResourceExhausted:  types.ErrTryAgainLater,
		codes.NotFound:           types.ErrUnknownContainer,
		codes.InvalidArgument:    types.ErrInvalidNetworkConfig,
		codes.AlreadyExists:      types.ErrInvalidNetworkConfig,
		codes.Internal:           types.ErrInternal,
		codes.Unknown:            types.ErrInternal,
	} {
		wantError(t, explain("/s", status.Error(code, "pod shop/web: so it is")), want, "pod shop/web: so it is")
	}
	if err := explain("/s", nil); err != nil {
		t.Errorf("no error became %v", err)
	}
}

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	agent := &fakeAgent{}
	serve(t, dir, agent)
	p, out := plugin()
	must(t, p.Add(args(dir, nil)))
	must(t, p.Check(args(dir, map[string]any{"prevResult": json.RawMessage(out.Bytes())})))
	want := &weftv1.CniCheckRequest{ContainerId: "c1", Interface: "eth0", Netns: "/nowhere", Ips: []string{"10.244.1.2/32", "fd00::2/128"}}
	if diff := cmp.Diff(want, agent.asked, protocmp.Transform()); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	wantError(t, p.Check(args(dir, nil)), types.ErrInvalidNetworkConfig, "prevResult is missing")
	agent.err = status.Error(codes.NotFound, "container c1 has no interface eth0 from weft")
	wantError(t, p.Check(args(dir, map[string]any{"prevResult": json.RawMessage(out.Bytes())})), types.ErrUnknownContainer, "container c1 has no interface")
}

func TestStatus(t *testing.T) {
	dir := t.TempDir()
	p, _ := plugin()
	wantError(t, p.Status(args(dir, nil)), 50, "does not answer")
	agent := &fakeAgent{err: status.Error(codes.Unavailable, "node node1 has no pod CIDR")}
	serve(t, dir, agent)
	wantError(t, p.Status(args(dir, nil)), 50, "node node1 has no pod CIDR")
	agent.err = nil
	must(t, p.Status(args(dir, nil)))
}

func TestGC(t *testing.T) {
	dir := t.TempDir()
	agent := &fakeAgent{}
	serve(t, dir, agent)
	p, _ := plugin()
	must(t, p.GC(args(dir, map[string]any{"cni.dev/valid-attachments": []any{map[string]any{"containerID": "c7", "ifname": "eth0"}}})))
	want := &weftv1.CniGcRequest{Network: "weft", Valid: []*weftv1.CniAttachment{{ContainerId: "c7", Interface: "eth0"}}}
	if diff := cmp.Diff(want, agent.asked, protocmp.Transform()); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
}

// wire makes a pod's link as the agent does.
func wire(t *testing.T) (n *netdev.Net, pod *nstest.NS) {
	t.Helper()
	node, pod := nstest.New(t), nstest.New(t)
	must(t, node.Do(func() (err error) {
		n, err = netdev.Open()
		return err
	}))
	t.Cleanup(func() { n.Close() })
	_, err := n.CreatePodLink(netdev.PodLinkSpec{
		Seed: "c1/eth0", Netns: pod.Path(), Interface: "eth0", MTU: 1450,
		IPs: []netip.Addr{netip.MustParseAddr("10.244.1.2")}, Gateways: []netip.Addr{netip.MustParseAddr("10.244.1.1")},
	})
	must(t, err)
	return n, pod
}

// DEL succeeds with the agent down, and with one that never answers: the
// interface goes, a note stays.
func TestDelWithoutAgent(t *testing.T) {
	for name, hang := range map[string]bool{"down": false, "hanging": true} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if hang {
				l, err := net.Listen("unix", filepath.Join(dir, "weft.sock"))
				must(t, err)
				defer l.Close()
			}
			n, pod := wire(t)
			p, _ := plugin()
			a := args(dir, nil)
			a.Netns = pod.Path()
			for range 2 {
				must(t, p.Del(a))
			}
			if links, err := n.PodLinks(); len(links) != 0 || err != nil {
				t.Errorf("links %v %v", links, err)
			}
			if _, err := os.Stat(filepath.Join(dir, "cni", "del", "c1-eth0")); err != nil {
				t.Errorf("no note: %v", err)
			}
			list, err := tombstone.List(filepath.Join(dir, "cni"))
			must(t, err)
			want := []tombstone.Tombstone{{ContainerID: "c1", Interface: "eth0", Network: "weft", Netns: pod.Path()}}
			if diff := cmp.Diff(want, list); diff != "" {
				t.Errorf("notes (-want +got):\n%s", diff)
			}
			for _, netns := range []string{"", "/nowhere"} {
				a.Netns = netns
				must(t, p.Del(a))
			}
		})
	}
}

func TestDel(t *testing.T) {
	dir := t.TempDir()
	p, _ := plugin()
	must(t, p.Del(args(dir, nil))) // leaves a note
	agent := &fakeAgent{}
	serve(t, dir, agent)
	must(t, p.Del(args(dir, nil)))
	if list, err := tombstone.List(filepath.Join(dir, "cni")); len(list) != 0 || err != nil {
		t.Errorf("the note is not taken away: %v %v", list, err)
	}
	agent.err = status.Error(codes.Internal, "detach datapath: busy")
	wantError(t, p.Del(args(dir, nil)), types.ErrInternal, "detach datapath: busy")
	if list, _ := tombstone.List(filepath.Join(dir, "cni")); len(list) != 0 {
		t.Errorf("a note although the agent answered: %v", list)
	}

	dir = t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "cni"), nil, 0o600)) // in the way of the folder
	wantError(t, p.Del(args(dir, nil)), types.ErrIOFailure, "no note could be left")
}

// The whole way of a runtime: libcni runs the plugin as a process.
func TestThroughLibcni(t *testing.T) {
	nstest.Need(t)
	dir := t.TempDir()
	agent := &fakeAgent{}
	serve(t, dir, agent)
	self, err := os.Executable()
	must(t, err)
	must(t, os.Symlink(self, filepath.Join(dir, "weft-cni")))
	t.Setenv(asPlugin, "1")
	list, err := libcni.ConfListFromBytes([]byte(fmt.Sprintf(`{"cniVersion":"1.1.0","name":"weft","plugins":[%s]}`, conf(dir, map[string]any{"name": nil, "cniVersion": nil}))))
	must(t, err)
	c := libcni.NewCNIConfigWithCacheDir([]string{dir}, filepath.Join(dir, "cache"), nil)
	rt := &libcni.RuntimeConf{ContainerID: "c1", NetNS: nstest.New(t).Path(), IfName: "eth0", Args: [][2]string{{"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "web"}}}
	ctx := t.Context()
	_, err = c.ValidateNetworkList(ctx, list)
	must(t, err)
	must(t, c.GetStatusNetworkList(ctx, list))
	res, err := c.AddNetworkList(ctx, list, rt)
	must(t, err)
	r, err := current.GetResult(res)
	must(t, err)
	if len(r.IPs) != 2 || r.Interfaces[1].Sandbox != rt.NetNS || r.Interfaces[1].Mtu != 1450 {
		t.Errorf("result %+v", r)
	}
	must(t, c.CheckNetworkList(ctx, list, rt))
	must(t, c.DelNetworkList(ctx, list, rt))
	must(t, c.GCNetworkList(ctx, list, &libcni.GCArgs{}))
	agent.err = status.Error(codes.ResourceExhausted, "pod shop/web: pod CIDR is full")
	_, err = c.AddNetworkList(ctx, list, rt)
	wantError(t, err, types.ErrTryAgainLater, "pod shop/web: pod CIDR is full")
}

func TestVersions(t *testing.T) {
	if v := Versions().SupportedVersions(); fmt.Sprint(v) != "[0.3.1 0.4.0 1.0.0 1.1.0]" {
		t.Errorf("versions %v", v)
	}
}
