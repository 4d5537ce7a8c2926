// SPDX-License-Identifier: Apache-2.0

package names

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

const cluster = `
apiVersion: v1
kind: Namespace
metadata: {name: demo}
---
apiVersion: v1
kind: Namespace
metadata: {name: empty}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: demo}
spec: {clusterIPs: [10.96.0.20, 'fd00:10:96::20'], ports: [{name: http, port: 80, targetPort: 8080}, {name: dns, port: 53, protocol: UDP}]}
---
apiVersion: v1
kind: Service
metadata: {name: plain, namespace: demo}
spec: {clusterIP: 10.96.0.21, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: demo}
spec: {clusterIP: None, ports: [{name: sql, port: 1}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-ipv4, namespace: demo, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
ports: [{name: sql, port: 5432}]
endpoints:
  - {addresses: [10.244.1.5], hostname: db-0}
  - {addresses: [10.244.2.6], conditions: {ready: true}}
  - {addresses: [10.244.2.7], conditions: {ready: false}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-ipv6, namespace: demo, labels: {kubernetes.io/service-name: db}}
addressType: IPv6
ports: [{name: sql, port: 5432}]
endpoints:
  - {addresses: ['fd00:10:244:1::5'], hostname: db-0}
---
apiVersion: v1
kind: Service
metadata: {name: none, namespace: demo}
spec: {clusterIP: None}
---
apiVersion: v1
kind: Service
metadata: {name: out, namespace: demo}
spec: {type: ExternalName, externalName: www.example.com}
---
apiVersion: v1
kind: Service
metadata: {name: alias, namespace: demo}
spec: {type: ExternalName, externalName: web.demo.svc.cluster.local}
---
apiVersion: v1
kind: Service
metadata: {name: circle, namespace: demo}
spec: {type: ExternalName, externalName: circle.demo.svc.cluster.local}
---
apiVersion: v1
kind: Pod
metadata: {name: p, namespace: demo}
spec: {containers: [{name: a}]}
status: {podIPs: [{ip: 10.244.1.9}, {ip: 'fd00:10:244:1::9'}]}
`

// start runs a server for a folder with these manifests.
func start(t *testing.T, manifests string) (address, folder string) {
	t.Helper()
	folder = t.TempDir()
	write(t, folder, "cluster.yaml", manifests)
	s, err := New(Config{Folder: folder, Domain: "cluster.local"}, slog.New(slog.DiscardHandler), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	out, in := io.Pipe()
	s.out = in
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	line := make([]byte, 200)
	if _, err := out.Read(line); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, out)
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port())), folder
}

func write(t *testing.T, folder, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func ask(t *testing.T, network, address, name, kind string, change func(*dns.Msg)) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), dns.StringToType[kind])
	if change != nil {
		change(m)
	}
	c := &dns.Client{Net: network, Timeout: 5 * time.Second, UDPSize: dns.MaxMsgSize}
	answer, _, err := c.Exchange(m, address)
	if err != nil {
		t.Fatalf("%s %s by %s: %v", name, kind, network, err)
	}
	return answer
}

// lines are the records without TTL and class, sorted; first the code.
func lines(m *dns.Msg) []string {
	var out []string
	for _, rr := range m.Answer {
		f := strings.Fields(rr.String())
		out = append(out, strings.Join(append(f[:1:1], f[3:]...), " "))
	}
	slices.Sort(out)
	return append([]string{dns.RcodeToString[m.Rcode]}, out...)
}

