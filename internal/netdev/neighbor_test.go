// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// neighbors makes two namespaces on one link: 192.0.2.1 and .2, with .254 as
// the router of the first.
func neighbors(t *testing.T) (n *Net, device int, other *nstest.NS) {
	t.Helper()
	a, b := nstest.New(t), nstest.New(t)
	ip := func(ns *nstest.NS, script string) {
		t.Helper()
		err := ns.Do(func() error {
			cmd := exec.Command("ip", "-batch", "-")
			cmd.Stdin = strings.NewReader(script)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("ip: %v: %s", err, out)
			}
			return err
		})
		if err != nil {
			t.FailNow()
		}
	}
	ip(a, "link add eth0 type veth peer name eth0 netns "+b.Path()+"\n"+
		"addr add 192.0.2.1/24 dev eth0\naddr add 2001:db8::1/64 dev eth0 nodad\nlink set eth0 up\n")
	ip(b, "addr add 192.0.2.2/24 dev eth0\naddr add 192.0.2.254/24 dev eth0\naddr add 2001:db8::2/64 dev eth0 nodad\nlink set eth0 address 02:00:00:00:00:02 up\n")
	ip(a, "route add default via 192.0.2.254\n")
	if err := a.Do(func() (err error) { n, err = Open(); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	l, err := n.h.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	return n, l.Attrs().Index, b
}

func TestKeepNeighbor(t *testing.T) {
	n, device, _ := neighbors(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	changed, err := n.WatchNeighbors(ctx, device)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"192.0.2.2", "2001:db8::2"} {
		a := netip.MustParseAddr(s)
		if err := n.KeepNeighbor(device, a); err != nil {
			t.Fatal(err)
		}
		for {
			e, ok := find(t, n, device, a)
			if ok && e.Kept && e.MAC.String() == "02:00:00:00:00:02" {
				break
			}
			select {
			case <-changed:
			case <-ctx.Done():
				t.Fatalf("neighbour %s is %+v", s, e)
			}
		}
		for range 2 {
			if err := n.ForgetNeighbor(device, a); err != nil {
				t.Fatal(err)
			}
		}
		if e, ok := find(t, n, device, a); ok && e.MAC != nil {
			t.Errorf("forgotten, but there: %+v", e)
		}
	}
}

func find(t *testing.T, n *Net, device int, a netip.Addr) (Neighbor, bool) {
	t.Helper()
	list, err := n.Neighbors(device)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if e.Addr == a {
			return e, true
		}
	}
	return Neighbor{}, false
}

func TestNextHop(t *testing.T) {
	n, device, _ := neighbors(t)
	for to, want := range map[string]string{
		"192.0.2.2": "192.0.2.2", "2001:db8::2": "2001:db8::2", // on the link
		"198.51.100.7": "192.0.2.254",           // behind the router
		"192.0.2.1":    "", "2001:db8:1::7": "", // here; nowhere
	} {
		got, err := n.NextHop(device, netip.MustParseAddr(to))
		if err != nil {
			t.Errorf("%s: %v", to, err)
		}
		if want == "" && got.IsValid() || want != "" && got.String() != want {
			t.Errorf("%s: by %s, want %q", to, got, want)
		}
	}
}
