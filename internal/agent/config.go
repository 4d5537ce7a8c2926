// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Config is the agent's configuration file. Several agents may share a kernel:
// their RunDir, PinPath and CgroupRoot must differ.
type Config struct {
	// Node is the name of this node's Node object. Default: the host name.
	Node string `json:"node"`
	// RunDir holds the API socket (weft.sock) and what the agent remembers of
	// pods and identities. Default /run/weft.
	RunDir string `json:"runDir"`
	// PinPath is where maps and links are pinned, in a BPF file system. Default
	// /sys/fs/bpf/weft.
	PinPath string `json:"pinPath"`
	// CgroupRoot is the cgroup2 folder that holds the node's pods. Default: the
	// root of the cgroup2 hierarchy.
	CgroupRoot string          `json:"cgroupRoot"`
	Log        LogConfig       `json:"log"`
	Health     HealthConfig    `json:"health"`
	Source     SourceConfig    `json:"source"`
	Datapath   DatapathConfig  `json:"datapath"`
	Conntrack  ConntrackConfig `json:"conntrack"`
	Flow       FlowConfig      `json:"flow"`
	Policy     PolicyConfig    `json:"policy"`
	Services   ServicesConfig  `json:"services"`
	CNI        CNIConfig       `json:"cni"`
}

// LogConfig says what is logged, to standard error.
type LogConfig struct {
	Level  string `json:"level"`  // debug, info, warn or error; default info
	Format string `json:"format"` // text or json; default text
}

// HealthConfig is where health is served by HTTP.
type HealthConfig struct {
	// Address of /healthz, /readyz and /metrics, HOST:PORT. Default 127.0.0.1:9879; "-"
	// turns it off.
	Address string `json:"address"`
}

// SourceConfig is where the state of the cluster comes from.
type SourceConfig struct {
	// Folder of Kubernetes manifests. Required.
	Folder string `json:"folder"`
}

// DatapathConfig is how packets travel.
type DatapathConfig struct {
	// Uplink is the device towards the other nodes. Default: that of the
	// default route.
	Uplink string `json:"uplink"`
	// Tunnel is "none" (the network between the nodes carries pod addresses to
	// the next hop) or "vxlan". Default none.
	Tunnel string `json:"tunnel"`
	// VXLANPort is the UDP port of the tunnel. Default 4789 (RFC 7348).
	VXLANPort uint16 `json:"vxlanPort"`
	// Masquerade gives what pods send outside the node's address. Default true.
	Masquerade *bool `json:"masquerade"`
	// MasqueradeExclude are outside networks that see pod addresses, as CIDRs.
	MasqueradeExclude []string `json:"masqueradeExclude"`
	// MasqueradePorts are the source ports used for it, FIRST-LAST. Default
	// 10000-19999: outside of what Linux gives to local connections.
	MasqueradePorts string `json:"masqueradePorts"`
	// MTU of pod interfaces in bytes. 0: the uplink's, less the tunnel's
	// headers.
	MTU int `json:"mtu"`
	// MaxAddresses is how many addresses and prefixes of the cluster the node
	// can know. Default 262144, about 96 bytes each.
	MaxAddresses int `json:"maxAddresses"`
}

// ConntrackConfig bounds the connection table. Lifetimes count from a
// connection's last packet, in whole seconds.
type ConntrackConfig struct {
	// MaxEntries is the number of connections. Beyond it new connections are
	// dropped as conntrack-full; established ones go on. Default 262144, about
	// 160 bytes each, allocated at start.
	MaxEntries int `json:"maxEntries"`
	// MaxPerPod is how many of them one address of a pod may have; beyond it its
	// new ones are dropped as conntrack-quota. Default: half of MaxEntries.
	MaxPerPod int `json:"maxPerPod"`
	// MaxMasqueraded is the number of masqueraded connections. Default 131072,
	// about 112 bytes each, allocated at start.
	MaxMasqueraded int      `json:"maxMasqueraded"`
	TCPSyn         Duration `json:"tcpSyn"`         // default 60s
	TCPEstablished Duration `json:"tcpEstablished"` // default 6h
	TCPClosing     Duration `json:"tcpClosing"`     // default 5s; limits how many connections a second fit
	UDP            Duration `json:"udp"`            // default 30s
	UDPReplied     Duration `json:"udpReplied"`     // default 60s
	Other          Duration `json:"other"`          // default 30s
}

// FlowConfig bounds flow events.
type FlowConfig struct {
	// RingBytes is the size of the kernel's event ring: a power of two, at
	// least 262144. Default 4194304. An event takes 144 bytes.
	RingBytes int `json:"ringBytes"`
	// Keep is how many flows the agent keeps for those who ask later. Default
	// 16384, about 500 bytes each.
	Keep int `json:"keep"`
	// ReportInterval is the time between two updates about one connection that
	// has traffic. Default 10s; "0s" turns updates off.
	ReportInterval *Duration `json:"reportInterval"`
}

