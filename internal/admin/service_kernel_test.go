// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/services"
	"github.com/weft-mesh/weft/internal/state"
)

// noCutter is for a node without sockets.
type noCutter struct{}

func (noCutter) CutUDP([]string, []netdev.UDPSocket) (int, error) { return 0, nil }

// TestServicesInTheKernel asks about what a driver has put into the kernel.
func TestServicesInTheKernel(t *testing.T) {
	m, err := pin.Open(bpffs.New(t)+"/node", pin.Sizes{Conntrack: 64, NAT: 64})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	p, _ := serviceWorld(t)
	txn := p.Tables.DB.WriteTxn(p.Tables.Services)
	row, _, _ := p.Tables.Services.Get(txn, state.ServiceByName.Query("shop/web"))
	web := *row
	web.Spec = row.Spec.DeepCopy()
	web.Spec.ExternalTrafficPolicy, web.Spec.SessionAffinity = corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceAffinityNone
	p.Tables.Services.Insert(txn, &web)
	txn.Commit()
	w, err := service.New(m, service.Options{Maglev: true})
	if err != nil {
		t.Fatal(err)
	}
	d, err := services.New(services.Config{
		Node: "node1", Tables: p.Tables, Writer: w, Reader: service.NewReader(m, w), Connections: service.NewConnections(m, setting.Lifetimes{}),
		Cutter: noCutter{}, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Apply(); err != nil {
		t.Fatal(err)
	}
	p.Services = func() (Services, error) { return d, nil }
	c := client(t, start(t, sock(t), p).path)
	r, err := c.ShowService(t.Context(), &weftv1.ShowServiceRequest{Service: "shop/web"})
	if err != nil {
		t.Fatal(err)
	}
	port := r.Ports[0]
	if port.Id == 0 || len(port.Backends) != 3 || port.Backends[0].Id == 0 || port.Backends[1].Id == 0 || port.Backends[2].Id != 0 {
		t.Errorf("got %v", port)
	}
	for _, s := range port.Sets {
		if s.Backends != 2 || len(s.Ids) != 1 || (s.Maglev > 0) != (s.Name == "external") {
			t.Errorf("set %v", s)
		}
	}
	seen := map[string]int{}
	for n := range uint16(100) {
		from := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.1"), 40000+n)
		x, err := c.TraceService(t.Context(), &weftv1.TraceServiceRequest{From: from.String(), Address: "172.30.0.1", Port: 30080, Protocol: "TCP"})
		if err != nil || x.Choice != "maglev" || len(x.Backends) != 1 {
			t.Fatalf("%s: %v, %v", from, x, err)
		}
		seen[x.Backends[0].Pod]++
	}
	if len(seen) != 2 || seen["shop/web-0"] < 20 || seen["shop/web-1"] < 20 {
		t.Errorf("backends of 100 clients: %v", seen)
	}
	dump, err := c.DumpServices(t.Context(), &weftv1.DumpServicesRequest{})
	if err != nil || strings.Count(dump.GetText(), "shop/web") < 3 {
		t.Errorf("dump %v, %v", dump, err)
	}
	st := DescribeServices(d, p.Edge(), 0)
	if st.Services != 2 || st.Frontends != 4 || st.MaglevTables != 1 || st.MaglevBytes == 0 || st.Changed == nil || len(st.Problems) != 1 {
		t.Errorf("status %v", st)
	}
}
