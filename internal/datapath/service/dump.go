// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Dump prints what the maps hold, a frontend, source range or leftover in each
// line, in order. Sets and backends appear as what they hold: numbers differ from
// run to run.
//
//	10.96.0.1:80/TCP shop/web:http/TCP near 10.244.1.2:8080 10.244.2.2:8080
//	172.30.0.1:30080/TCP shop/web:http/TCP external local affinity=10800s maglev=251 near 10.244.1.2:8080 10.244.2.2:8080 far 10.244.1.2:8080
//	range shop/web:http/TCP 10.0.0.0/8
//	unused backend 10.244.1.9:8080/TCP
func (w *Writer) Dump(to io.Writer) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	d := &dump{
		kernel: w.kernel, names: map[uint32]string{}, backends: map[uint32]string{}, slots: map[slotKey]uint32{},
		seen: map[slotKey]bool{}, used: map[uint32]bool{}, tables: map[uint32]bool{},
	}
	for _, p := range w.ports {
		d.names[p.id] = NameOf(p.name)
	}
	if err := d.read(); err != nil {
		return err
	}
	for _, part := range [][]string{d.frontends, d.ranges, d.leftovers()} {
		slices.Sort(part)
		for _, line := range part {
			if _, err := fmt.Fprintln(to, line); err != nil {
				return fmt.Errorf("print services: %w", err)
			}
		}
	}
	return nil
}

// dump is one reading of the maps.
type dump struct {
	kernel    *kernel
	names     map[uint32]string // of service ports
	backends  map[uint32]string
	slots     map[slotKey]uint32
	tables    map[uint32]bool
	seen      map[slotKey]bool // slots of sets
	used      map[uint32]bool  // backends in sets
	frontends []string
	ranges    []string
}

func (d *dump) read() error {
	err := d.kernel.backends.each(func(id *uint32, v *pin.KernelBackend) error {
		at := netip.AddrPortFrom(addrOf(v.Addr), networkOrder(v.Port))
		d.backends[*id] = at.String() + "/" + protocolName(v.Protocol)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list backends: %w", err)
	}
	if err := d.kernel.slots.each(func(k *slotKey, v *uint32) error { d.slots[*k] = *v; return nil }); err != nil {
		return fmt.Errorf("list slots: %w", err)
	}
	sets, err := d.kernel.maglev.sets()
	if err != nil {
		return fmt.Errorf("list Maglev tables: %w", err)
	}
	for _, id := range sets {
		d.tables[id] = true
	}
	err = d.kernel.services.each(func(k *serviceKey, v *pin.KernelService) error {
		d.frontends = append(d.frontends, d.frontend(k, v))
		return nil
	})
	if err != nil {
		return fmt.Errorf("list frontends: %w", err)
	}
	err = d.kernel.ranges.each(func(k *rangeKey, _ *uint8) error {
		d.ranges = append(d.ranges, fmt.Sprintf("range %s %s", d.name(k.Service), prefixOf(k)))
		return nil
	})
	if err != nil {
		return fmt.Errorf("list source ranges: %w", err)
	}
	return nil
}

func prefixOf(k *rangeKey) netip.Prefix {
	var b [16]byte
	for i, w := range k.Addr {
		putNativeWord(b[4*i:], w)
	}
	return addr.PrefixFrom16(b, int(k.Prefixlen)-32)
}

func (d *dump) name(id uint32) string {
	if n, ok := d.names[id]; ok {
		return n
	}
	return fmt.Sprintf("service %d", id)
}

func (d *dump) frontend(k *serviceKey, v *pin.KernelService) string {
	words := []string{fmt.Sprintf("%s/%s", frontendOf(k), protocolName(k.Protocol)), d.name(v.Id)}
	for _, f := range []struct {
		flag pin.KernelServiceFlag
		name string
	}{
		{pin.KernelServiceFlagSERVICE_EXTERNAL, "external"}, {pin.KernelServiceFlagSERVICE_LOCAL, "local"},
		{pin.KernelServiceFlagSERVICE_SOURCE_RANGES, "ranges"},
	} {
		if v.Flags&uint32(f.flag) != 0 {
			words = append(words, f.name)
		}
	}
	if v.Affinity != 0 {
		words = append(words, fmt.Sprintf("affinity=%ds", v.Affinity))
	}
	if v.Maglev != 0 {
		words = append(words, fmt.Sprintf("maglev=%d", v.Maglev))
		if !d.tables[v.Far.Id] {
			words = append(words, "(absent)")
		}
	}
	words = append(append(words, "near"), d.set(v.Near.Id, v.Near.Count)...)
	if v.Flags&uint32(pin.KernelServiceFlagSERVICE_EXTERNAL) != 0 {
		words = append(append(words, "far"), d.set(v.Far.Id, v.Far.Count)...)
	}
	return strings.Join(words, " ")
}

func (d *dump) set(id, count uint32) []string {
	if count == 0 {
		return []string{"-"}
	}
	var out []string
	for i := range count {
		k := slotKey{Set: id, Slot: i}
		d.seen[k] = true
		b, ok := d.slots[k]
		switch text := d.backends[b]; {
		case !ok:
			out = append(out, "(no slot)")
		case text == "":
			out = append(out, "(no backend)")
		default:
			d.used[b] = true
			out = append(out, text[:strings.LastIndex(text, "/")])
		}
	}
	slices.Sort(out)
	return out
}

// leftovers are what no frontend leads to.
func (d *dump) leftovers() []string {
	var out []string
	for id, text := range d.backends {
		if !d.used[id] {
			out = append(out, "unused backend "+text)
		}
	}
	n := len(d.slots)
	for k := range d.seen {
		if _, ok := d.slots[k]; ok {
			n--
		}
	}
	if n > 0 {
		out = append(out, fmt.Sprintf("unused slots: %d", n))
	}
	return out
}
