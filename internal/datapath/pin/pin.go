// SPDX-License-Identifier: Apache-2.0

// Package pin owns what outlives the agent: the folder in the BPF file system
// with the maps that several objects share and the links of attached programs.
// It opens what an earlier agent left, migrates maps whose layout changed, and
// hands the maps to the packages that own the programs.
package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I../../../bpf/include -I../../../bpf" -type event -type reason -type ct_flag -type ipcache_flag -type event_type -type direction -type policy_verdict -type service_flag -type service_flow_flag -type socket_count Kernel ../../../bpf/maps.bpf.c

// mapPrefix is in front of the names of all shared maps; their pins lack it.
const mapPrefix = "weft_"

// Sizes of the shared maps. A zero field takes the default.
type Sizes struct {
	Endpoints int // addresses of local pods; default 8192, 64 bytes each
	IPCache   int // addresses and prefixes of the cluster; default 262144, about 96 bytes each, allocated when used
	Conntrack int // connections; default 262144, about 160 bytes each, allocated at start
	NAT       int // masqueraded connections; default 131072, about 112 bytes each, allocated at start
	Policy    int // entries of network policy; default 131072, about 96 bytes each, allocated when used
	Classes   int // prefixes that policies name; default 65536, about 80 bytes each, allocated when used
	// Of services; allocated when used, where nothing else is said.
	Services       int // frontends: address, port, protocol; default 131072, about 112 bytes each
	Slots          int // places of backends in sets; default 524288, about 72 bytes each
	Backends       int // of service ports; default 262144, about 96 bytes each
	Maglev         int // tables for clients from outside; default 16384, each of 8 bytes × its size
	Affinity       int // clients that stay with a backend; default 65536, about 96 bytes each, allocated at start
	Ranges         int // loadBalancerSourceRanges; default 65536, about 88 bytes each
	ServiceSockets int // connected UDP sockets; default 65536, about 72 bytes each
	ServiceFlows   int // halves of connections translated as packets; default 262144, about 160 bytes each
	Denied         int // networks on the deny list; default 16384, 16 bytes of each for each processor and about 64 when used
	Neighbors      int // nodes that XDP sends to; default 16384, about 64 bytes each when used
	Fragments      int // datagrams in fragments; default 8192, about 96 bytes each
	// Events is the size of the ring in bytes: a power of two of at least
	// 256 KiB; default 4 MiB.
	Events int
}

func (s Sizes) byMap() map[string]int {
	return map[string]int{
		"weft_endpoints":       s.Endpoints,
		"weft_quota":           s.Endpoints,
		"weft_ipcache":         s.IPCache,
		"weft_conntrack":       s.Conntrack,
		"weft_nat":             s.NAT,
		"weft_policy":          s.Policy,
		"weft_cidr":            s.Classes,
		"weft_services":        s.Services,
		"weft_slots":           s.Slots,
		"weft_backends":        s.Backends,
		"weft_members":         s.Backends,
		"weft_maglev":          s.Maglev,
		"weft_affinity":        s.Affinity,
		"weft_source_ranges":   s.Ranges,
		"weft_service_sockets": s.ServiceSockets,
		"weft_service_flows":   s.ServiceFlows,
		"weft_deny":            s.Denied,
		"weft_denied":          s.Denied,
		"weft_neighbors":       s.Neighbors,
		"weft_fragments":       s.Fragments,
		"weft_events":          s.Events,
	}
}

// Maps are the shared maps of one agent. Safe for concurrent use.
type Maps struct {
	dir        string
	maps       map[string]*ebpf.Map
	migrations []*migration
}

// Open makes dir (in a mounted BPF file system; it is mounted where it is not)
// and opens or creates every shared map in it. A map whose layout or size is
// another is copied into a new one by field names; FinishMigration completes
// that once the programs use the new maps.
func Open(dir string, sizes Sizes) (_ *Maps, err error) {
	if err := MountBPF(dir); err != nil {
		return nil, err
	}
	for _, d := range []string{dir, filepath.Join(dir, "maps"), filepath.Join(dir, "links")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("make pin folder: %w", err)
		}
	}
	spec, err := LoadKernel()
	if err != nil {
		return nil, fmt.Errorf("read map object: %w", err)
	}
	m := &Maps{dir: dir, maps: map[string]*ebpf.Map{}}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	for name, ms := range spec.Maps {
		if !strings.HasPrefix(name, mapPrefix) {
			continue
		}
		if n := sizes.byMap()[name]; n > 0 {
			ms.MaxEntries = uint32(n)
		}
		if err := m.open(name, ms); err != nil {
			return nil, fmt.Errorf("map %s: %w", name, err)
		}
	}
	return m, nil
}

func (m *Maps) path(name string) string {
	return filepath.Join(m.dir, "maps", strings.TrimPrefix(name, mapPrefix))
}