func TestAnswers(t *testing.T) {
	address, _ := start(t, cluster)
	const web, db = "web.demo.svc.cluster.local.", "db.demo.svc.cluster.local."
	for _, c := range []struct {
		name, kind string
		want       []string
	}{
		{web, "A", []string{"NOERROR", web + " A 10.96.0.20"}},
		{web, "AAAA", []string{"NOERROR", web + " AAAA fd00:10:96::20"}},
		{"WeB.Demo.svc.CLUSTER.local.", "A", []string{"NOERROR", "WeB.Demo.svc.CLUSTER.local. A 10.96.0.20"}},
		{"plain.demo.svc.cluster.local.", "AAAA", []string{"NOERROR"}},
		{"_http._tcp." + web, "SRV", []string{"NOERROR", "_http._tcp." + web + " SRV 0 100 80 " + web}},
		{"_dns._udp." + web, "SRV", []string{"NOERROR", "_dns._udp." + web + " SRV 0 100 53 " + web}},
		{"_dns._tcp." + web, "SRV", []string{"NXDOMAIN"}},
		{"_tcp." + web, "SRV", []string{"NOERROR"}},
		{"_http._tcp." + web, "A", []string{"NOERROR"}},
		{db, "A", []string{"NOERROR", db + " A 10.244.1.5", db + " A 10.244.2.6"}},
		{db, "AAAA", []string{"NOERROR", db + " AAAA fd00:10:244:1::5"}},
		{"db-0." + db, "A", []string{"NOERROR", "db-0." + db + " A 10.244.1.5"}},
		{"db-0." + db, "ANY", []string{"NOERROR", "db-0." + db + " A 10.244.1.5", "db-0." + db + " AAAA fd00:10:244:1::5"}},
		{"10-244-2-6." + db, "A", []string{"NOERROR", "10-244-2-6." + db + " A 10.244.2.6"}},
		{"10-244-2-7." + db, "A", []string{"NXDOMAIN"}},
		{"_sql._tcp." + db, "SRV", []string{"NOERROR", "_sql._tcp." + db + " SRV 0 50 5432 10-244-2-6." + db, "_sql._tcp." + db + " SRV 0 50 5432 db-0." + db}},
		{"none.demo.svc.cluster.local.", "A", []string{"NOERROR"}},
		{"out.demo.svc.cluster.local.", "A", []string{"NOERROR", "out.demo.svc.cluster.local. CNAME www.example.com."}},
		{"alias.demo.svc.cluster.local.", "A", []string{"NOERROR", "alias.demo.svc.cluster.local. CNAME " + web, web + " A 10.96.0.20"}},
		{"alias.demo.svc.cluster.local.", "CNAME", []string{"NOERROR", "alias.demo.svc.cluster.local. CNAME " + web}},
		{"circle.demo.svc.cluster.local.", "A", []string{"SERVFAIL"}},
		{"10-244-1-9.demo.pod.cluster.local.", "A", []string{"NOERROR", "10-244-1-9.demo.pod.cluster.local. A 10.244.1.9"}},
		{"10-244-1-9.demo.pod.cluster.local.", "AAAA", []string{"NOERROR"}},
		{"fd00-10-244-1--9.demo.pod.cluster.local.", "AAAA", []string{"NOERROR", "fd00-10-244-1--9.demo.pod.cluster.local. AAAA fd00:10:244:1::9"}},
		{"10-244-1-9.empty.pod.cluster.local.", "A", []string{"NXDOMAIN"}},
		{"nobody.demo.svc.cluster.local.", "A", []string{"NXDOMAIN"}},
		{"web.nowhere.svc.cluster.local.", "A", []string{"NXDOMAIN"}},
		{"empty.svc.cluster.local.", "A", []string{"NOERROR"}},
		{"svc.cluster.local.", "A", []string{"NOERROR"}},
		{"cluster.local.", "A", []string{"NOERROR"}},
		{"cluster.local.", "NS", []string{"NOERROR", "cluster.local. NS kube-dns.kube-system.svc.cluster.local."}},
		{"dns-version.cluster.local.", "TXT", []string{"NOERROR", `dns-version.cluster.local. TXT "1.1.0"`}},
		{"20.0.96.10.in-addr.arpa.", "PTR", []string{"NOERROR", "20.0.96.10.in-addr.arpa. PTR " + web}},
		{"5.1.244.10.in-addr.arpa.", "PTR", []string{"NOERROR", "5.1.244.10.in-addr.arpa. PTR db-0." + db}},
		{"9.1.244.10.in-addr.arpa.", "PTR", []string{"NOERROR", "9.1.244.10.in-addr.arpa. PTR 10-244-1-9.demo.pod.cluster.local."}},
		{"9.1.244.10.in-addr.arpa.", "A", []string{"NOERROR"}},
		{reverseOf(t, "fd00:10:96::20"), "PTR", []string{"NOERROR", reverseOf(t, "fd00:10:96::20") + " PTR " + web}},
		{"99.99.96.10.in-addr.arpa.", "PTR", []string{"NXDOMAIN"}},
		{"1.1.1.1.in-addr.arpa.", "PTR", []string{"REFUSED"}},
		{"www.example.com.", "A", []string{"REFUSED"}},
		{"local.", "A", []string{"REFUSED"}},
	} {
		for _, network := range []string{"udp", "tcp"} {
			m := ask(t, network, address, c.name, c.kind, nil)
			if diff := cmp.Diff(c.want, lines(m)); diff != "" {
				t.Errorf("%s %s by %s: %s", c.name, c.kind, network, diff)
			}
			negative := len(m.Answer) == 0 && (m.Rcode == dns.RcodeSuccess || m.Rcode == dns.RcodeNameError)
			if soa := len(m.Ns) == 1 && m.Ns[0].(*dns.SOA).Minttl == ttl; soa != negative {
				t.Errorf("%s %s by %s: authority %v", c.name, c.kind, network, m.Ns)
			}
			for _, rr := range m.Answer {
				if rr.Header().Ttl != ttl {
					t.Errorf("%s: TTL %d: want %d", rr, rr.Header().Ttl, ttl)
				}
			}
		}
	}
	extra := ask(t, "udp", address, "_sql._tcp."+db, "SRV", nil).Extra
	if len(extra) != 3 {
		t.Errorf("with the SRV records come %v: want three addresses", extra)
	}
}

