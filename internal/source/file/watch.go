// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

// watch tells when a folder may have changed. Beside the folder it watches its
// parent, or the nearest folder above that exists, to see the folder appear or
// be replaced.
type watch struct {
	folder string
	notify *fsnotify.Watcher
	armed  os.FileInfo // of the folder that is watched; nil if none is
	above  string      // folder above that is watched
}

func newWatch(folder string) (*watch, error) {
	n, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return &watch{folder: folder, notify: n}, nil
}

func (w *watch) close() { _ = w.notify.Close() } // nothing is lost with it

// arm watches what the paths name now. Call it before reading the folder, so
// that no change falls between.
func (w *watch) arm() error {
	return errors.Join(w.armAbove(), w.armFolder())
}

func (w *watch) armAbove() error {
	above := filepath.Dir(w.folder)
	for !isFolder(above) && above != filepath.Dir(above) {
		above = filepath.Dir(above)
	}
	if above == w.above && slices.Contains(w.notify.WatchList(), above) {
		return nil
	}
	if w.above != "" {
		w.forget(w.above)
	}
	w.above = above
	return w.notify.Add(above)
}

func (w *watch) armFolder() error {
	info, err := os.Stat(w.folder)
	if err != nil || !info.IsDir() {
		w.forget(w.folder)
		w.armed = nil
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	if w.armed != nil && os.SameFile(info, w.armed) && slices.Contains(w.notify.WatchList(), w.folder) {
		return nil
	}
	w.forget(w.folder)
	w.armed = info
	return w.notify.Add(w.folder)
}

// forget ends a watch that may have ended by itself.
func (w *watch) forget(path string) {
	if slices.Contains(w.notify.WatchList(), path) {
		_ = w.notify.Remove(path) // the only error is that it is gone
	}
}

func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// next returns true when the folder is to be read again: when a change is
// followed by quiet, at once when the generation changes (the writer is done),
// or when it was not read for long. It returns false when ctx ends.
func (w *watch) next(ctx context.Context) bool {
	wake := time.NewTimer(rescan)
	defer wake.Stop()
	var first time.Time
	for {
		select {
		case <-ctx.Done():
			return false
		case <-wake.C:
			return true
		case _, ok := <-w.notify.Errors: // events were lost
			if !ok {
				return false
			}
			return true
		case e, ok := <-w.notify.Events:
			if !ok {
				return false
			}
			if !w.concerns(e) {
				continue
			}
			if filepath.Base(e.Name) == generationFile {
				return true
			}
			if first.IsZero() {
				first = time.Now()
			}
			wake.Reset(min(quiet, max(0, longest-time.Since(first))))
		}
	}
}

// concerns is false for changes of attributes and for what is not on the way
// to the folder.
func (w *watch) concerns(e fsnotify.Event) bool {
	if e.Op == fsnotify.Chmod {
		return false
	}
	if filepath.Dir(e.Name) == w.folder || e.Name == w.folder {
		return true
	}
	rel, err := filepath.Rel(e.Name, w.folder)
	return err == nil && filepath.IsLocal(rel)
}
