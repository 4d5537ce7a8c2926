// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"fmt"

	"github.com/weft-mesh/weft/internal/datapath/xdp"
)

// ServicesConfig says how connections to Services reach their backends, and
// bounds what the kernel keeps of them.
type ServicesConfig struct {
	// External is how a connection from outside the cluster goes on to a backend
	// of another node: "snat" (with this node's address as source; answers come
	// back through this node) or "dsr" (with the client's; the other node answers
	// by itself, which needs datapath.tunnel none). Default snat.
	External string `json:"external"`
	// Algorithm picks the backend of a connection from outside: "maglev" (every
	// node picks the same one) or "random". Default maglev.
	Algorithm string `json:"algorithm"`
	// Ports are the source ports used by snat, FIRST-LAST. Default 20000-29999.
	Ports string `json:"ports"`
	// XDP handles connections from outside, and the deny list, before the kernel
	// makes a packet of a frame: "native", "generic", "auto" (native where the
	// device can, else generic) or "off" (tcx does it). Default auto.
	XDP XDPMode `json:"xdp"`
	// MaxFrontends (address, port and protocol) of all Services. Default 131072,
	// about 112 bytes each. What is beyond a limit is not put in force, and
	// status says so; memory is taken when used.
	MaxFrontends int `json:"maxFrontends"`
	// MaxBackends of all Services. Default 262144, about 96 bytes each.
	MaxBackends int `json:"maxBackends"`
	// MaxSlots: each backend has one in every set that it is in, of which a
	// Service has up to three. Default twice MaxBackends, about 72 bytes each.
	MaxSlots int `json:"maxSlots"`
	// MaxTables of Maglev. Default 16384, each of 8 bytes for each of its entries,
	// of which there are a hundred and more for each backend.
	MaxTables int `json:"maxTables"`
	// MaxSourceRanges of all Services. Default 65536, about 88 bytes each.
	MaxSourceRanges int `json:"maxSourceRanges"`
	// MaxAffinity is how many clients can be kept with their backend; the one
	// seen longest ago makes room. Default 65536, about 96 bytes each, allocated at start.
	MaxAffinity int `json:"maxAffinity"`
	// MaxFlows is twice the number of connections that are translated packet by
	// packet. Default 262144, about 160 bytes each.
	MaxFlows int `json:"maxFlows"`
	// MaxSockets is how many connected UDP sockets can be cut when their backend
	// goes. Default 65536, about 72 bytes each.
	MaxSockets int `json:"maxSockets"`
	// MaxDenied networks of weft deny. Default 16384, 16 bytes of each for each
	// processor, allocated at start.
	MaxDenied int `json:"maxDenied"`
}

// XDPMode is a word that YAML may take for a boolean: off is false there.
type XDPMode string

// UnmarshalJSON accepts a string, and false for "off".
func (m *XDPMode) UnmarshalJSON(b []byte) error {
	if string(b) == "false" {
		*m = xdp.Off
		return nil
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("services.xdp: %s: want one of auto, native, generic, off", b)
	}
	*m = XDPMode(s)
	return nil
}

func (s *ServicesConfig) setDefaults() {
	s.External = or(s.External, "snat")
	s.Algorithm = or(s.Algorithm, "maglev")
	s.Ports = or(s.Ports, "20000-29999")
	s.XDP = or(s.XDP, xdp.Auto)
	s.MaxFrontends = or(s.MaxFrontends, 131072)
	s.MaxBackends = or(s.MaxBackends, 262144)
	s.MaxSlots = or(s.MaxSlots, 2*s.MaxBackends)
	s.MaxTables = or(s.MaxTables, 16384)
	s.MaxSourceRanges = or(s.MaxSourceRanges, 65536)
	s.MaxAffinity = or(s.MaxAffinity, 65536)
	s.MaxFlows = or(s.MaxFlows, 262144)
	s.MaxSockets = or(s.MaxSockets, 65536)
	s.MaxDenied = or(s.MaxDenied, 16384)
}

func (s *ServicesConfig) validate(p *problems, d *DatapathConfig) {
	p.oneOf("services.external", s.External, "snat", "dsr")
	if s.External == "dsr" && d.Tunnel != "none" {
		p.add("services.external", s.External, fmt.Sprintf("snat where datapath.tunnel is %s", d.Tunnel))
	}
	p.oneOf("services.algorithm", s.Algorithm, "maglev", "random")
	p.oneOf("services.xdp", string(s.XDP), xdp.Auto, xdp.Native, xdp.Generic, xdp.Off)
	for _, f := range []struct {
		name  string
		value int
	}{
		{"maxFrontends", s.MaxFrontends}, {"maxBackends", s.MaxBackends}, {"maxSlots", s.MaxSlots},
		{"maxTables", s.MaxTables}, {"maxSourceRanges", s.MaxSourceRanges}, {"maxAffinity", s.MaxAffinity},
		{"maxFlows", s.MaxFlows}, {"maxSockets", s.MaxSockets}, {"maxDenied", s.MaxDenied},
	} {
		p.between("services."+f.name, f.value, 64, 1<<24)
	}
	first, last, err := portRange(s.Ports)
	if err != nil {
		p.add("services.ports", s.Ports, wantPorts)
		return
	}
	from, to, err := portRange(d.MasqueradePorts)
	if err == nil && first <= to && from <= last {
		p.add("services.ports", s.Ports, "other ports than datapath.masqueradePorts, "+d.MasqueradePorts)
	}
}