func (m *Maps) open(name string, spec *ebpf.MapSpec) error {
	path := m.path(name)
	old, err := ebpf.LoadPinnedMap(path, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		created, err := createPinned(spec, path)
		if err != nil {
			return err
		}
		m.maps[name] = created
		return nil
	case err != nil:
		return fmt.Errorf("open pinned map: %w", err)
	}
	same, err := sameLayout(old, spec)
	if err != nil {
		old.Close()
		return err
	}
	var mig *migration
	if same {
		m.maps[name] = old
		mig, err = resume(name, old, spec, path)
	} else if mig, err = migrate(name, old, spec, path); err == nil {
		m.maps[name] = mig.to
	} else {
		old.Close()
	}
	if err != nil {
		return fmt.Errorf("migrate to the new layout: %w", err)
	}
	if mig != nil {
		m.migrations = append(m.migrations, mig)
	}
	return nil
}

func createPinned(spec *ebpf.MapSpec, path string) (*ebpf.Map, error) {
	created, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create: %w", err)
	}
	if err := created.Pin(path); err != nil {
		created.Close()
		return nil, fmt.Errorf("pin: %w", err)
	}
	return created, nil
}

// Map returns a shared map by its name in C. It panics on a name that is none:
// names are constants of the datapath packages.
func (m *Maps) Map(name string) *ebpf.Map {
	if mp, ok := m.maps[name]; ok {
		return mp
	}
	panic("pin: no shared map " + name)
}

// Load loads spec with the shared maps in place of its own.
func (m *Maps) Load(spec *ebpf.CollectionSpec, into any) error {
	replace := map[string]*ebpf.Map{}
	for name, ms := range spec.Maps {
		shared, ok := m.maps[name]
		if !ok {
			continue
		}
		replace[name] = shared
		ms.MaxEntries = shared.MaxEntries()
	}
	err := spec.LoadAndAssign(into, &ebpf.CollectionOptions{MapReplacements: replace})
	if err != nil {
		return fmt.Errorf("load programs: %w", err)
	}
	return nil
}

// Close closes the maps; the pins stay.
func (m *Maps) Close() error {
	var errs []error
	for _, mig := range m.migrations {
		errs = append(errs, mig.from.Close())
	}
	for _, mp := range m.maps {
		errs = append(errs, mp.Close())
	}
	m.maps = nil
	m.migrations = nil
	return errors.Join(errs...)
}

// Fill is how full a map is.
type Fill struct {
	Name       string
	Entries    uint64
	MaxEntries uint64
}

// Fills counts the entries of every map that has a limit that traffic or the
// cluster can reach. It walks the maps, in batches.
func (m *Maps) Fills() ([]Fill, error) {
	var out []Fill
	for _, name := range []string{"weft_endpoints", "weft_ipcache", "weft_conntrack", "weft_nat", "weft_policy", "weft_cidr", "weft_fragments",
		"weft_services", "weft_slots", "weft_backends", "weft_members", "weft_affinity", "weft_source_ranges", "weft_service_sockets", "weft_service_flows"} {
		mp := m.Map(name)
		n, err := countKeys(mp)
		if err != nil {
			return nil, fmt.Errorf("count map %s: %w", name, err)
		}
		out = append(out, Fill{strings.TrimPrefix(name, mapPrefix), n, uint64(mp.MaxEntries())})
	}
	return out, nil
}

// batch is how many entries one system call reads.
const batch = 4096

func countKeys(mp *ebpf.Map) (n uint64, err error) {
	err = walkRaw(mp, func(_, _ []byte) error { n++; return nil })
	return n, err
}

// walkRaw calls f with every entry of a hash or trie. It reads in batches,
// which, other than key by key, ends properly while programs delete entries.
func walkRaw(mp *ebpf.Map, f func(key, value []byte) error) error {
	keys, values := rawSlice(mp.KeySize()), rawSlice(mp.ValueSize())
	var cursor ebpf.MapBatchCursor
	for {
		n, err := mp.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read a batch: %w", err)
		}
		for i := range n {
			if err := f(keys.Index(i).Bytes(), values.Index(i).Bytes()); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}

// rawSlice is a slice of batch arrays of size bytes: the library wants one
// element for each entry.
func rawSlice(size uint32) reflect.Value {
	element := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	return reflect.MakeSlice(reflect.SliceOf(element), batch, batch)
}

// bpfMagic is BPF_FS_MAGIC (include/uapi/linux/magic.h).
const bpfMagic = 0xcafe4a11

// MountBPF makes sure that dir will be in a BPF file system: where no existing
// parent of it is, one is mounted on /sys/fs/bpf.
func MountBPF(dir string) error {
	var st unix.Statfs_t
	for d := filepath.Clean(dir); ; d = filepath.Dir(d) {
		if err := unix.Statfs(d, &st); err == nil {
			break
		} else if !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("look at %s: %w", d, err)
		}
	}
	if uint32(st.Type) == bpfMagic {
		return nil
	}
	const mountPoint = "/sys/fs/bpf"
	if !strings.HasPrefix(filepath.Clean(dir)+"/", mountPoint+"/") {
		return fmt.Errorf("pinPath %s is not in a BPF file system: want a folder below %s, or below a mounted bpffs", dir, mountPoint)
	}
	if err := unix.Mount("bpf", mountPoint, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount the BPF file system on %s: %w", mountPoint, err)
	}
	return nil
}
