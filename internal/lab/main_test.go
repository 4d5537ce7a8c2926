// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"sigs.k8s.io/yaml"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/cli"
)

// The test binary is copied to a folder as weft and weft-cni; there it is the
// real command line with an agent and a plugin that do just enough: pods have
// addresses and their node can reach them.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "weft":
		os.Exit(weftMain())
	case "weft-cni":
		if err := fakePlugin(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func weftMain() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(os.Args) == 4 && os.Args[1] == "agent" {
		if err := fakeAgent(ctx, os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	return cli.Run(ctx, os.Args[1:], cli.IO{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
}

// fakeAgent answers Status and WaitApplied from the cluster folder.
type fakeNode struct {
	weftv1.UnimplementedNodeServer
	name, folder string
}

func fakeAgent(ctx context.Context, config string) error {
	b, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	var c struct {
		Node, RunDir, PinPath, CgroupRoot string
		Source                            struct{ Folder string }
		Datapath                          struct{ Uplink, Tunnel string }
	}
	if err := yaml.UnmarshalStrict(b, &c); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "fake agent of", c.Node)
	socket := filepath.Join(c.RunDir, "weft.sock")
	os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	srv := grpc.NewServer()
	weftv1.RegisterNodeServer(srv, &fakeNode{name: c.Node, folder: c.Source.Folder})
	context.AfterFunc(ctx, srv.Stop)
	return srv.Serve(l)
}

func (n *fakeNode) Status(context.Context, *weftv1.StatusRequest) (*weftv1.StatusResponse, error) {
	return &weftv1.StatusResponse{Node: n.name, Ready: true}, nil
}

func (n *fakeNode) WaitApplied(ctx context.Context, r *weftv1.WaitAppliedRequest) (*weftv1.WaitAppliedResponse, error) {
	for ctx.Err() == nil {
		b, err := os.ReadFile(filepath.Join(n.folder, "generation"))
		if err != nil {
			return nil, err
		}
		g, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return nil, err
		}
		if g >= r.Generation {
			return &weftv1.WaitAppliedResponse{Generation: g}, nil
		}
		time.Sleep(time.Millisecond)
	}
	return nil, ctx.Err()
}

// fakePlugin wires a pod with a veth pair and on-link routes.
func fakePlugin() error {
	var conf struct {
		CNIVersion string          `json:"cniVersion"`
		Socket     string          `json:"socket"`
		StateDir   string          `json:"stateDir"`
		PrevResult json.RawMessage `json:"prevResult"`
	}
	b, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, &conf); err != nil {
		return err
	}
	if err := os.MkdirAll(conf.StateDir, 0o755); err != nil {
		return err
	}
	id := os.Getenv("CNI_CONTAINERID")
	host := "wf" + id[:10]
	switch os.Getenv("CNI_COMMAND") {
	case "VERSION":
		fmt.Println(`{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}`)
		return nil
	case "DEL":
		exec.Command("ip", "link", "del", host).Run()
		return nil
	case "ADD":
		return fakeAdd(conf.StateDir, host)
	}
	return nil
}

func fakeAdd(dir, host string) error {
	n := 0
	for {
		n++
		f, err := os.OpenFile(filepath.Join(dir, "ip"+strconv.Itoa(n)), os.O_CREATE|os.O_EXCL, 0o644)
		if err == nil {
			f.Close()
			break
		}
	}
	out, err := exec.Command("ip", "-o", "-4", "addr", "show", "dev", "eth0").Output()
	if err != nil {
		return fmt.Errorf("the plugin does not run in the node's network namespace: %w", err)
	}
	_, after, _ := strings.Cut(string(out), "172.30.0.")
	node, _, _ := strings.Cut(after, "/")
	v4, v6 := fmt.Sprintf("10.244.%s.%d", node, n+1), fmt.Sprintf("fd00:10:244:%s::%x", node, n+1)
	ns := filepath.Base(os.Getenv("CNI_NETNS"))
	script := fmt.Sprintf(`set -e
ip link add %[1]s type veth peer name eth0 netns %[2]s
ip link set %[1]s up
ip -n %[2]s link set eth0 up
ip -n %[2]s addr add %[3]s/32 dev eth0
ip -n %[2]s addr add %[4]s/128 dev eth0 nodad
ip -n %[2]s route add default dev eth0
ip -n %[2]s -6 route add default dev eth0
ip route add %[3]s/32 dev %[1]s
ip route add %[4]s/128 dev %[1]s
sysctl -qw net.ipv4.conf.%[1]s.proxy_arp=1 net.ipv4.ip_forward=1
`, host, ns, v4, v6)
	if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":%q}],"ips":[{"address":"%s/32","interface":0},{"address":"%s/128","interface":0}]}`, os.Getenv("CNI_NETNS"), v4, v6)
	_, err = os.Stdout.Write(b.Bytes())
	return err
}
