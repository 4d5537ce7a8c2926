// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netns"
)

// sysctlRoot is where the kernel shows the sysctls of the network namespace of
// the thread that opens a file, not of the process.
const sysctlRoot = "/proc/sys/net"

// sysctl is one value below /proc/sys/net, such as {"ipv6/conf/eth0/accept_ra", "0"}.
type sysctl struct{ path, value string }

// writeSysctls sets values in the network namespace ns. A value that is there
// already is not written, so that a read-only /proc/sys does not matter then.
func writeSysctls(ns netns.NsHandle, values []sysctl) error {
	return inNamespace(ns, func() error {
		for _, v := range values {
			if err := writeSysctl(v); err != nil {
				return err
			}
		}
		return nil
	})
}

func writeSysctl(v sysctl) error {
	file := filepath.Join(sysctlRoot, v.path)
	old, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read sysctl %s: %w", v.path, err)
	}
	if strings.TrimSpace(string(old)) == v.value {
		return nil
	}
	if err := os.WriteFile(file, []byte(v.value), 0); err != nil {
		return fmt.Errorf("set sysctl %s to %s: %w", v.path, v.value, err)
	}
	return nil
}

// hostSysctls are set on the node's side of a pod's link and on the VXLAN
// device: answers may leave by another device than the kernel's own route
// (loose reverse path filter), nothing that a pod sends configures the node, and
// without a program nothing is forwarded. Of that the kernel keeps IPv4 alone:
// IPv6 it forwards by the node's net.ipv6.conf.all.forwarding, and by the
// device's it is only a host or a router there. Writing the node's ip_forward
// sets that of all devices.
func hostSysctls(name string, v6 bool) []sysctl {
	s := []sysctl{
		{"ipv4/conf/" + name + "/forwarding", "0"},
		{"ipv4/conf/" + name + "/rp_filter", "2"},
		{"ipv4/conf/" + name + "/accept_redirects", "0"},
		{"ipv4/conf/" + name + "/send_redirects", "0"},
	}
	if v6 {
		s = append(s,
			sysctl{"ipv6/conf/" + name + "/disable_ipv6", "0"},
			sysctl{"ipv6/conf/" + name + "/forwarding", "0"},
			sysctl{"ipv6/conf/" + name + "/accept_ra", "0"},
			sysctl{"ipv6/conf/" + name + "/accept_redirects", "0"},
		)
	}
	return s
}

// podSysctls are set on the pod's side before it goes up. No router
// solicitation and no duplicate address detection: weft gives the addresses.
func podSysctls(name string) []sysctl {
	return []sysctl{
		{"ipv6/conf/lo/disable_ipv6", "0"},
		{"ipv6/conf/" + name + "/disable_ipv6", "0"},
		{"ipv6/conf/" + name + "/accept_ra", "0"},
		{"ipv6/conf/" + name + "/accept_dad", "0"},
	}
}
