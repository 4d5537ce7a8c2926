// SPDX-License-Identifier: Apache-2.0

package testlab

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/weft-mesh/weft/internal/cgroup"
)

// Leaks says what there is of the lab on this machine; after `weft lab down`
// that must be nothing.
func (l *Lab) Leaks() []string {
	var left []string
	patterns := []string{
		"/run/netns/weft-" + l.Name + "-*",
		"/sys/fs/bpf/weft/" + l.Name,
		filepath.Join(l.Root, "*"),
	}
	if mount, err := cgroup.Mount(); err == nil {
		patterns = append(patterns, filepath.Join(mount, "weft-lab", l.Name))
	}
	for _, p := range patterns {
		found, _ := filepath.Glob(p)
		left = append(left, found...)
	}
	return append(append(left, l.processes()...), l.mounts()...)
}

// processes are those with the lab in their environment or command line.
func (l *Lab) processes() []string {
	var left []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		// A process may end between the two; then there is nothing to read.
		environ, _ := os.ReadFile(filepath.Join(dir, "environ"))
		cmdline, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if bytes.Contains(environ, []byte("WEFT_LAB="+l.Name+"\x00")) || bytes.Contains(cmdline, []byte(l.Root)) {
			left = append(left, fmt.Sprintf("process %s: %s", filepath.Base(dir), bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))
		}
	}
	return left
}

func (l *Lab) mounts() []string {
	var left []string
	text, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, l.Root) || strings.Contains(line, "/weft-"+l.Name+"-") {
			left = append(left, "mount "+strings.TrimSpace(line))
		}
	}
	return left
}
