// SPDX-License-Identifier: Apache-2.0

// Package cgroup makes, empties and removes cgroup2 folders. A process belongs
// to the lab because of the folder it is in, never because of its name.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Mount returns where cgroup2 is mounted: /sys/fs/cgroup on a unified machine,
// /sys/fs/cgroup/unified on a hybrid one.
func Mount() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("read the mounts of this process: %w", err)
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		if point, ok := cgroup2Mount(scan.Text()); ok {
			return point, nil
		}
	}
	if err := scan.Err(); err != nil {
		return "", fmt.Errorf("read the mounts of this process: %w", err)
	}
	return "", errors.New("cgroup2 is not mounted: mount it with `mount -t cgroup2 none /sys/fs/cgroup`")
}

// cgroup2Mount reads one line of mountinfo (proc(5)): the fifth field is the
// mount point, the first after the lone dash the file system.
func cgroup2Mount(line string) (string, bool) {
	before, after, ok := strings.Cut(line, " - ")
	fields := strings.Fields(before)
	if !ok || len(fields) < 5 || !strings.HasPrefix(after, "cgroup2 ") {
		return "", false
	}
	return fields[4], true
}

// Create makes the folder and its parents.
func Create(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return fmt.Errorf("create cgroup: %w", err)
	}
	return nil
}

// Pids returns the processes of the folder and of all below it. A folder that
// is not there has none.
func Pids(path string) ([]int, error) {
	var pids []int
	err := walk(path, func(dir string) error {
		b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if gone(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the processes of a cgroup: %w", err)
		}
		for _, field := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids, err
}

// Kill sends SIGKILL to every process of the folder and of all below it, also
// to those that are being forked. It does not wait.
func Kill(path string) error {
	err := os.WriteFile(filepath.Join(path, "cgroup.kill"), []byte("1"), 0)
	if err != nil && !gone(err) {
		return fmt.Errorf("kill the processes of a cgroup (Linux 5.14 or later): %w", err)
	}
	return nil
}

// Remove kills what is left in the folder and below, waits for it to be gone,
// and removes the folders. A folder that is not there is no error.
func Remove(ctx context.Context, path string) error {
	if err := Kill(path); err != nil {
		return err
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := removeTree(path)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", path, err)
		case <-tick.C:
		}
	}
}

// removeTree removes bottom up; a folder with processes in it is busy.
func removeTree(path string) error {
	var dirs []string
	if err := walk(path, func(dir string) error { dirs = append(dirs, dir); return nil }); err != nil {
		return err
	}
	for i := len(dirs) - 1; i >= 0; i-- {
		if err := os.Remove(dirs[i]); err != nil && !gone(err) {
			return err
		}
	}
	return nil
}

// walk calls f for the folder and each below it, parents first.
func walk(path string, f func(dir string) error) error {
	return filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if gone(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if !d.IsDir() {
			return nil
		}
		return f(p)
	})
}
