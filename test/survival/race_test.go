// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/netdev"
)

const (
	racers     = 200 // pods
	together   = 16  // that start at the same time
	firstTries = 5   // requests of the friend, from the moment that ADD returns
	// oneTry is less than TCP waits before it sends a SYN again.
	oneTry = 900 * time.Millisecond
	// stay is how long a pod is looked at after its requests.
	stay = 200 * time.Millisecond
)

// TestStartupRace starts pods while a policy allows nobody but a friend, and
// others hammer at every address that the pods may get: from a pod of the node
// and from outside. Meanwhile the policy of the pods changes all the time. No packet
// of the others reaches a pod, and no request of the friend fails, from the very
// first on.
func TestStartupRace(t *testing.T) {
	n := newLonely(t)
	r := &race{lonely: n}
	r.write(t, "race.yaml", raceManifests())
	r.write(t, "policy.yaml", racePolicy(81))
	friend, enemy := r.start(t, "friend"), r.start(t, "enemy")
	r.enemies = []netip.Addr{enemy.ip, netip.MustParseAddr("172.30.0.254")}
	r.route(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var hammers errgroup.Group
	hammers.Go(func() error { return r.hammer(ctx, enemy.netns) })
	hammers.Go(func() error { return r.hammer(ctx, netdev.NetNSPath(n.layout.UnderlayNetNS())) })
	changing, settle := context.WithCancel(ctx)
	var changer errgroup.Group
	changer.Go(func() error { return r.change(changing) })

	pods := make([]*racer, racers)
	var g errgroup.Group
	g.SetLimit(together)
	began := time.Now()
	for i := range racers {
		g.Go(func() (err error) {
			pods[i], err = r.run(ctx, i, friend)
			return err
		})
	}
	err := g.Wait()
	settle()
	if e := errors.Join(err, changer.Wait()); e != nil {
		t.Fatal(e)
	}
	t.Logf("%d pods in %v, %d changes of policy, %d packets of others sent, %d requests of the friend answered",
		racers, time.Since(began).Round(time.Millisecond), r.changes.Load(), r.sent.Load(), r.answered.Load())
	forbidden := 0
	for _, p := range pods {
		c, err := p.count(r.enemies)
		if err != nil {
			t.Fatal(err)
		}
		if forbidden += c; c > 0 {
			t.Errorf("pod %s got %d forbidden packets", p.name, c)
		}
	}
	t.Logf("%d forbidden packets were delivered", forbidden)

	// Without a policy they do come, to every pod: the count means something.
	if err := os.Remove(filepath.Join(n.layout.ClusterDir(), "policy.yaml")); err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		await(t, waitTime, func() error {
			c, err := p.heard(r.enemies)
			if err == nil && c == 0 {
				err = fmt.Errorf("no packet comes to pod %s, where all are allowed", p.name)
			}
			return err
		})
	}
	stop()
	if err := hammers.Wait(); err != nil {
		t.Error(err)
	}
	for _, p := range append(pods, friend, enemy) {
		if err := p.close(); err != nil {
			t.Error(err)
		}
	}
}

// race is the node of a test, and what happens there.
type race struct {
	*lonely
	enemies                 []netip.Addr
	sent, answered, changes atomic.Int64
}

// write puts a manifest in place at once.
func (r *race) write(t testing.TB, name, text string) {
	t.Helper()
	if err := r.place(name, text); err != nil {
		t.Fatal(err)
	}
}

func (r *race) place(name, text string) error {
	aside := filepath.Join(r.layout.NodeDir(lonelyName), name)
	if err := os.WriteFile(aside, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(aside, filepath.Join(r.layout.ClusterDir(), name))
}

func raceManifests() string {
	var b strings.Builder
	b.WriteString(pod("friend", lonelyName, "sleep"))
	b.WriteString(pod("enemy", lonelyName, "sleep"))
	for i := range racers {
		b.WriteString(strings.Replace(pod(fmt.Sprintf("r%d", i), lonelyName, "sleep"), fmt.Sprintf("app: r%d", i), "app: racer", 1))
	}
	return b.String()
}

// racePolicy allows the friend, on the port of the test and another.
func racePolicy(other int) string {
	return fmt.Sprintf(`apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: racers, namespace: default}
spec:
  podSelector: {matchLabels: {app: racer}}
  policyTypes: [Ingress]
  ingress:
    - from: [{podSelector: {matchLabels: {app: friend}}}]
      ports: [{port: 80}, {port: %d}]
`, other)
}

// change rewrites the policy all the time.
func (r *race) change(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := r.place("policy.yaml", racePolicy(82+i%5)); err != nil {
			return err
		}
		r.changes.Add(1)
	}
}

// route tells the outside where pods are.
func (r *race) route(t testing.TB) {
	t.Helper()
	out, err := exec.Command("ip", "-netns", r.layout.UnderlayNetNS(), "route", "add", "10.244.0.0/16", "via", "172.30.0.1").CombinedOutput()
	if err != nil {
		t.Fatalf("ip: %v: %s", err, out)
	}
}

