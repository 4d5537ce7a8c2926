// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"testing"
	"time"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/event"
	"github.com/weft-mesh/weft/internal/state"
)

// kernel is a model of the programs and the ring buffer. It makes events
// whenever step is called, as the random numbers have it, and stops after
// steps of them. Everything runs in the reader's goroutine, so a seed is one
// interleaving.
type kernel struct {
	rand     *rand.Rand
	capacity int
	burst    int // most events between two steps of the reader
	left     int // events still to be made
	ring     []event.Record
	made     []uint64
	lost     []uint64
	reads    int // of the reader until it is stopped; negative for no limit
	idle     int // times that the ring was seen empty after the last event
	clock    time.Time
	template event.Record
	// early makes events count before they are in the ring: the next step
	// puts them there.
	early    bool
	inFlight []event.Record
}

func newKernel(seed uint64, cpus, capacity, burst, events int) *kernel {
	return &kernel{
		rand: rand.New(rand.NewPCG(seed, 1)), capacity: capacity, burst: burst, left: events,
		made: make([]uint64, cpus), lost: make([]uint64, cpus), reads: -1,
		clock: time.Unix(1000, 0), template: tcpRecord(),
	}
}

// step makes some events, or none.
func (k *kernel) step() {
	for _, r := range k.inFlight {
		k.put(r)
	}
	k.inFlight = k.inFlight[:0]
	for n := k.rand.IntN(k.burst + 1); n > 0 && k.left > 0; n-- {
		k.left--
		cpu := k.rand.IntN(len(k.made))
		k.clock = k.clock.Add(time.Microsecond)
		r := k.template
		r.CPU, r.Sequence, r.Time = uint32(cpu), k.made[cpu], k.clock
		k.made[cpu]++
		if k.early {
			k.inFlight = append(k.inFlight, r)
		} else {
			k.put(r)
		}
	}
}

func (k *kernel) put(r event.Record) {
	if len(k.ring) < k.capacity {
		k.ring = append(k.ring, r)
	} else {
		k.lost[r.CPU]++
	}
}

func (k *kernel) Read(r *event.Record) error {
	if k.reads == 0 {
		return os.ErrClosed
	}
	k.reads--
	if !k.early || k.rand.IntN(2) == 0 {
		k.step()
	}
	if len(k.ring) == 0 {
		if k.left == 0 && len(k.inFlight) == 0 && k.reads < 0 {
			if k.idle++; k.idle > 4 {
				return os.ErrClosed
			}
		}
		k.step() // after the ring was seen empty, before the reader is told
		return os.ErrDeadlineExceeded
	}
	*r = k.ring[0]
	k.ring = k.ring[1:]
	k.step()
	return nil
}

// Counters reads the rows one after the other, with events in between.
func (k *kernel) Counters() ([]event.Counters, error) {
	var rows []event.Counters
	for cpu := range k.made {
		k.step()
		rows = append(rows, event.Counters{CPU: uint32(cpu), Generated: k.made[cpu], Lost: k.lost[cpu]})
	}
	return rows, nil
}

func (k *kernel) Close() error { return nil }

func tcpRecord() event.Record {
	return event.Record{
		Type: event.TypeNew, Direction: event.DirectionEgress, Protocol: 6, TCPFlags: 2,
		Source:      netip.MustParseAddrPort("10.244.1.5:40000"),
		Destination: netip.MustParseAddrPort("10.244.2.7:80"),
		Packets:     1, Bytes: 60, Ifindex: 7,
	}
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func config() Config {
	return Config{Node: "node1", Keep: 1 << 20, Queue: 16, MaxClients: 4, Logger: quiet(), SaveInterval: time.Nanosecond}
}

func newObserver(t testing.TB, cfg Config, src event.Source) *Observer {
	t.Helper()
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	o, err := New(cfg, tables, src)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// walk follows a stream of all flows and checks that each CPU's events are
// delivered or reported as lost once and in order: it returns the next number
// of each CPU. position is where the stream starts.
func walk(items []*weftv1.ObserveResponse, position map[uint32]uint64) error {
	for n, i := range items {
		if l := i.GetLost(); l != nil {
			if l.Count == 0 || l.Where != WhereKernelRing {
				return fmt.Errorf("item %d: %v", n, l)
			}
			position[l.Cpu] += l.Count
			continue
		}
		f := i.GetFlow()
		if f.Sequence != position[f.Cpu] {
			return fmt.Errorf("item %d: cpu %d has event %d, want %d", n, f.Cpu, f.Sequence, position[f.Cpu])
		}
		position[f.Cpu]++
	}
	return nil
}
