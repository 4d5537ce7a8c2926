// SPDX-License-Identifier: Apache-2.0

// Package tombstone keeps notes about interfaces that a runtime deleted while
// no agent listened: the CNI plugin leaves one, the agent carries it out. It is
// apart from both so that the plugin does not grow by what the agent needs.
package tombstone

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// folder below the plugin's stateDir.
const folder = "del"

// Tombstone is one deletion that the agent has to carry out.
type Tombstone struct {
	ContainerID string `json:"containerID"`
	Interface   string `json:"interface"`
	Network     string `json:"network,omitempty"`
	Netns       string `json:"netns,omitempty"`
}

func (t *Tombstone) name() string { return t.ContainerID + "-" + t.Interface }

// validate keeps the file in its folder: neither part may be a path.
func (t *Tombstone) validate() error {
	for _, s := range []string{t.ContainerID, t.Interface} {
		if s == "" || strings.HasPrefix(s, ".") || strings.ContainsRune(s, '/') {
			return fmt.Errorf("tombstone of container %q, interface %q: want names without a slash", t.ContainerID, t.Interface)
		}
	}
	return nil
}

// Write leaves t below stateDir, whole or not at all. It may be repeated.
func Write(stateDir string, t Tombstone) (err error) {
	if err := t.validate(); err != nil {
		return err
	}
	b, err := json.Marshal(t)
	if err != nil {
		return fmt.Errorf("encode tombstone: %w", err)
	}
	dir := filepath.Join(stateDir, folder)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create folder of tombstones: %w", err)
	}
	f, err := os.CreateTemp(dir, ".")
	if err != nil {
		return fmt.Errorf("create tombstone: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write tombstone: %w", err)
	}
	if err := os.Rename(f.Name(), filepath.Join(dir, t.name())); err != nil {
		return fmt.Errorf("put tombstone in place: %w", err)
	}
	return nil
}

// Remove takes t away; one that is absent is no error.
func Remove(stateDir string, t Tombstone) error {
	if err := t.validate(); err != nil {
		return err
	}
	err := os.Remove(filepath.Join(stateDir, folder, t.name()))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove tombstone: %w", err)
	}
	return nil
}

// Exists says whether there is a tombstone for an interface of a container.
func Exists(stateDir string, t Tombstone) (bool, error) {
	if err := t.validate(); err != nil {
		return false, err
	}
	_, err := os.Lstat(filepath.Join(stateDir, folder, t.name()))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("look for a tombstone: %w", err)
	}
	return err == nil, nil
}

// List returns every tombstone. What cannot be read is left out and named in
// the error.
func List(stateDir string) ([]Tombstone, error) {
	dir := filepath.Join(stateDir, folder)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list tombstones: %w", err)
	}
	var out []Tombstone
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		t, err := read(filepath.Join(dir, e.Name()))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			errs = append(errs, err)
		default:
			out = append(out, t)
		}
	}
	return out, errors.Join(errs...)
}

func read(path string) (Tombstone, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return Tombstone{}, fmt.Errorf("read tombstone: %w", err)
	}
	var t Tombstone
	if err := json.Unmarshal(b, &t); err != nil {
		return Tombstone{}, fmt.Errorf("tombstone %s: %w", path, err)
	}
	if t.name() != filepath.Base(path) {
		return Tombstone{}, fmt.Errorf("tombstone %s is about %s", path, t.name())
	}
	return t, t.validate()
}