func reverseOf(t *testing.T, ip string) string {
	t.Helper()
	name, err := dns.ReverseAddr(ip)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func TestOddQueries(t *testing.T) {
	address, _ := start(t, cluster)
	for _, c := range []struct {
		name   string
		change func(*dns.Msg)
		want   int
	}{
		{"another class", func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, dns.RcodeRefused},
		{"another operation", func(m *dns.Msg) { m.Opcode = dns.OpcodeStatus }, dns.RcodeNotImplemented},
		{"an EDNS version that is not there yet", func(m *dns.Msg) { m.SetEdns0(1232, false); m.IsEdns0().SetVersion(1) }, dns.RcodeBadVers},
		{"EDNS", func(m *dns.Msg) { m.SetEdns0(1232, false) }, dns.RcodeSuccess},
	} {
		if m := ask(t, "udp", address, "web.demo.svc.cluster.local", "A", c.change); m.Rcode != c.want {
			t.Errorf("%s: %s: want %s", c.name, dns.RcodeToString[m.Rcode], dns.RcodeToString[c.want])
		}
	}
}

// An answer that does not fit a datagram says so, and is whole by TCP.
func TestLargeAnswers(t *testing.T) {
	var b strings.Builder
	b.WriteString("apiVersion: v1\nkind: Service\nmetadata: {name: many}\nspec: {clusterIP: None}\n---\n" +
		"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: many, labels: {kubernetes.io/service-name: many}}\naddressType: IPv4\nendpoints:\n")
	for i := range 100 {
		fmt.Fprintf(&b, "  - {addresses: [10.244.1.%d]}\n", i+1)
	}
	address, _ := start(t, b.String())
	for _, c := range []struct {
		network   string
		edns      uint16
		limit     int
		truncated bool
	}{
		{"udp", 0, 512, true},
		{"udp", 100, 512, true},
		{"udp", 1000, 1000, true},
		{"udp", 65000, maxUDP, true},
		{"tcp", 0, dns.MaxMsgSize, false},
	} {
		m := ask(t, c.network, address, "many.default.svc.cluster.local", "A", func(m *dns.Msg) {
			if c.edns > 0 {
				m.SetEdns0(c.edns, false)
			}
		})
		m.Compress = true
		if m.Truncated != c.truncated || m.Len() > c.limit || (len(m.Answer) == 100) == c.truncated {
			t.Errorf("%s, EDNS %d: %d records in %d bytes, truncated %t", c.network, c.edns, len(m.Answer), m.Len(), m.Truncated)
		}
	}
}

func TestFolderIsFollowed(t *testing.T) {
	address, folder := start(t, cluster)
	write(t, folder, "more.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: late}\nspec: {clusterIP: 10.96.0.99, ports: [{port: 1}]}\n")
	deadline := time.Now().Add(10 * time.Second)
	for {
		m := ask(t, "udp", address, "late.default.svc.cluster.local", "A", nil)
		if m.Rcode == dns.RcodeSuccess && len(m.Answer) == 1 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("never answered: %v", m)
		}
	}
}
