// SPDX-License-Identifier: Apache-2.0

// Package oracle compares the backends that real connections reach, through
// tables, driver, maps and programs at sockets, with what a dumb reading of the
// Kubernetes API says that they may reach.
package oracle

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/weft-mesh/weft/internal/datapath/lb"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/packettest/cgroup"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/services"
	"github.com/weft-mesh/weft/internal/state"
)

var (
	seed  = flag.Uint64("seed", 1, "of the random states")
	steps = flag.Int("steps", 2000, "random states")
)

const (
	thisNode = "node1"
	backends = 5   // addresses in each family
	maxTries = 600 // connections until every wanted backend has answered
)

var nodeAddrs = []netip.Addr{netip.MustParseAddr("172.30.0.1"), netip.MustParseAddr("fd00:172:30::1")}

// noCutter has no sockets to cut: each of this test lives for one answer.
type noCutter struct{}

func (noCutter) CutUDP([]string, []netdev.UDPSocket) (int, error) { return 0, nil }

// rig is a node with the programs at the sockets of this process.
type rig struct {
	*testing.T
	random *rand.Rand
	ns     *nstest.NS
	maps   *pin.Maps
	tables *state.Tables
	driver *services.Driver
	stop   func()
	world  map[string]*object // Services by name

	states, connections, restarts int
}

// object is a Service with its slices.
type object struct {
	row    *state.Service
	slices map[string]*state.Endpoint
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{T: t, random: rand.New(rand.NewPCG(*seed, 0)), ns: nstest.New(t), world: map[string]*object{}}
	r.network()
	group := cgroup.Enter(t)
	var err error
	r.maps, err = pin.Open(filepath.Join(bpffs.New(t), "weft"), pin.Sizes{Conntrack: 1024, NAT: 1024, Events: 256 << 10})
	r.must(err)
	t.Cleanup(func() { r.maps.Close() })
	r.must(r.ns.Do(func() error {
		p, err := lb.Load(r.maps, setting.Node{IPv4: nodeAddrs[0], IPv6: nodeAddrs[1]})
		if err != nil {
			return err
		}
		defer p.Close()
		return p.Attach(group)
	}))
	r.tables, err = state.New()
	r.must(err)
	txn := r.tables.DB.WriteTxn(r.tables.Nodes)
	_, _, err = r.tables.Nodes.Insert(txn, &state.Node{Name: thisNode, IPs: nodeAddrs})
	r.must(err)
	txn.Commit()
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// start makes a driver that adopts what is in the maps.
func (r *rig) start() {
	r.Helper()
	w, err := service.New(r.maps, service.Options{Maglev: true})
	r.must(err)
	r.driver, err = services.New(services.Config{
		Node: thisNode, Tables: r.tables, Writer: w, Reader: service.NewReader(r.maps, w),
		Connections: service.NewConnections(r.maps, setting.Lifetimes{UDP: time.Minute}), Cutter: noCutter{},
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	r.must(err)
	r.must(r.driver.Apply())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	driver := r.driver
	go func() { ended <- driver.Run(ctx) }()
	r.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			r.Error(err)
		}
	}
}

func backendAddr(family, n int) netip.Addr {
	return netip.MustParseAddr([]string{fmt.Sprintf("10.244.1.%d", n+1), fmt.Sprintf("fd00:10:244:1::%x", n+1)}[family])
}

// network has all backends in one namespace; each says which one it is.
func (r *rig) network() {
	r.Helper()
	r.must(r.ns.Do(func() error {
		commands := [][]string{{"link", "set", "lo", "up"}}
		for n := range backends {
			commands = append(commands, []string{"addr", "add", backendAddr(0, n).String() + "/32", "dev", "lo"},
				[]string{"addr", "add", backendAddr(1, n).String() + "/128", "dev", "lo", "nodad"})
		}
		for _, c := range commands {
			if out, err := exec.Command("ip", c...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %v: %w: %s", c, err, out)
			}
		}
		return nil
	}))
	for n := range backends {
		for family := range 2 {
			for _, port := range []uint16{8080, 9090} {
				r.serve(netip.AddrPortFrom(backendAddr(family, n), port))
			}
		}
	}
}

func (r *rig) serve(at netip.AddrPort) {
	r.Helper()
	var l net.Listener
	var u net.PacketConn
	r.must(r.ns.Do(func() (err error) {
		if l, err = net.Listen("tcp", at.String()); err != nil {
			return err
		}
		u, err = net.ListenPacket("udp", at.String())
		return err
	}))
	r.Cleanup(func() { l.Close(); u.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte(at.String())) // or the client has gone
			c.Close()
		}
	}()
	go func() {
		buf := make([]byte, 16)
		for {
			_, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = u.WriteTo([]byte(at.String()), from) // or the client has gone
		}
	}()
}