// PolicyConfig bounds network policy.
type PolicyConfig struct {
	// MaxEntries of all compiled policies of this node together. Beyond it a
	// change is not put in force, and what was before stays. Default 131072,
	// about 96 bytes each.
	MaxEntries int `json:"maxEntries"`
	// MaxPrefixes that policies may name. Default 65536, about 80 bytes each.
	MaxPrefixes int `json:"maxPrefixes"`
	// KeepEstablished lets connections go on that a change forbids; new ones
	// are refused. Default false: they are cut.
	KeepEstablished bool `json:"keepEstablished"`
}

// CNIConfig bounds the wiring of pods.
type CNIConfig struct {
	// WaitForPod is how long an ADD waits for the pod's object. Default 10s.
	WaitForPod Duration `json:"waitForPod"`
}

// Duration is a time.Duration written as "1m30s".
type Duration time.Duration

// UnmarshalJSON accepts what time.ParseDuration does.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("%s: want a duration in quotes such as \"30s\"", b)
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("%q: want a duration such as \"30s\" or \"1h30m\"", s)
	}
	*d = Duration(v)
	return nil
}

// LoadConfig reads, completes and checks the file at path. Every problem is in
// the error, each with the field's name and value.
func LoadConfig(path string) (*Config, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	cfg, err := parseConfig(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return cfg, nil
}

func parseConfig(b []byte) (*Config, error) {
	j, err := yaml.YAMLToJSONStrict(b)
	if err != nil {
		return nil, err
	}
	cfg := &Config{}
	strict, err := kjson.UnmarshalStrict(j, cfg)
	if err != nil {
		return nil, err
	}
	if len(strict) > 0 {
		return nil, errors.Join(strict...)
	}
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	return cfg, cfg.validate()
}

// or returns a where it is not zero, else the default b.
func or[T comparable](a, b T) T {
	var zero T
	if a == zero {
		return b
	}
	return a
}

func (c *Config) setDefaults() error {
	if c.Node == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("node: %w", err)
		}
		c.Node = name
	}
	c.RunDir = or(c.RunDir, "/run/weft")
	c.PinPath = or(c.PinPath, "/sys/fs/bpf/weft")
	c.Log.Level = or(c.Log.Level, "info")
	c.Log.Format = or(c.Log.Format, "text")
	c.Health.Address = or(c.Health.Address, "127.0.0.1:9879")
	c.Datapath.setDefaults()
	c.Conntrack.setDefaults()
	c.Flow.RingBytes = or(c.Flow.RingBytes, 4<<20)
	c.Flow.Keep = or(c.Flow.Keep, 16384)
	if c.Flow.ReportInterval == nil {
		d := Duration(10 * time.Second)
		c.Flow.ReportInterval = &d
	}
	c.Policy.MaxEntries = or(c.Policy.MaxEntries, 131072)
	c.Policy.MaxPrefixes = or(c.Policy.MaxPrefixes, 65536)
	c.Services.setDefaults()
	c.CNI.WaitForPod = or(c.CNI.WaitForPod, Duration(10*time.Second))
	return nil
}

func (d *DatapathConfig) setDefaults() {
	d.Tunnel = or(d.Tunnel, "none")
	d.VXLANPort = or(d.VXLANPort, 4789)
	d.MasqueradePorts = or(d.MasqueradePorts, "10000-19999")
	d.MaxAddresses = or(d.MaxAddresses, 262144)
	if d.Masquerade == nil {
		yes := true
		d.Masquerade = &yes
	}
}

func (c *ConntrackConfig) setDefaults() {
	c.MaxEntries = or(c.MaxEntries, 262144)
	c.MaxPerPod = or(c.MaxPerPod, c.MaxEntries/2)
	c.MaxMasqueraded = or(c.MaxMasqueraded, 131072)
	c.TCPSyn = or(c.TCPSyn, Duration(60*time.Second))
	c.TCPEstablished = or(c.TCPEstablished, Duration(6*time.Hour))
	c.TCPClosing = or(c.TCPClosing, Duration(5*time.Second))
	c.UDP = or(c.UDP, Duration(30*time.Second))
	c.UDPReplied = or(c.UDPReplied, Duration(60*time.Second))
	c.Other = or(c.Other, Duration(30*time.Second))
}

// problems gathers what is wrong with a configuration.
type problems []error

func (p *problems) add(field string, value any, want string) {
	*p = append(*p, fmt.Errorf("%s: %v: want %s", field, quoted(value), want))
}

func quoted(v any) string {
	if s, ok := v.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprint(v)
}

func (p *problems) oneOf(field, value string, allowed ...string) {
	for _, a := range allowed {
		if value == a {
			return
		}
	}
	p.add(field, value, "one of "+strings.Join(allowed, ", "))
}

