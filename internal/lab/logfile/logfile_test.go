// SPDX-License-Identifier: Apache-2.0

package logfile_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weft-mesh/weft/internal/lab/logfile"
)

// A log never holds more than twice its limit, and its end is always there.
func TestBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, err := logfile.Open(path, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		fmt.Fprintf(w, "line %d\n", i)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	var all bytes.Buffer
	if err := logfile.Copy(context.Background(), &all, path, false); err != nil {
		t.Fatal(err)
	}
	if n := all.Len(); n > 2000 || n < 1000 {
		t.Errorf("%d bytes are kept", n)
	}
	if !strings.HasSuffix(all.String(), "line 998\nline 999\n") {
		t.Errorf("the end is %q", all.String()[all.Len()-30:])
	}
	if got := logfile.Tail(path, 2); len(got) != 2 || got[1] != "line 999" {
		t.Errorf("the last two lines are %q", got)
	}
	if _, err := w.Write([]byte("late")); err == nil {
		t.Error("a closed log takes more")
	}
	if got := logfile.Tail(path+".missing", 2); got != nil {
		t.Errorf("a log that is not there ends with %q", got)
	}
}

// Following does not miss a line when the log is cut.
func TestFollow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, err := logfile.Open(path, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	fmt.Fprintln(w, "first")
	read, write := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- logfile.Copy(ctx, write, path, true)
		write.Close()
	}()
	next := func(want string) {
		t.Helper()
		b := make([]byte, len(want)+1)
		if _, err := io.ReadFull(read, b); err != nil || string(b) != want+"\n" {
			t.Fatalf("read %q (%v): want %q", b, err, want)
		}
	}
	next("first")
	for i := range 5 {
		line := strings.Repeat(fmt.Sprint(i), 60) // each cuts the log
		fmt.Fprintln(w, line)
		next(line)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := os.Remove(path); err != nil {
		t.Error(err)
	}
}
