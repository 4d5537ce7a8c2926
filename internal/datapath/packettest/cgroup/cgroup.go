// SPDX-License-Identifier: Apache-2.0

// Package cgroup puts a test into a cgroup of its own, where programs that are
// attached to it see the test's sockets and those of nobody else.
package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// Enter makes a cgroup2 folder, moves the whole test process into it until the
// end of the test, and returns its path. A socket belongs to the cgroup that
// the process was in when it was made.
func Enter(t testing.TB) string {
	t.Helper()
	nstest.Need(t)
	mount, err := cgroup.Mount()
	if err != nil {
		t.Fatal(err)
	}
	before, err := current()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(mount, "weft-test-")
	if err != nil {
		t.Fatalf("make a cgroup: %v", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(move(filepath.Join(mount, before)), remove(dir)); err != nil {
			t.Errorf("leave the cgroup: %v", err)
		}
	})
	if err := move(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Within calls f while the test process is in another cgroup than its own.
func Within(other, own string, f func()) error {
	if err := move(other); err != nil {
		return err
	}
	f()
	return move(own)
}

// move moves this process into a cgroup.
func move(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0); err != nil {
		return fmt.Errorf("enter cgroup: %w", err)
	}
	return nil
}

// remove waits for processes that were started in the cgroup and are on their
// way out.
func remove(dir string) error {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		err := os.Remove(dir)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return err
		}
	}
}

// current is the path of this process's cgroup below the mount point.
func current() (string, error) {
	list, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(list)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return path, nil
		}
	}
	return "", errors.New("this process is in no cgroup2")
}
