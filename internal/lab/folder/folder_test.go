// SPDX-License-Identifier: Apache-2.0

package folder_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/weft-mesh/weft/internal/lab/folder"
	"github.com/weft-mesh/weft/internal/lab/model"
	"github.com/weft-mesh/weft/internal/source/manifest"
)

func pod(name, ip string) *corev1.Pod {
	p := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "a"}}},
	}
	if ip != "" {
		p.Status.PodIPs = []corev1.PodIP{{IP: ip}}
	}
	return p
}

// The generation grows with each change, and only then; what is written can be
// read by the strict decoder of the agents.
func TestSync(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cluster")
	w, err := folder.New(dir, filepath.Join(t.TempDir(), "tmp"))
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		name       string
		objects    []model.Object
		generation uint64
		files      int // beside generation
	}{
		{"nothing", nil, 0, 0},
		{"two pods", []model.Object{pod("a", ""), pod("b", "")}, 1, 2},
		{"no change", []model.Object{pod("b", ""), pod("a", "")}, 1, 2},
		{"an address", []model.Object{pod("a", "10.0.0.1"), pod("b", "")}, 2, 2},
		{"one gone", []model.Object{pod("b", "")}, 3, 1},
	} {
		got, err := w.Sync(step.objects)
		if err != nil || got != step.generation || w.Generation() != got {
			t.Errorf("%s: generation %d (%v): want %d", step.name, got, err, step.generation)
		}
		files, err := os.ReadDir(dir)
		if err != nil || len(files) != step.files+1 {
			t.Errorf("%s: files %v (%v): want %d", step.name, files, err, step.files+1)
		}
		for _, f := range files {
			b, err := os.ReadFile(filepath.Join(dir, f.Name()))
			if err != nil {
				t.Fatal(err)
			}
			if f.Name() == "generation" {
				if want := string('0' + rune(step.generation)); strings.TrimSpace(string(b)) != want {
					t.Errorf("%s: the file says generation %q: want %s", step.name, b, want)
				}
				continue
			}
			if objects, errs := manifest.Decode(f.Name(), b); len(errs) > 0 || len(objects) != 1 {
				t.Errorf("%s: %s: %v", step.name, f.Name(), errs)
			}
		}
	}
}
