// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// links returns the kernel's numbers of the links, and of their programs.
func (f *fixture) links() (links, programs map[string]uint32) {
	f.Helper()
	attached, err := f.maps.CgroupAttachments()
	f.must(err)
	links, programs = map[string]uint32{}, map[string]uint32{}
	for _, a := range attached {
		links[a.Device], programs[a.Device] = a.LinkID, a.ProgramID
	}
	return links, programs
}

// TestRestart: agents that come one after the other leave no connect without a
// program, and sockets remember their services.
func TestRestart(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53")
	stream, dgram := f.service(tcp, "10.96.0.10:53", "127.0.1.1:53"), f.service(udp, "10.96.0.10:53", "127.0.1.1:53")
	old := f.socket(f.pod, false, udp)
	old.mustConnect(dgram.front)
	links, programs := f.links()
	if len(links) != len(hooks) {
		t.Fatalf("%d links, want %d", len(links), len(hooks))
	}
	var calls atomic.Int64
	stop := make(chan struct{})
	var loops sync.WaitGroup
	errs := make(chan error, 2)
	for range 2 {
		loops.Go(func() { errs <- f.pod.Do(func() error { return f.connectUntil(stop, stream, &calls) }) })
	}
	for range 10 {
		seen := calls.Load()
		f.maps = f.open(pin.Sizes{})
		f.attach()
		for end := time.Now().Add(10 * time.Second); calls.Load() < seen+20 && len(errs) == 0; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatal("connects hang")
			}
		}
	}
	close(stop)
	loops.Wait()
	for range 2 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	after, newer := f.links()
	if !maps.Equal(links, after) {
		t.Errorf("links %v became %v", links, after)
	}
	for name, id := range programs {
		if newer[name] == id {
			t.Errorf("%s still has its old program", name)
		}
	}
	if got := old.peer(); got != dgram.front {
		t.Errorf("peer of the old socket %s, want %s", got, dgram.front)
	}
	f.must(old.send())
	old.answer(dgram.front)
}

// connectUntil connects again and again; the first error ends it.
func (f *fixture) connectUntil(stop chan struct{}, svc *service, calls *atomic.Int64) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		s := socket{fd: fd, proto: tcp}
		err = s.connect(svc.front)
		if err == nil {
			sa, _ := unix.Getpeername(fd)
			if got := addrPort(sa); got != svc.front {
				err = fmt.Errorf("peer %s, want %s", got, svc.front)
			}
		}
		s.close()
		if err != nil {
			return fmt.Errorf("connect after %d calls: %w", calls.Load(), err)
		}
		calls.Add(1)
	}
}

// TestAnotherCgroup: an agent with another cgroup leaves nothing on the first.
func TestAnotherCgroup(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	before, _ := f.links()
	first := f.cgroup
	f.cgroup = filepath.Join(first, "below")
	f.must(os.Mkdir(f.cgroup, 0o755))
	defer func() { f.must(os.Remove(f.cgroup)) }()
	f.attach()
	after, _ := f.links()
	for name, id := range before {
		if after[name] == 0 || after[name] == id {
			t.Errorf("%s: link %d became %d", name, id, after[name])
		}
	}
	// this process is in the first
	front := f.service(tcp, "127.0.9.9:80").front
	f.serve("127.0.9.9:80")
	if said := f.dial(false, front); said != front.String() {
		t.Errorf("server %s, want %s", said, front)
	}
	f.must(Detach(f.maps))
	if left, _ := f.links(); len(left) != 0 {
		t.Errorf("links left: %v", left)
	}
}
