// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"
	"time"
)

func TestXDPOff(t *testing.T) {
	cfg, err := parseConfig([]byte(goodConfig + "services: {xdp: off}\n"))
	if err != nil || cfg.Services.XDP != "off" {
		t.Errorf("off, which YAML reads as false, is %v, %v", cfg, err)
	}
}

const goodConfig = "node: n1\nsource: {folder: /tmp/m}\n"

func TestConfigDefaults(t *testing.T) {
	cfg, err := parseConfig([]byte(goodConfig))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Datapath.Tunnel != "none" || !*cfg.Datapath.Masquerade || cfg.Datapath.VXLANPort != 4789 {
		t.Errorf("datapath: %+v", cfg.Datapath)
	}
	if time.Duration(cfg.Conntrack.TCPEstablished) != 6*time.Hour {
		t.Errorf("tcpEstablished: %v", time.Duration(cfg.Conntrack.TCPEstablished))
	}
	if first, last, err := portRange(cfg.Datapath.MasqueradePorts); err != nil || first != 10000 || last != 19999 {
		t.Errorf("ports: %d-%d, %v", first, last, err)
	}
}

func TestBadConfig(t *testing.T) {
	for _, tc := range []struct{ yaml, want string }{
		{"node: n1\n", `source.folder: "": want the folder of manifests`},
		{goodConfig + "colour: red\n", `unknown field "colour"`},
		{goodConfig + "datapath: {tunel: vxlan}\n", `unknown field "datapath.tunel"`},
		{goodConfig + "datapath: {tunnel: geneve}\n", `datapath.tunnel: "geneve": want one of none, vxlan`},
		{goodConfig + "datapath: {mtu: 100}\n", `datapath.mtu: 100: want a number from 1280 to 65535`},
		{goodConfig + "datapath: {masqueradeExclude: [10.0.0.0]}\n", `datapath.masqueradeExclude[0]: "10.0.0.0": want a CIDR such as 10.0.0.0/8`},
		{goodConfig + "services: {external: ipip}\n", `services.external: "ipip": want one of snat, dsr`},
		{goodConfig + "services: {external: dsr}\ndatapath: {tunnel: vxlan}\n", `services.external: "dsr": want snat where datapath.tunnel is vxlan`},
		{goodConfig + "services: {algorithm: rr}\n", `services.algorithm: "rr": want one of maglev, random`},
		{goodConfig + "services: {xdp: hw}\n", `services.xdp: "hw": want one of auto, native, generic, off`},
		{goodConfig + "services: {xdp: true}\n", `services.xdp: true: want one of auto, native, generic, off`},
		{goodConfig + "services: {maxBackends: 3}\n", `services.maxBackends: 3: want a number from 64 to 16777216`},
		{goodConfig + "services: {ports: x}\n", `services.ports: "x": want FIRST-LAST, two ports from 1024 to 65535`},
		{goodConfig + "services: {ports: 15000-21000}\n", `services.ports: "15000-21000": want other ports than datapath.masqueradePorts, 10000-19999`},
		{goodConfig + "datapath: {masqueradePorts: 5-4}\n", `datapath.masqueradePorts: "5-4": want FIRST-LAST, two ports from 1024 to 65535`},
		{goodConfig + "conntrack: {udp: 500ms}\n", `conntrack.udp: "500ms": want whole seconds from 1s to 720h`},
		{goodConfig + "conntrack: {udp: 5}\n", `5: want a duration in quotes such as "30s"`},
		{goodConfig + "conntrack: {maxEntries: 10}\n", `conntrack.maxEntries: 10: want a number from 1024 to 16777216`},
		{goodConfig + "flow: {ringBytes: 300000}\n", `flow.ringBytes: 300000: want a power of two from 262144 to 1073741824`},
		{goodConfig + "log: {level: loud}\n", `log.level: "loud": want one of debug, info, warn, error`},
		{goodConfig + "health: {address: here}\n", `health.address: "here": want HOST:PORT, or "-" for none`},
		{goodConfig + "runDir: run\n", `runDir: "run": want an absolute path`},
		{goodConfig + "node: n2\n", `key "node" already set`},
		{"- a list\n", `cannot unmarshal array`},
	} {
		_, err := parseConfig([]byte(tc.yaml))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q:\n got %v\nwant %s", tc.yaml, err, tc.want)
		}
	}
}
