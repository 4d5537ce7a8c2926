// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	folderMode = 0o700
	socketMode = 0o600
	// aliveTimeout is how long an agent may take to accept a connection.
	aliveTimeout = time.Second
)

// socket is a listener that owns the path where it can be dialled.
type socket struct {
	*net.UnixListener
	path string
	lock *os.File
}

// listen makes a unix socket at path that only this user can dial. It takes
// the place of one that a dead agent left, and refuses to take that of one who
// is alive: of two agents that start at the same time, one gets the lock.
func listen(path string) (s *socket, err error) {
	if err := os.MkdirAll(filepath.Dir(path), folderMode); err != nil {
		return nil, fmt.Errorf("make the folder of the socket: %w", err)
	}
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unlock(lock)
		}
	}()
	if c, dialErr := net.DialTimeout("unix", path, aliveTimeout); dialErr == nil {
		c.Close()
		return nil, fmt.Errorf("another agent answers on %s", path)
	}
	l, err := listenAside(path)
	if err != nil {
		return nil, err
	}
	return &socket{UnixListener: l, path: path, lock: lock}, nil
}

// listenAside makes the socket under another name, where its mode is set
// before anyone can dial it, and renames it into place.
func listenAside(path string) (*net.UnixListener, error) {
	folder, err := os.MkdirTemp(filepath.Dir(path), ".")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the socket: %w", err)
	}
	defer os.RemoveAll(folder)
	// The name through the descriptor is short, whatever path is.
	d, err := os.Open(folder)
	if err != nil {
		return nil, fmt.Errorf("open the folder for the socket: %w", err)
	}
	defer d.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/s", d.Fd())})
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	aside := filepath.Join(folder, "s")
	if err := os.Chmod(aside, socketMode); err != nil {
		l.Close()
		return nil, fmt.Errorf("set the mode of the socket: %w", err)
	}
	if err := os.Rename(aside, path); err != nil {
		l.Close()
		return nil, fmt.Errorf("move the socket into place: %w", err)
	}
	return l, nil
}

// Close stops listening and removes the socket, but keeps the lock: another
// agent must not start while calls to this one are ending. Safe to call twice.
func (s *socket) Close() error {
	err := s.UnixListener.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	if rm := os.Remove(s.path); rm != nil && !errors.Is(rm, os.ErrNotExist) && err == nil {
		err = rm
	}
	return err
}

// release closes the socket and gives up the lock.
func (s *socket) release() {
	s.Close()
	unlock(s.lock)
}

// lockFile makes the file at path and locks it. It fails at once when another
// process has it.
func lockFile(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, fmt.Errorf("open the lock of the socket: %w", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("another agent holds %s", path)
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if stillAt(f, path) {
			return f, nil
		}
		f.Close() // its owner has removed it between the two calls
	}
}

func stillAt(f *os.File, path string) bool {
	a, errA := f.Stat()
	b, errB := os.Stat(path)
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// unlock removes the file, then gives up the lock.
func unlock(f *os.File) {
	os.Remove(f.Name())
	f.Close()
}
