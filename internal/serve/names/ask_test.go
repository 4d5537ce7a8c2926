// SPDX-License-Identifier: Apache-2.0

package names

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestAsk(t *testing.T) {
	address, _ := start(t, cluster)
	dir := t.TempDir()
	write(t, dir, "resolv.conf", "nameserver 192.0.2.1\nsearch demo.svc.cluster.local svc.cluster.local\noptions ndots:5\n")
	write(t, dir, "empty", "")
	ask := func(cfg AskConfig) (string, error) {
		if cfg.ResolvConf == "" {
			cfg.ResolvConf = filepath.Join(dir, "resolv.conf")
		}
		cfg.Timeout = 5 * time.Second
		records, err := Ask(t.Context(), cfg)
		return strings.Join(records, "|"), err
	}
	for _, c := range []struct{ name, kind, want string }{
		{"web", "A", "web.demo.svc.cluster.local.\t5\tIN\tA\t10.96.0.20"},
		{"web.demo", "AAAA", "web.demo.svc.cluster.local.\t5\tIN\tAAAA\tfd00:10:96::20"},
		{"10.96.0.20", "A", "20.0.96.10.in-addr.arpa.\t5\tIN\tPTR\tweb.demo.svc.cluster.local."},
	} {
		for _, tcp := range []bool{false, true} {
			got, err := ask(AskConfig{Name: c.name, Type: c.kind, Server: address, TCP: tcp})
			if err != nil || got != c.want {
				t.Errorf("%s %s, TCP %t: %q, %v: want %q", c.name, c.kind, tcp, got, err, c.want)
			}
		}
	}
	closed, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := closed.LocalAddr().String()
	closed.Close()
	for _, c := range []struct {
		cfg  AskConfig
		want string
	}{
		{AskConfig{Name: "nobody", Type: "A", Server: address}, "nobody.demo.svc.cluster.local. A: no such record: NXDOMAIN"},
		{AskConfig{Name: "plain", Type: "AAAA", Server: address}, "plain.demo.svc.cluster.local. AAAA: no such record: NOERROR"},
		{AskConfig{Name: "www.example.com.", Type: "A", Server: address}, "REFUSED"},
		{AskConfig{Name: "web", Type: "A", Server: nobody}, "connection refused"},
		{AskConfig{Name: "web", Type: "B", Server: address}, `type "B": want a type of DNS records`},
		{AskConfig{Name: "web", Type: "A", ResolvConf: filepath.Join(dir, "empty")}, "names no server"},
		{AskConfig{Name: "web", Type: "A", ResolvConf: filepath.Join(dir, "missing")}, "no such file"},
	} {
		if got, err := ask(c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %q, %v: want an error with %q", c.cfg, got, err, c.want)
		}
	}
}
