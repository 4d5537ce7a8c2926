// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// reservedPorts is the sysctl with the ports that the kernel gives to no socket
// of the namespace on its own.
const reservedPorts = "ipv4/ip_local_reserved_ports"

// ReserveLocalPorts keeps the kernel from choosing a port of first to last for a
// socket of the namespace. A socket that binds to one by number, or that has one
// already, is not affected. Other ports that are reserved stay so.
func (n *Net) ReserveLocalPorts(first, last uint16) error {
	return inNamespace(n.ns, func() error {
		file := filepath.Join(sysctlRoot, reservedPorts)
		old, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("read sysctl %s: %w", reservedPorts, err)
		}
		value, err := withPorts(strings.TrimSpace(string(old)), first, last)
		if err != nil {
			return fmt.Errorf("sysctl %s: %w", reservedPorts, err)
		}
		return writeSysctl(sysctl{reservedPorts, value})
	})
}

// withPorts returns the list of ports, such as "8080,9148-9150", with first to
// last in it; list itself if they are.
func withPorts(list string, first, last uint16) (string, error) {
	missing := int(last) - int(first) + 1
	for _, r := range strings.FieldsFunc(list, func(c rune) bool { return c == ',' }) {
		low, high, isRange := strings.Cut(r, "-")
		if !isRange {
			high = low
		}
		a, err := strconv.ParseUint(low, 10, 16)
		if err != nil {
			return "", fmt.Errorf("port range %q: %w", r, err)
		}
		b, err := strconv.ParseUint(high, 10, 16)
		if err != nil {
			return "", fmt.Errorf("port range %q: %w", r, err)
		}
		// The kernel's ranges do not overlap.
		missing -= max(0, min(int(b), int(last))-max(int(a), int(first))+1)
	}
	if missing <= 0 {
		return list, nil
	}
	own := fmt.Sprintf("%d-%d", first, last)
	if list == "" {
		return own, nil
	}
	return list + "," + own, nil
}
