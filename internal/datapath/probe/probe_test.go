// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// TestRun probes the kernel that runs the tests: it has all that weft
// requires, and is left as it was.
func TestRun(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("want root in CI")
		}
		t.Skip("needs root")
	}
	report, err := Run()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range report.Features {
		if f.Required && f.Status != Available {
			t.Errorf("%s: %s: %s", f.Feature, f.Status, f.Error)
		}
		if (f.Error == "") != (f.Status == Available) {
			t.Errorf("%s: status %s, error %q", f.Feature, f.Status, f.Error)
		}
	}
	if !report.OK || report.Kernel == "" || len(report.Features) != len(catalogue) {
		t.Errorf("ok %v, kernel %q, %d features", report.OK, report.Kernel, len(report.Features))
	}
	if root, err := mountPoint("cgroup2"); err == nil {
		left, err := filepath.Glob(filepath.Join(root, "weft-probe-*"))
		if err != nil || len(left) != 0 {
			t.Errorf("cgroups left: %v, %v", left, err)
		}
	}
	controls, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if err != nil || strings.Contains(string(controls), "weft_probe") {
		t.Errorf("congestion control left: %s, %v", controls, err)
	}
}

func TestCatalogueIsComplete(t *testing.T) {
	names := map[string]bool{}
	for _, f := range catalogue {
		if f.group == "" || f.since == "" || f.use == "" || f.instead == "" || f.probe == nil || names[f.name] {
			t.Errorf("feature %q: incomplete, or named twice", f.name)
		}
		names[f.name] = true
	}
}

func TestMissingIsToldFromUnknown(t *testing.T) {
	for _, c := range []struct {
		err  error
		want Status
	}{
		{nil, Available},
		{fmt.Errorf("load: %w", ebpf.ErrNotSupported), Missing},
		{fmt.Errorf("make a netkit device: %w", unix.EOPNOTSUPP), Missing},
		{errors.New("no cgroup2 is mounted"), Missing},
		{fmt.Errorf("load program: %w", unix.EPERM), Unknown},
		{fmt.Errorf("%w: %w", unix.EPERM, ebpf.ErrNotSupported), Missing},
	} {
		f := feature{use: "with", instead: "without", probe: func(*site) error { return c.err }}
		r := f.run(&site{})
		effect := map[bool]string{true: "with", false: "without"}[c.want == Available]
		if r.Status != c.want || r.Effect != effect {
			t.Errorf("%v: status %s, effect %q, want %s", c.err, r.Status, r.Effect, c.want)
		}
	}
}

func TestErrorIsOneLine(t *testing.T) {
	f := feature{probe: func(*site) error { return errors.New("load program: bad\n0: (b7) r0 = 0") }}
	if r := f.run(&site{}); r.Error != "load program: bad" {
		t.Errorf("got %q", r.Error)
	}
}

func TestFindMount(t *testing.T) {
	const info = `22 1 0:20 / / rw - overlay overlay rw
30 22 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu
31 22 0:27 / /sys/fs/cgroup/uni\040fied rw shared:10 master:3 - cgroup2 cgroup2 rw
32 22 0:27 / /other rw - cgroup2 cgroup2 rw
bad line
`
	if got, err := findMount(strings.NewReader(info), "cgroup2"); err != nil || got != "/sys/fs/cgroup/uni fied" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := findMount(strings.NewReader(info), "bpf"); err == nil || err.Error() != "no bpf is mounted" {
		t.Errorf("got %v", err)
	}
}
