// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// version of the file's layout.
const version = 1

// compactSlack is how many lines of the file may be out of date beyond a
// multiple of those that are not.
const compactSlack = 4096

// header is the first line of the file.
type header struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
}

// record is any later line; exactly one of Set, Delete and Free is there.
type record struct {
	Set    *Allocation   `json:"set,omitempty"`
	Delete *Key          `json:"delete,omitempty"`
	Free   netip.Addr    `json:"free,omitzero"`
	At     time.Duration `json:"at,omitempty"` // of Delete and Free, in nanoseconds since boot
}

func (r *record) valid() bool { return r.Set != nil || r.Delete != nil || r.Free.IsValid() }

// journal is the file. It is protected by Pool.mu.
type journal struct {
	path  string
	boot  string
	lock  *os.File
	f     *os.File // nil until the first rewrite
	size  int64    // of what was written in whole
	lines int      // since the last rewrite, those of the rewrite included
}

func openJournal(path, boot string) (*journal, error) {
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of the address file: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("lock %s: %w (is another agent running with this folder?)", lock.Name(), err)
	}
	return &journal{path: path, boot: boot, lock: lock}, nil
}

func (j *journal) close() error {
	var err error
	if j.f != nil {
		err = j.f.Close()
	}
	return errors.Join(err, j.lock.Close())
}

// read calls apply for each record. It says whether the file is of this boot,
// and, where its end is torn, how. After a crash of the agent only the last
// line can be torn, one that nobody was told of; after a crash of the kernel
// all that was appended may be lost, which does not matter on another boot.
// Anything else that cannot be read is an error: guessing would give an
// address twice.
func (j *journal) read(apply func(record)) (sameBoot bool, torn string, err error) {
	b, err := os.ReadFile(j.path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(b) == 0 {
		return true, "", nil
	}
	if err != nil {
		return false, "", fmt.Errorf("read the address file: %w", err)
	}
	first, rest, _ := bytes.Cut(b, []byte{'\n'})
	var h header
	if err := json.Unmarshal(first, &h); err != nil {
		return false, "", j.corrupt(1, err)
	}
	if h.Version != version {
		return false, "", fmt.Errorf("address file %s has version %d: this agent knows %d", j.path, h.Version, version)
	}
	sameBoot = h.Boot == j.boot
	for n := 2; len(rest) > 0; n++ {
		line, next, whole := bytes.Cut(rest, []byte{'\n'})
		if !whole {
			return sameBoot, fmt.Sprintf("line %d has no end", n), nil
		}
		var r record
		err := json.Unmarshal(line, &r)
		if err == nil && !r.valid() {
			err = errors.New("neither set, delete nor free")
		}
		if err != nil && sameBoot {
			return false, "", j.corrupt(n, err)
		}
		if err != nil {
			return false, fmt.Sprintf("line %d: %v", n, err), nil
		}
		apply(r)
		rest = next
	}
	return sameBoot, "", nil
}

func (j *journal) corrupt(line int, err error) error {
	return fmt.Errorf("address file %s, line %d: %w (remove the file once no pod runs on this node)", j.path, line, err)
}

// append writes r in whole, or leaves the file as it was.
func (j *journal) append(r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode a line of the address file: %w", err)
	}
	if _, err := j.f.WriteAt(append(b, '\n'), j.size); err != nil {
		err = fmt.Errorf("append to the address file: %w", err)
		return errors.Join(err, j.f.Truncate(j.size))
	}
	j.size += int64(len(b)) + 1
	j.lines++
	return nil
}

// rewrite puts a new file in place that has records alone.
func (j *journal) rewrite(records []record) (err error) {
	b, err := j.encode(records)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(j.path), "."+filepath.Base(j.path)+".")
	if err != nil {
		return fmt.Errorf("create a new address file: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	if _, err := f.Write(b); err != nil {
		return fmt.Errorf("write a new address file: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync the new address file: %w", err)
	}
	if err := os.Rename(f.Name(), j.path); err != nil {
		return fmt.Errorf("put the new address file in place: %w", err)
	}
	old := j.f
	j.f, j.size, j.lines = f, int64(len(b)), len(records)+1
	if old != nil {
		_ = old.Close()
	}
	j.syncDir()
	return nil
}

func (j *journal) encode(records []record) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	if err := enc.Encode(header{Version: version, Boot: j.boot}); err != nil {
		return nil, fmt.Errorf("encode the address file: %w", err)
	}
	for _, r := range records {
		if err := enc.Encode(r); err != nil {
			return nil, fmt.Errorf("encode the address file: %w", err)
		}
	}
	return b.Bytes(), nil
}

// syncDir makes the rename last through a crash of the kernel. Without it the
// old file would be there, whose boot id is then as out of date as the new
// one's: so an error does no harm.
func (j *journal) syncDir() {
	if d, err := os.Open(filepath.Dir(j.path)); err == nil {
		_ = d.Sync()
		_ = d.Close()
	}
}
