// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/version"
)

// Facts say what was measured on. A fact that this machine does not tell is
// empty.
type Facts struct {
	Commit   string            `json:"commit"`
	Go       string            `json:"go"`
	Kernel   string            `json:"kernel"`
	Machine  string            `json:"machine"` // architecture
	CPUModel string            `json:"cpu_model"`
	CPUs     int               `json:"cpus"`
	Clock    string            `json:"clock"`
	Load     string            `json:"load"`    // /proc/loadavg before the run
	Sysctls  map[string]string `json:"sysctls"` // of the namespace that weft bench runs in
}

// sysctls are those that TCP over veth depends on.
var sysctls = []string{
	"kernel.sched_autogroup_enabled",
	"net.core.bpf_jit_enable",
	"net.core.bpf_jit_harden",
	"net.core.busy_poll",
	"net.core.default_qdisc",
	"net.core.dev_weight",
	"net.core.netdev_budget",
	"net.core.netdev_max_backlog",
	"net.core.rmem_max",
	"net.core.wmem_max",
	"net.ipv4.ip_local_port_range",
	"net.ipv4.tcp_congestion_control",
	"net.ipv4.tcp_mem",
	"net.ipv4.tcp_rmem",
	"net.ipv4.tcp_timestamps",
	"net.ipv4.tcp_tw_reuse",
	"net.ipv4.tcp_wmem",
}

// ReadFacts reads them from the running machine.
func ReadFacts() Facts {
	f := Facts{
		Commit: version.String(), Go: runtime.Version(), CPUs: runtime.NumCPU(),
		CPUModel: cpuModel(), Sysctls: map[string]string{},
		Clock: readLine("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
		Load:  readLine("/proc/loadavg"),
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		f.Kernel, f.Machine = unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:])
	}
	for _, name := range sysctls {
		if v := readLine("/proc/sys/" + strings.ReplaceAll(name, ".", "/")); v != "" {
			f.Sysctls[name] = v
		}
	}
	return f
}

func readLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.Join(strings.Fields(line), " ")
}

func cpuModel() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
