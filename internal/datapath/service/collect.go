// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"slices"
)

// garbage is what nothing refers to any more, but a program that runs may.
type garbage struct {
	frontends []serviceKey // that could not be removed at once
	sets      []*set
	shrunk    []shrunk
	backends  []uint32
	members   []member
	ranges    []ownRange
	tables    []*set
}

// shrunk is a set that has no more than n backends since it was noted.
type shrunk struct {
	set *set
	n   int
}

func (g *garbage) empty() bool {
	return len(g.frontends)+len(g.sets)+len(g.shrunk)+len(g.backends)+len(g.members)+len(g.ranges)+len(g.tables) == 0
}

// Collect removes what changes left over, once no program can be using it. It
// takes as long as the kernel needs to say so, some milliseconds; Apply can be
// called meanwhile.
func (w *Writer) Collect() error {
	g := w.takeGarbage()
	if g.empty() {
		return nil
	}
	err := w.kernel.grace()
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.giveBack(g)
		return err
	}
	return w.collect(g)
}

// takeGarbage returns nothing while a frontend could not be switched away from
// it, and before Sweep, when those of an earlier agent may refer to it.
func (w *Writer) takeGarbage() garbage {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.adopted != nil {
		return garbage{}
	}
	for p := range w.failing {
		if p.stuck {
			return garbage{}
		}
	}
	g := w.garbage
	w.garbage = garbage{}
	return g
}

func (w *Writer) giveBack(g garbage) {
	to := &w.garbage
	to.frontends = append(g.frontends, to.frontends...)
	to.sets = append(g.sets, to.sets...)
	to.shrunk = append(g.shrunk, to.shrunk...)
	to.backends = append(g.backends, to.backends...)
	to.members = append(g.members, to.members...)
	to.ranges = append(g.ranges, to.ranges...)
	to.tables = append(g.tables, to.tables...)
}

func (w *Writer) collect(g garbage) error {
	var errs []error
	note := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("remove %s: %w", what, err))
		}
	}
	note("frontends", w.collectFrontends(g.frontends))
	for _, s := range g.sets {
		if s.members {
			g.members = appendMembers(g.members, s, s.slots)
			s.members = false
		}
		if s.table != 0 {
			g.tables = append(g.tables, s)
			w.setTable(s, 0)
		}
		g.shrunk = append(g.shrunk, shrunk{s, 0})
		s.slots = nil
	}
	// what a later change made use of again stays
	g.members = slices.DeleteFunc(g.members, func(m member) bool { return m.set.members && slices.Contains(m.set.slots, m.backend) })
	g.ranges = slices.DeleteFunc(g.ranges, func(r ownRange) bool {
		_, ok := slices.BinarySearchFunc(r.port.ranges, r.key, compareRanges)
		return ok
	})
	g.tables = slices.DeleteFunc(g.tables, func(s *set) bool { return s.table != 0 })
	note("members", w.removeMembers(g.members))
	note("source ranges", w.removeRanges(g.ranges))
	note("tables", w.collectTables(g.tables))
	note("slots", w.collectSlots(g.shrunk))
	n, err := w.kernel.backends.remove(g.backends)
	w.writes.Backends += uint64(n)
	w.garbage.backends = append(w.garbage.backends, g.backends[n:]...)
	note("backends", err)
	return errors.Join(errs...)
}

func (w *Writer) collectFrontends(keys []serviceKey) error {
	keys = slices.DeleteFunc(keys, func(k serviceKey) bool { return w.owners[k] != nil })
	n, err := w.kernel.services.remove(keys)
	w.writes.Services += uint64(n)
	for _, k := range keys[:n] {
		delete(w.inForce, k)
	}
	w.garbage.frontends = append(w.garbage.frontends, keys[n:]...)
	return err
}

func (w *Writer) collectTables(list []*set) error {
	ids := make([]uint32, 0, len(list))
	for _, s := range list {
		ids = append(ids, s.id)
	}
	n, err := w.kernel.maglev.remove(ids)
	w.writes.Tables += uint64(n)
	w.garbage.tables = append(w.garbage.tables, list[n:]...)
	return err
}

// collectSlots removes the slots beyond what each set had at most since it was
// noted, or has now.
func (w *Writer) collectSlots(list []shrunk) error {
	var keys []slotKey
	for _, g := range list {
		from := max(g.n, len(g.set.slots))
		for i := from; i < g.set.written; i++ {
			keys = append(keys, slotKey{Set: g.set.id, Slot: uint32(i)})
		}
		g.set.written = min(g.set.written, from)
	}
	n, err := w.kernel.slots.remove(keys)
	w.writes.Slots += uint64(n)
	for _, k := range keys[n:] {
		s := &set{id: k.Set, written: int(k.Slot) + 1}
		w.garbage.shrunk = append(w.garbage.shrunk, shrunk{s, int(k.Slot)})
	}
	return err
}

// Sweep removes what an earlier agent left and no service port took over. It is
// for after the first complete sync. It waits for running programs. The backends
// that it returns wait for Release, like those of an Outcome.
func (w *Writer) Sweep() ([]Left, error) {
	if err := w.sweepFrontends(); err != nil {
		return nil, err
	}
	w.mu.Lock()
	left := w.tellLeft()
	w.mu.Unlock()
	return left, w.Collect()
}

func (w *Writer) sweepFrontends() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.adopted == nil {
		return nil
	}
	var gone []serviceKey
	for k, f := range w.inForce {
		if f.port == nil {
			gone = append(gone, k)
		}
	}
	n, err := w.kernel.services.remove(gone)
	w.writes.Services += uint64(n)
	for _, k := range gone[:n] {
		delete(w.inForce, k)
	}
	if err != nil {
		return fmt.Errorf("remove frontends of services that are gone: %w", err)
	}
	w.leftovers()
	w.adopted = nil
	return nil
}
