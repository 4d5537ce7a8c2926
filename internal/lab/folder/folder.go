// SPDX-License-Identifier: Apache-2.0

// Package folder writes a cluster as a folder of manifests: one file an object,
// and the file "generation", which holds a number that grows after everything
// else was written. Who has read generation g and then the manifests has at
// least the state of g.
package folder

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/weft-mesh/weft/internal/lab/model"
)

// generationFile holds the generation as a decimal number.
const generationFile = "generation"

// Writer writes one folder. It must be the only one, and is not safe for use by
// several goroutines.
type Writer struct {
	dir, tmp   string
	written    map[string][]byte // content by file name
	generation uint64
}

// New makes the folder dir, which must not hold anything. Files are first
// written to the folder tmp, on the same file system, so that a reader never
// sees half of one.
func New(dir, tmp string) (*Writer, error) {
	for _, d := range []string{dir, tmp} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, fmt.Errorf("make the cluster folder: %w", err)
		}
	}
	w := &Writer{dir: dir, tmp: tmp, written: map[string][]byte{}}
	return w, w.replace(generationFile, []byte("0\n"))
}

// Generation is the number that was written last.
func (w *Writer) Generation() uint64 { return w.generation }

// Sync makes the folder hold exactly these objects and returns its generation,
// which is a new one if anything changed.
func (w *Writer) Sync(objects []model.Object) (uint64, error) {
	want := make(map[string][]byte, len(objects))
	for _, o := range objects {
		b, err := encode(o)
		if err != nil {
			return w.generation, fmt.Errorf("encode %s %s/%s: %w", kindOf(o), o.GetNamespace(), o.GetName(), err)
		}
		want[fileName(o)] = b
	}
	changed := false
	for name, b := range want {
		if bytes.Equal(w.written[name], b) {
			continue
		}
		if err := w.replace(name, b); err != nil {
			return w.generation, err
		}
		w.written[name], changed = b, true
	}
	for name := range w.written {
		if _, ok := want[name]; ok {
			continue
		}
		if err := os.Remove(filepath.Join(w.dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return w.generation, fmt.Errorf("remove a manifest: %w", err)
		}
		delete(w.written, name)
		changed = true
	}
	if !changed {
		return w.generation, nil
	}
	next := w.generation + 1
	if err := w.replace(generationFile, []byte(strconv.FormatUint(next, 10)+"\n")); err != nil {
		return w.generation, err
	}
	w.generation = next
	return next, nil
}

func (w *Writer) replace(name string, b []byte) error {
	tmp := filepath.Join(w.tmp, name)
	if err := os.WriteFile(tmp, b, 0o644); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := os.Rename(tmp, filepath.Join(w.dir, name)); err != nil {
		return fmt.Errorf("move %s into the cluster folder: %w", name, err)
	}
	return nil
}

// encode writes an object without a status that says nothing.
func encode(o model.Object) ([]byte, error) {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return nil, err
	}
	if status, ok := m["status"].(map[string]any); ok && len(status) == 0 {
		delete(m, "status")
	}
	return yaml.Marshal(m)
}

func kindOf(o model.Object) string { return o.GetObjectKind().GroupVersionKind().Kind }

// fileName is unique for an object: "_" is in no part of it.
func fileName(o model.Object) string {
	gvk := o.GetObjectKind().GroupVersionKind()
	parts := []string{strings.ToLower(gvk.Kind), gvk.Group, o.GetNamespace(), o.GetName()}
	return strings.Join(parts, "_") + ".yaml"
}