func (p *problems) absolute(field, value string) {
	if !filepath.IsAbs(value) {
		p.add(field, value, "an absolute path")
	}
}

func (p *problems) between(field string, value, least, most int) {
	if value < least || value > most {
		p.add(field, value, fmt.Sprintf("a number from %d to %d", least, most))
	}
}

func (p *problems) seconds(field string, d Duration, least time.Duration) {
	v := time.Duration(d)
	if v < least || v%time.Second != 0 || v > 30*24*time.Hour {
		p.add(field, v.String(), fmt.Sprintf("whole seconds from %v to 720h", least))
	}
}

func (c *Config) validate() error {
	var p problems
	p.absolute("runDir", c.RunDir)
	p.absolute("pinPath", c.PinPath)
	if c.CgroupRoot != "" {
		p.absolute("cgroupRoot", c.CgroupRoot)
	}
	p.oneOf("log.level", c.Log.Level, "debug", "info", "warn", "error")
	p.oneOf("log.format", c.Log.Format, "text", "json")
	if c.Health.Address != "-" {
		if _, _, err := net.SplitHostPort(c.Health.Address); err != nil {
			p.add("health.address", c.Health.Address, "HOST:PORT, or \"-\" for none")
		}
	}
	if c.Source.Folder == "" {
		p.add("source.folder", "", "the folder of manifests")
	} else {
		p.absolute("source.folder", c.Source.Folder)
	}
	c.Datapath.validate(&p)
	c.Conntrack.validate(&p)
	if n := c.Flow.RingBytes; n < 256<<10 || n > 1<<30 || n&(n-1) != 0 {
		p.add("flow.ringBytes", n, "a power of two from 262144 to 1073741824")
	}
	p.between("flow.keep", c.Flow.Keep, 1, 1<<20)
	if *c.Flow.ReportInterval != 0 {
		p.seconds("flow.reportInterval", *c.Flow.ReportInterval, time.Second)
	}
	p.between("policy.maxEntries", c.Policy.MaxEntries, 64, 1<<24)
	p.between("policy.maxPrefixes", c.Policy.MaxPrefixes, 64, 1<<24)
	c.Services.validate(&p, &c.Datapath)
	p.seconds("cni.waitForPod", c.CNI.WaitForPod, time.Second)
	return errors.Join(p...)
}

func (d *DatapathConfig) validate(p *problems) {
	p.oneOf("datapath.tunnel", d.Tunnel, "none", "vxlan")
	if d.MTU != 0 {
		p.between("datapath.mtu", d.MTU, 1280, 65535)
	}
	p.between("datapath.maxAddresses", d.MaxAddresses, 1024, 1<<24)
	for i, s := range d.MasqueradeExclude {
		if _, err := netip.ParsePrefix(s); err != nil {
			p.add(fmt.Sprintf("datapath.masqueradeExclude[%d]", i), s, "a CIDR such as 10.0.0.0/8")
		}
	}
	if _, _, err := portRange(d.MasqueradePorts); err != nil {
		p.add("datapath.masqueradePorts", d.MasqueradePorts, wantPorts)
	}
}

// wantPorts is what portRange takes.
const wantPorts = "FIRST-LAST, two ports from 1024 to 65535"

// portRange reads FIRST-LAST.
func portRange(s string) (first, last uint16, err error) {
	var a, b int
	var rest string
	n, _ := fmt.Sscanf(s+" .", "%d-%d %s", &a, &b, &rest)
	if n != 3 || a < 1024 || b > 65535 || a > b {
		return 0, 0, fmt.Errorf("port range %q", s)
	}
	return uint16(a), uint16(b), nil
}

func (d *DatapathConfig) exclude() []netip.Prefix {
	out := make([]netip.Prefix, 0, len(d.MasqueradeExclude))
	for _, s := range d.MasqueradeExclude {
		out = append(out, netip.MustParsePrefix(s).Masked()) // checked by validate
	}
	return out
}

func (c *ConntrackConfig) validate(p *problems) {
	p.between("conntrack.maxEntries", c.MaxEntries, 1024, 1<<24)
	p.between("conntrack.maxPerPod", c.MaxPerPod, 1, c.MaxEntries)
	p.between("conntrack.maxMasqueraded", c.MaxMasqueraded, 1024, 1<<24)
	for _, f := range []struct {
		name string
		d    Duration
	}{
		{"tcpSyn", c.TCPSyn}, {"tcpEstablished", c.TCPEstablished}, {"tcpClosing", c.TCPClosing},
		{"udp", c.UDP}, {"udpReplied", c.UDPReplied}, {"other", c.Other},
	} {
		p.seconds("conntrack."+f.name, f.d, time.Second)
	}
}