// ask connects once and returns who answers.
func (r *rig) ask(to netip.AddrPort, protocol corev1.Protocol) (who netip.AddrPort, err error) {
	r.connections++
	kind := unix.SOCK_STREAM
	if protocol == corev1.ProtocolUDP {
		kind = unix.SOCK_DGRAM
	}
	var fd int
	family, sa := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Addr: [4]byte(to.Addr().AsSlice()[:4]), Port: int(to.Port())})
	if to.Addr().Is6() {
		family, sa = unix.AF_INET6, &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
	}
	if err := r.ns.Do(func() (err error) {
		fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
		return err
	}); err != nil {
		return who, err
	}
	defer unix.Close(fd)
	wait := unix.NsecToTimeval((5 * time.Second).Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return who, err
	}
	if err := unix.Connect(fd, sa); err != nil {
		return who, err
	}
	if kind == unix.SOCK_DGRAM {
		if _, err := unix.Write(fd, []byte("?")); err != nil {
			return who, err
		}
	}
	buf := make([]byte, 64)
	n, err := unix.Read(fd, buf)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Read(fd, buf)
	}
	if err != nil {
		return who, err
	}
	return netip.ParseAddrPort(string(buf[:n]))
}

// check compares all frontends of a Service.
func (r *rig) check(o *object) {
	r.Helper()
	for _, f := range frontends(o.row) {
		want := f.wanted(o)
		r.compare(o, f, want)
	}
}

func (r *rig) compare(o *object, f frontend, want map[netip.AddrPort]bool) {
	r.Helper()
	got := map[netip.AddrPort]bool{}
	sticky := o.row.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && len(want) > 0
	least := 3*len(want) + 2
	for i := 0; i < maxTries && (i < least || !sticky && len(got) < len(want)); i++ {
		who, err := r.ask(f.at, f.port.Protocol)
		if len(want) == 0 {
			if !errors.Is(err, unix.ECONNREFUSED) {
				r.complain(o, f, "got %v, %v, want that it is refused", who, err)
			}
			return
		}
		if err != nil {
			r.complain(o, f, "%v, want one of %v", err, keys(want))
			return
		}
		if got[who] = true; !want[who] {
			r.complain(o, f, "reached %s, want one of %v", who, keys(want))
			return
		}
	}
	if sticky && len(got) != 1 || !sticky && len(got) != len(want) {
		r.complain(o, f, "reached %v, want %v (affinity %v)", keys(got), keys(want), sticky)
	}
}

func keys(m map[netip.AddrPort]bool) []netip.AddrPort {
	return slices.SortedFunc(maps.Keys(m), netip.AddrPort.Compare)
}

func (r *rig) complain(o *object, f frontend, format string, args ...any) {
	r.Helper()
	text := fmt.Sprintf("seed %d, state %d, %s/%s: ", *seed, r.states, f.at, f.port.Protocol) + fmt.Sprintf(format, args...) + "\n"
	rows := []any{map[string]any{"kind": "Service", "metadata": map[string]string{"name": o.row.Name}, "spec": o.row.Spec, "status": o.row.Status}}
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		rows = append(rows, o.slices[name].Slice)
	}
	for _, row := range rows {
		b, err := yaml.Marshal(row)
		r.must(err)
		text += "---\n" + string(b)
	}
	dump, err := r.driver.Dump()
	r.must(err)
	r.Fatal(text + "---\n" + dump)
}

// TestOracle walks through random states; each is reached from the one before.
func TestOracle(t *testing.T) {
	r := newRig(t)
	for range *steps {
		name := fmt.Sprintf("s%d", r.random.IntN(6))
		r.mutate(name)
		if r.random.IntN(40) == 0 {
			r.stop()
			r.start()
			r.restarts++
		} else {
			r.must(r.driver.Apply())
		}
		r.states++
		for _, n := range []string{name, fmt.Sprintf("s%d", r.random.IntN(6))} {
			if o := r.world[n]; o != nil {
				r.check(o)
			}
		}
	}
	t.Logf("%d states, %d connections, %d restarts, no mismatch", r.states, r.connections, r.restarts)
	r.empty()
}

// empty takes all Services away: nothing of them stays in the kernel.
func (r *rig) empty() {
	r.Helper()
	for name := range r.world {
		r.write(r.world[name], nil)
	}
	r.must(r.driver.Apply())
	end := time.Now().Add(10 * time.Second)
	for {
		left := map[string]uint64{}
		fills, err := r.maps.Fills()
		r.must(err)
		for _, f := range fills {
			if slices.Contains([]string{"services", "slots", "backends", "members", "source_ranges"}, f.Name) && f.Entries > 0 {
				left[f.Name] = f.Entries
			}
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			r.Fatalf("left in the kernel: %v", left)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
