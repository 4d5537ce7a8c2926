// SPDX-License-Identifier: Apache-2.0

// Package logfile keeps the output of a process in a file of bounded size.
package logfile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// DefaultLimit is the size, in bytes, at which a log is cut: the file moves to
// NAME.1 and a new one begins, so that at most twice as much is kept.
const DefaultLimit = 4 << 20

// Writer is a log of bounded size. It may be used by several goroutines.
type Writer struct {
	path  string
	limit int64

	mu   sync.Mutex
	file *os.File // protected by mu
	size int64    // protected by mu
}

// Open appends to the log at path.
func Open(path string, limit int64) (*Writer, error) {
	w := &Writer{path: path, limit: limit}
	return w, w.open()
}

func (w *Writer) open() error {
	f, err := os.OpenFile(w.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return fmt.Errorf("open log: %w", err)
	}
	w.file, w.size = f, info.Size()
	return nil
}

// Write appends p, in a new file where the old one would grow over the limit.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		return 0, os.ErrClosed
	}
	if w.size > 0 && w.size+int64(len(p)) > w.limit {
		if err := w.rotate(); err != nil {
			return 0, err
		}
	}
	n, err := w.file.Write(p)
	w.size += int64(n)
	return n, err
}

func (w *Writer) rotate() error {
	w.file.Close()
	w.file = nil
	if err := os.Rename(w.path, w.path+".1"); err != nil {
		return fmt.Errorf("cut log: %w", err)
	}
	return w.open()
}

// Close ends the log; later writes fail.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.file == nil {
		return nil
	}
	err := w.file.Close()
	w.file = nil
	return err
}

// Tail returns the last n lines of the log at path; a log that is not there is
// empty.
func Tail(path string, n int) []string {
	b, err := os.ReadFile(path)
	if err != nil || len(b) == 0 {
		return nil
	}
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return lines
}

// Copy writes the whole log at path to out, what was cut off last included;
// with follow it goes on until ctx ends.
func Copy(ctx context.Context, out io.Writer, path string, follow bool) error {
	if err := copyFile(out, path+".1"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read log: %w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("read log: %w", err)
	}
	defer func() { f.Close() }()
	for {
		if _, err := io.Copy(out, f); err != nil {
			return fmt.Errorf("read log: %w", err)
		}
		if !follow {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(100 * time.Millisecond):
		}
		if next := replaced(f, path); next != nil {
			io.Copy(out, f)
			f.Close()
			f = next
		}
	}
}

func copyFile(out io.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(out, f)
	return err
}

// replaced returns the file that is at path now, if it is another one than f.
func replaced(f *os.File, path string) *os.File {
	old, err := f.Stat()
	if err != nil {
		return nil
	}
	now, err := os.Stat(path)
	if err != nil || os.SameFile(old, now) {
		return nil
	}
	next, err := os.Open(path)
	if err != nil {
		return nil
	}
	return next
}