// racer is a pod with a server and an ear on everything that comes.
type racer struct {
	name, netns string
	container   container
	ip          netip.Addr
	ear         int // packet socket
	listener    net.Listener
}

// prepare makes a pod's network without anything but the server and the ear.
func (r *race) prepare(name string) (_ *racer, err error) {
	netns := r.layout.NetNSPrefix() + name
	if err := netdev.CreateNetNS(netns); err != nil {
		return nil, err
	}
	p := &racer{name: name, netns: netdev.NetNSPath(netns)}
	p.container = container{id: fmt.Sprintf("%x%060x", len(name), []byte(name)), netns: p.netns, pod: name}
	err = netdev.InNetNS(p.netns, func() (err error) {
		all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_IP))
		if p.ear, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(all)); err != nil {
			return err
		}
		p.listener, err = net.Listen("tcp4", ":80")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", name, err)
	}
	go func() {
		for {
			c, err := p.listener.Accept()
			if err != nil {
				return // closed
			}
			c.Close()
		}
	}()
	return p, nil
}

// add wires a pod as a runtime does.
func (r *race) add(ctx context.Context, p *racer) error {
	ips, err := r.cni.add(ctx, p.container)
	if err != nil {
		return fmt.Errorf("pod %s: %w", p.name, err)
	}
	for _, a := range ips {
		if a.Is4() {
			p.ip = a
		}
	}
	return nil
}

// start is a pod that takes part by itself.
func (r *race) start(t testing.TB, name string) *racer {
	t.Helper()
	p, err := r.prepare(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.add(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

// run starts a pod and has the friend ask it at once.
func (r *race) run(ctx context.Context, i int, friend *racer) (*racer, error) {
	p, err := r.prepare(fmt.Sprintf("r%d", i))
	if err != nil {
		return nil, err
	}
	if err := r.add(ctx, p); err != nil {
		return nil, err
	}
	for try := range firstTries {
		err := netdev.InNetNS(friend.netns, func() error {
			c, err := net.DialTimeout("tcp4", netip.AddrPortFrom(p.ip, 80).String(), oneTry)
			if err != nil {
				return err
			}
			return c.Close()
		})
		if err != nil {
			return nil, fmt.Errorf("request %d to pod %s: %w", try+1, p.name, err)
		}
		r.answered.Add(1)
	}
	select {
	case <-time.After(stay): // the time that the others have
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return p, nil
}

// count reads what has come since the last call, and counts the packets from
// these addresses.
func (p *racer) count(from []netip.Addr) (int, error) {
	stats, err := unix.GetsockoptTpacketStats(p.ear, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return 0, err
	}
	if stats.Drops > 0 {
		return 0, fmt.Errorf("pod %s: %d packets found no room", p.name, stats.Drops)
	}
	return p.heard(from)
}

// heard is count for an ear that may have missed something.
func (p *racer) heard(from []netip.Addr) (n int, err error) {
	buf := make([]byte, 128)
	for {
		size, _, err := unix.Recvfrom(p.ear, buf, 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return n, nil
		case err != nil:
			return n, fmt.Errorf("pod %s: %w", p.name, err)
		case size < 20:
			continue
		}
		src := netip.AddrFrom4([4]byte(buf[12:16]))
		for _, a := range from {
			if src == a {
				n++
			}
		}
	}
}

func (p *racer) close() error {
	return errors.Join(p.listener.Close(), unix.Close(p.ear), netdev.DeleteNetNS(filepath.Base(p.netns)))
}

// hammer sends packets from a namespace to every address that a pod may get, on
// the allowed port and others, by TCP and UDP, without a pause.
func (r *race) hammer(ctx context.Context, netns string) error {
	var tcp, udp int
	err := netdev.InNetNS(netns, func() (err error) {
		if tcp, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP); err != nil {
			return err
		}
		udp, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return fmt.Errorf("hammer: %w", err)
	}
	defer unix.Close(tcp)
	defer unix.Close(udp)
	// 20 bytes of a SYN; that its checksum is wrong does not matter here
	syn := []byte{0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 5 << 4, 2, 0xff, 0xff, 0, 0, 0, 0}
	for round := uint16(0); ctx.Err() == nil; round++ {
		binary.BigEndian.PutUint16(syn, 40000+round%20000)
		a := netip.MustParseAddr("10.244.0.2")
		for range racers + 60 {
			if unix.Sendto(tcp, syn, 0, &unix.SockaddrInet4{Addr: a.As4()}) == nil {
				r.sent.Add(1)
			}
			if unix.Sendto(udp, []byte("forbidden"), 0, &unix.SockaddrInet4{Addr: a.As4(), Port: 80}) == nil {
				r.sent.Add(1)
			}
			a = a.Next()
		}
	}
	return nil
}
