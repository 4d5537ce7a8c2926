// SPDX-License-Identifier: Apache-2.0

// Package shim turns a process into one that runs somewhere else: it enters
// cgroup and namespaces, mounts files over others, and becomes the command. The
// lab starts everything through it, by the hidden command `weft lab shim`, so
// that no thread of the lab itself ever leaves its namespaces.
package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Exit codes of a shim that could not become its command, as shells have them.
const (
	ExitSetup       = 125 // a namespace, cgroup or mount
	ExitNotRunnable = 126
	ExitNotFound    = 127
)

// Spec says where to run what. Every empty field leaves that thing as it is.
type Spec struct {
	// Cgroup is the cgroup2 folder to move to.
	Cgroup string `json:"cgroup,omitempty"`
	// NetNS, UTSNS, IPCNS and MountNS are files of namespaces to enter.
	NetNS   string `json:"netns,omitempty"`
	UTSNS   string `json:"utsns,omitempty"`
	IPCNS   string `json:"ipcns,omitempty"`
	MountNS string `json:"mountns,omitempty"`
	// Binds are mounted in a mount namespace of the command's own.
	Binds []Bind `json:"binds,omitempty"`
	// Dir is the working directory; "/" where empty.
	Dir string `json:"dir,omitempty"`
	// Env is the whole environment, KEY=VALUE; nil keeps the caller's.
	Env []string `json:"env,omitempty"`
	// Argv is the command; Argv[0] is looked up in the PATH of Env.
	Argv []string `json:"argv"`
}

// Bind shows the file From at To.
type Bind struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// Command returns the argument list, without the executable, that makes weft
// run s.
func Command(s Spec) ([]string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode what to run: %w", err)
	}
	return []string{"lab", "shim", string(b)}, nil
}

// Error is why the shim did not become its command, and its exit code.
type Error struct {
	Code int
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Run becomes the command of the encoded spec; it returns only if it could not,
// and always with an *Error.
func Run(encoded string) error {
	var s Spec
	if err := json.Unmarshal([]byte(encoded), &s); err != nil {
		return &Error{ExitSetup, fmt.Errorf("decode what to run: %w", err)}
	}
	if len(s.Argv) == 0 {
		return &Error{ExitSetup, errors.New("decode what to run: no command")}
	}
	// exec makes this thread, with its namespaces, the process's only one.
	runtime.LockOSThread()
	if err := enter(s); err != nil {
		return &Error{ExitSetup, err}
	}
	env := s.Env
	if env == nil {
		env = os.Environ()
	}
	path, err := lookPath(s.Argv[0], env)
	if err != nil {
		return &Error{ExitNotFound, err}
	}
	err = syscall.Exec(path, s.Argv, env)
	return &Error{ExitNotRunnable, fmt.Errorf("run %s: %w", path, err)}
}

func enter(s Spec) error {
	if s.Cgroup != "" {
		if err := os.WriteFile(filepath.Join(s.Cgroup, "cgroup.procs"), []byte("0"), 0); err != nil {
			return fmt.Errorf("enter cgroup: %w", err)
		}
	}
	if err := enterNamespaces(s); err != nil {
		return err
	}
	if len(s.Binds) > 0 {
		if err := bind(s.Binds); err != nil {
			return err
		}
	}
	dir := s.Dir
	if dir == "" {
		dir = "/"
	}
	if err := os.Chdir(dir); err != nil {
		return fmt.Errorf("change to the working directory: %w", err)
	}
	return nil
}

func enterNamespaces(s Spec) error {
	kinds := []struct {
		name, path string
		flag       int
	}{
		{"network", s.NetNS, unix.CLONE_NEWNET},
		{"UTS", s.UTSNS, unix.CLONE_NEWUTS},
		{"IPC", s.IPCNS, unix.CLONE_NEWIPC},
		{"mount", s.MountNS, unix.CLONE_NEWNS}, // last: the other paths belong to the caller's
	}
	for _, k := range kinds {
		if k.path == "" {
			continue
		}
		f, err := os.Open(k.path)
		if err != nil {
			return fmt.Errorf("open %s namespace: %w", k.name, err)
		}
		if k.flag == unix.CLONE_NEWNS {
			// A thread that shares its root and working directory with others may not.
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return fmt.Errorf("leave the shared working directory: %w", err)
			}
		}
		err = unix.Setns(int(f.Fd()), k.flag)
		f.Close()
		if err != nil {
			return fmt.Errorf("enter %s namespace %s: %w", k.name, k.path, err)
		}
	}
	return nil
}

func bind(binds []Bind) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// Mounts made here stay here; those that the machine takes away go here too.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("detach the mount namespace: %w", err)
	}
	for _, b := range binds {
		if err := unix.Mount(b.From, b.To, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s at %s: %w", b.From, b.To, err)
		}
	}
	return nil
}

// lookPath finds an executable in the PATH of env, not in the shim's own.
func lookPath(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for i := len(env) - 1; i >= 0; i-- {
		list, ok := strings.CutPrefix(env[i], "PATH=")
		if !ok {
			continue
		}
		for _, dir := range filepath.SplitList(list) {
			path := filepath.Join(dir, name)
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return path, nil
			}
		}
		return "", fmt.Errorf("run %s: no such command in PATH", name)
	}
	return "", fmt.Errorf("run %s: %w", name, exec.ErrNotFound)
}
