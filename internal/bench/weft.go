// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// How endpoints of weft are changed.
const (
	byFile = "file" // a manifest is replaced, then the generation raised
	byRow  = "row"  // of the agent's table; it ends the reading of manifests
)

// perFile is how many services a manifest has.
const perFile = 20

// weft is weft's services on a node: a process with the agent's packages for
// them, in the node's network namespace.
type weft struct {
	fleet      fleet
	node       *node
	self       []string
	folder     string // of manifests
	pins       string
	generation uint64
	changed    map[int][]netip.Addr // endpoints that are not the fleet's, by service
	child      *child
}

func newWeft(self []string, f fleet, n *node) *weft {
	return &weft{
		fleet: f, node: n, self: self, changed: map[int][]netip.Addr{},
		folder: n.folder, pins: filepath.Join(sitePins(os.Getpid()), strconv.Itoa(int(f))),
	}
}

// start writes the manifests, and counts from the start of the process.
func (w *weft) start(ctx context.Context) (_ time.Duration, err error) {
	if err := w.writeNode(); err != nil {
		return 0, err
	}
	for i := 0; i < int(w.fleet); i += perFile {
		if err := w.writeFile(i / perFile); err != nil {
			return 0, err
		}
	}
	if err := w.raise(); err != nil {
		return 0, err
	}
	began := monotonic()
	w.child, err = startIn(ctx, w.self, "node", w.node.router, w.node.other, nodeTask{
		Folder: w.folder, Pins: w.pins, Cgroup: w.node.pod, Node: w.node.address, Services: int(w.fleet), Generation: w.generation,
	})
	return began, err
}

// writeNode writes the Node that the process is.
func (w *weft) writeNode() error {
	n := corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: nodeName},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{w.node.pods.String()}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: w.node.address.String()}}},
	}
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return replaceFile(filepath.Join(w.folder, "node.json"), b)
}

// writeFile writes manifest number f: perFile services with their slices.
func (w *weft) writeFile(f int) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	for i := f * perFile; i < min(int(w.fleet), (f+1)*perFile); i++ {
		endpoints := w.fleet.endpoints(i)
		if c := w.changed[i]; c != nil {
			endpoints = c
		}
		if err := errors.Join(e.Encode(w.fleet.service(i)), e.Encode(w.fleet.slice(i, endpoints))); err != nil {
			return err
		}
	}
	return replaceFile(filepath.Join(w.folder, fmt.Sprintf("services%05d.json", f)), b.Bytes())
}

// raise tells the process that the manifests are complete.
func (w *weft) raise() error {
	w.generation++
	return replaceFile(filepath.Join(w.folder, "generation"), strconv.AppendUint(nil, w.generation, 10))
}

// replaceFile never shows half a file.
func replaceFile(path string, b []byte) error {
	folder, name := filepath.Split(path)
	aside := filepath.Join(folder, "."+name)
	if err := os.WriteFile(aside, b, 0o600); err != nil {
		return err
	}
	return os.Rename(aside, path)
}

// tell gives the process an order and returns its answer.
func (w *weft) tell(o order) (answer, error) {
	var a answer
	line, err := json.Marshal(o)
	if err != nil {
		return a, err
	}
	if _, err := fmt.Fprintf(w.child.in, "%s\n", line); err != nil {
		return a, fmt.Errorf("weft's process: %w: %s", err, w.log())
	}
	line, err = w.child.out.ReadBytes('\n')
	if err != nil {
		return a, fmt.Errorf("weft's process is gone: %w", err)
	}
	if err := json.Unmarshal(line, &a); err != nil {
		return a, err
	}
	if a.Error != "" {
		return a, errors.New(a.Error)
	}
	return a, nil
}

func (w *weft) synced(context.Context) (float64, error) {
	a, err := w.tell(order{Do: doSynced})
	return a.Seconds, err
}

func (w *weft) memory(context.Context) (*Memory, error) {
	a, err := w.tell(order{Do: doMemory})
	return a.Memory, err
}

func (*weft) ways() []string { return []string{byFile, byRow} }

func (w *weft) change(_ context.Context, way string, i int, endpoints []netip.Addr) (time.Duration, error) {
	if way == byRow {
		a, err := w.tell(order{Do: doChange, Service: i, Endpoints: endpoints})
		return a.At, err
	}
	w.changed[i] = endpoints
	began := monotonic()
	return began, errors.Join(w.writeFile(i/perFile), w.raise())
}

func (w *weft) log() string {
	if w.child == nil {
		return ""
	}
	b := w.child.stderr.Bytes()
	return string(b[max(0, len(b)-2000):])
}

// stop ends the process; programs and maps are pinned.
func (w *weft) stop() error {
	if w.child != nil {
		w.child.kill()
	}
	return nil
}

// remove takes the programs away. The site removes maps and files.
func (w *weft) remove() error { return detachServices(w.pins) }
