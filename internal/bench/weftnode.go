// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/weft-mesh/weft/internal/datapath/lb"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/source/file"
	"github.com/weft-mesh/weft/internal/state"
)

const nodeName = "node1"

// nodeTask is what the process of a node with weft is told.
type nodeTask struct {
	Folder     string     `json:"folder"`
	Pins       string     `json:"pins"`
	Cgroup     string     `json:"cgroup"`
	Node       netip.Addr `json:"node"`
	Services   int        `json:"services"`
	Generation uint64     `json:"generation"` // of the manifests
}

// order is what it is asked, a line of JSON each; answer is one as well.
type order struct {
	Do        string       `json:"do"`
	Service   int          `json:"service,omitempty"`
	Endpoints []netip.Addr `json:"endpoints,omitempty"`
}

const (
	doSynced = "synced"
	doMemory = "memory"
	doChange = "change"
)

type answer struct {
	At      time.Duration `json:"at_ns,omitempty"`
	Seconds float64       `json:"seconds,omitempty"`
	Memory  *Memory       `json:"memory,omitempty"`
	Error   string        `json:"error,omitempty"`
}

// weftNode is the process: source of manifests, tables, driver of services, and
// the programs at sockets.
type weftNode struct {
	task   nodeTask
	maps   *pin.Maps
	tables *state.Tables
	// endSource ends the reading of manifests.
	endSource func() error
	synced    float64
	before    uint64 // bytes of the maps, empty
	heap      uint64 // with the tables alone
}

// processNode serves orders until its input ends.
func processNode(text string, in io.Reader, out, errs io.Writer) error {
	var task nodeTask
	if err := json.Unmarshal([]byte(text), &task); err != nil {
		return fmt.Errorf("task: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	n, err := startNode(ctx, task, slog.New(slog.NewTextHandler(errs, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err != nil {
		return err
	}
	defer n.maps.Close()
	lines, answers := bufio.NewScanner(in), json.NewEncoder(out)
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return fmt.Errorf("order: %w", err)
		}
		a, err := n.obey(o)
		if err != nil {
			a.Error = err.Error()
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
	return lines.Err()
}

// sizes are an agent's for services, with room for the fleet; the other maps
// are as small as they can be.
func (t nodeTask) sizes() pin.Sizes {
	const few = 1024
	s := pin.Sizes{Endpoints: few, IPCache: few, Conntrack: few, NAT: few, Policy: few, Classes: few, Events: 256 << 10}
	if t.Services > 100_000 {
		s.Services, s.Slots, s.Backends = 2*t.Services, 4*t.Services, 4*t.Services
	}
	return s
}

func startNode(ctx context.Context, task nodeTask, log *slog.Logger) (_ *weftNode, err error) {
	n := &weftNode{task: task}
	if n.maps, err = pin.Open(task.Pins, task.sizes()); err != nil {
		return nil, fmt.Errorf("open maps: %w", err)
	}
	if n.before, err = mapBytes(); err != nil {
		return nil, err
	}
	programs, err := lb.Load(n.maps, setting.Node{IPv4: task.Node})
	if err != nil {
		return nil, err
	}
	defer programs.Close()
	if err := programs.Attach(task.Cgroup); err != nil {
		return nil, err
	}
	if n.tables, err = state.New(); err != nil {
		return nil, err
	}
	return n, n.run(ctx, log)
}

// run fills the tables from the manifests, then the maps from the tables.
func (n *weftNode) run(ctx context.Context, log *slog.Logger) error {
	source, err := file.New(file.Config{Folder: n.task.Folder}, n.tables, log)
	if err != nil {
		return err
	}
	reading, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- source.Run(reading) }()
	n.endSource = func() error {
		stop()
		err := <-ended
		ended <- err
		return err
	}
	if err := source.Wait(ctx, n.task.Generation); err != nil {
		return err
	}
	n.heap = liveHeap()
	began := time.Now()
	if err := followServices(ctx, n.maps, n.tables, log); err != nil {
		return err
	}
	n.synced = time.Since(began).Seconds()
	return nil
}

func (n *weftNode) obey(o order) (answer, error) {
	switch o.Do {
	case doSynced:
		return answer{Seconds: n.synced}, nil
	case doMemory:
		m, err := n.memory()
		return answer{Memory: m}, err
	case doChange:
		if err := n.endSource(); err != nil { // it would put the manifest's row back
			return answer{}, err
		}
		row := fleet(n.task.Services).sliceRow(o.Service, o.Endpoints)
		at := monotonic()
		txn := n.tables.DB.WriteTxn(n.tables.Endpoints)
		_, _, err := n.tables.Endpoints.Insert(txn, row)
		txn.Commit()
		return answer{At: at}, err
	}
	return answer{}, fmt.Errorf("order %q: not known", o.Do)
}

// memory is of the whole process, and of what the entries of services take.
func (n *weftNode) memory() (*Memory, error) {
	now, err := mapBytes()
	if err != nil {
		return nil, err
	}
	return &Memory{Tables: n.heap, Heap: liveHeap(), Kernel: now - n.before, KernelEmpty: n.before}, nil
}

func liveHeap() uint64 {
	runtime.GC()
	runtime.GC() // what finalizers of the first let go of
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// mapBytes is the memory of all BPF maps that this process has open, as the
// kernel tells in fdinfo.
func mapBytes() (uint64, error) {
	const folder = "/proc/self/fdinfo"
	entries, err := os.ReadDir(folder)
	if err != nil {
		return 0, err
	}
	byID := map[string]uint64{}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(folder, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // such as that of the folder itself
		}
		if err != nil {
			return 0, err
		}
		if id, size, ok := parseMapInfo(text); ok {
			byID[id] = size
		}
	}
	var sum uint64
	for _, size := range byID {
		sum += size
	}
	return sum, nil
}

// parseMapInfo reads what fdinfo says of a map; ok is false for other files.
func parseMapInfo(text []byte) (id string, size uint64, ok bool) {
	for line := range bytes.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(string(line)), ":")
		value = strings.TrimSpace(value)
		switch key {
		case "map_id":
			id = value
		case "memlock":
			size, _ = strconv.ParseUint(value, 10, 64)
		}
	}
	return id, size, id != ""
}

// detachServices takes the programs at sockets out of force.
func detachServices(pins string) error {
	if _, err := os.Stat(pins); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	maps, err := pin.Open(pins, pin.Sizes{})
	if err != nil {
		return err
	}
	return errors.Join(lb.Detach(maps), maps.Close())
}
