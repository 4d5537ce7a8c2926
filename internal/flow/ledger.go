// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"maps"
	"time"

	"github.com/weft-mesh/weft/internal/datapath/event"
)

// A ledger knows, for each CPU, which events are accounted for: delivered or
// reported as lost. Every event is accounted for exactly once, so that at any
// time, for each CPU,
//
//	delivered + lost = next
//
// where next is the sequence number that is expected. Three things move next:
//
//  1. An event with that number (delivered), or a later one (the numbers in
//     between are lost).
//  2. The ring was seen empty after the counters were read: what the counters
//     have counted and the ring did not deliver is lost.
//  3. The ring is never empty, but an event came that was numbered after the
//     second of two readings of the counters. The ring is first in, first
//     out, so what the first reading has counted and the ring did not deliver
//     is lost. It takes two readings because the rows of one reading are not
//     taken at the same moment.
//
// An event whose number is below next was reported as lost already (or is a
// duplicate); it is refused, so that the sum stays exact.
//
// Not safe for concurrent use.
type ledger struct {
	cpus map[uint32]*account
	// older and newer are the last two readings of the counters: events made
	// for each CPU. Nil before there were so many.
	older, newer map[uint32]uint64
	gaps         []gap // returned by the last call; reused by the next
}

// account is the state of one CPU.
type account struct {
	next uint64    // all events below are accounted for
	last time.Time // of the newest event delivered; zero before the first
}

// gap is a run of events of one CPU that nobody will deliver.
type gap struct {
	cpu   uint32
	count uint64
	// from is the time of the last event before the gap, zero when there was
	// none; to is the time of the event after it, or when it was noticed.
	from, to time.Time
}

// newLedger starts where acknowledged says (the next sequence number of each
// CPU; 0 for a CPU that is not in it). A CPU that has acknowledged more than
// was ever made is from before the maps were made anew, and starts at 0.
func newLedger(acknowledged map[uint32]uint64, rows []event.Counters) *ledger {
	l := &ledger{cpus: make(map[uint32]*account, len(rows))}
	for _, r := range rows {
		next := acknowledged[r.CPU]
		if next > r.Generated {
			next = 0
		}
		l.cpus[r.CPU] = &account{next: next}
	}
	l.read(rows)
	return l
}

func (l *ledger) cpu(n uint32) *account {
	a := l.cpus[n]
	if a == nil {
		a = &account{}
		l.cpus[n] = a
	}
	return a
}

// read takes a reading of the counters.
func (l *ledger) read(rows []event.Counters) {
	m := l.older
	if m == nil {
		m = make(map[uint32]uint64, len(rows))
	}
	for _, r := range rows {
		m[r.CPU] = r.Generated
	}
	l.older, l.newer = l.newer, m
}

// event accounts for an event that came. It returns the gaps in front of it,
// valid until the next call, and whether the event is to be delivered.
func (l *ledger) event(cpu uint32, sequence uint64, at time.Time) ([]gap, bool) {
	l.gaps = l.gaps[:0]
	if l.older != nil && sequence >= l.newer[cpu] {
		l.settle(l.older, at)
		l.older = nil
	}
	a := l.cpu(cpu)
	if sequence < a.next {
		return l.gaps, false
	}
	l.lose(cpu, a, sequence, at)
	a.next, a.last = sequence+1, at
	return l.gaps, true
}

// drained accounts for a ring that was seen empty after the last reading. It
// returns the gaps at this place, valid until the next call.
func (l *ledger) drained(now time.Time) []gap {
	l.gaps = l.gaps[:0]
	l.settle(l.newer, now)
	l.older = nil
	return l.gaps
}

func (l *ledger) settle(made map[uint32]uint64, at time.Time) {
	for cpu, n := range made {
		l.lose(cpu, l.cpu(cpu), n, at)
	}
}

// lose moves next up to n.
func (l *ledger) lose(cpu uint32, a *account, n uint64, at time.Time) {
	if n <= a.next {
		return
	}
	l.gaps = append(l.gaps, gap{cpu: cpu, count: n - a.next, from: a.last, to: at})
	a.next = n
}

// acknowledged returns what newLedger takes.
func (l *ledger) acknowledged() map[uint32]uint64 {
	m := make(map[uint32]uint64, len(l.cpus))
	for cpu, a := range maps.All(l.cpus) {
		m[cpu] = a.next
	}
	return m
}
