// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"context"
	"encoding/gob"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/cgroup"
)

// Names of clients.
const (
	insidePod  = "pod"
	insideNode = "node"
	outside    = "outside"
)

// remote is a client process.
type remote struct {
	in  *gob.Encoder
	out *gob.Decoder
}

// makeCgroup makes one that clients are started in.
func (w *world) makeCgroup() string {
	w.t.Helper()
	mount, err := cgroup.Mount()
	w.must(err, "cgroup")
	dir, err := os.MkdirTemp(mount, "weft-test-")
	w.must(err, "make a cgroup")
	w.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := cgroup.Remove(ctx, dir); err != nil {
			w.t.Errorf("remove the cgroup: %v", err)
		}
	})
	return dir
}

// start starts a client, in a cgroup where dir is not empty.
func (w *world) start(name string, h host, dir string) {
	w.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), clientEnv+"="+name)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	w.must(err, "pipe")
	out, err := cmd.StdoutPipe()
	w.must(err, "pipe")
	if dir != "" {
		fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		w.must(err, "open the cgroup")
		defer unix.Close(fd)
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
	}
	w.must(h.Do(cmd.Start), "start client "+name)
	w.t.Cleanup(func() {
		in.Close() // and so it ends
		_, _ = io.Copy(io.Discard, out)
		if err := cmd.Wait(); err != nil {
			w.t.Errorf("client %s: %v", name, err)
		}
	})
	w.clients[name] = &remote{gob.NewEncoder(in), gob.NewDecoder(out)}
}

// ask has a client make connections.
func (r *remote) ask(probes []Probe) ([]Result, error) {
	if len(probes) == 0 {
		return nil, nil
	}
	if err := r.in.Encode(probes); err != nil {
		return nil, fmt.Errorf("tell a client: %w", err)
	}
	var out []Result
	if err := r.out.Decode(&out); err != nil {
		return nil, fmt.Errorf("hear from a client: %w", err)
	}
	return out, nil
}
