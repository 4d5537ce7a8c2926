// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/admin"
	"github.com/weft-mesh/weft/internal/datapath/event"
	"github.com/weft-mesh/weft/internal/flow"
	"github.com/weft-mesh/weft/internal/state"
)

// burst is a kernel whose ring has room for ring events and that makes two
// rings full at once, again and again.
type burst struct {
	ring    int
	bursts  int
	waiting []event.Record
	made    [2]uint64
	lost    [2]uint64
	idle    int           // reads that found nothing after the last burst
	drained chan struct{} // closed once that is so for good
	closed  chan struct{}
}

func (b *burst) Read(r *event.Record) error {
	if len(b.waiting) == 0 && b.bursts > 0 {
		b.bursts--
		for n := range 2 * b.ring {
			cpu := n % 2
			if len(b.waiting) < b.ring {
				b.waiting = append(b.waiting, event.Record{
					Type: event.TypeDrop, Reason: "spoofed-address", CPU: uint32(cpu), Sequence: b.made[cpu], Protocol: 17, Time: time.Unix(int64(n), 0),
					Source: netip.MustParseAddrPort("10.244.1.5:1"), Destination: netip.MustParseAddrPort("10.244.2.5:2"),
				})
			} else {
				b.lost[cpu]++
			}
			b.made[cpu]++
		}
	}
	if len(b.waiting) == 0 {
		if b.idle++; b.idle < 3 {
			return os.ErrDeadlineExceeded
		}
		close(b.drained)
		<-b.closed
		return os.ErrClosed
	}
	*r, b.waiting = b.waiting[0], b.waiting[1:]
	return nil
}

func (b *burst) Counters() ([]event.Counters, error) {
	return []event.Counters{{CPU: 0, Generated: b.made[0], Lost: b.lost[0]}, {CPU: 1, Generated: b.made[1], Lost: b.lost[1]}}, nil
}

func (b *burst) Close() error { return nil }

// TestObserveOfABurstAddsUp goes the whole way from a ring that overflows to
// the lines that "weft observe -o json" prints.
func TestObserveOfABurstAddsUp(t *testing.T) {
	const ring, bursts = 512, 20
	source := &burst{ring: ring, bursts: bursts, drained: make(chan struct{}), closed: make(chan struct{})}
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	o, err := flow.New(flow.Config{Node: "node1", Keep: 1 << 16, Queue: 64, MaxClients: 1, Logger: log}, tables, source)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "weft.sock")
	s, err := admin.New(admin.Config{Socket: path}, admin.Providers{Status: nodeState, Tables: tables, Flows: o}, log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- o.Run(ctx) }()
	go func() { done <- s.Run(ctx) }()
	<-s.Listening()
	select {
	case <-source.drained:
	case <-time.After(10 * time.Second):
		t.Fatal("the bursts do not end")
	}
	out, _, err := runWeft(t.Context(), "observe", "-o", "json", "--socket", path)
	if err != nil {
		t.Fatal(err)
	}
	stop()
	close(source.closed)
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	var received, lost uint64
	for lines := bufio.NewScanner(strings.NewReader(out)); lines.Scan(); {
		var line flowLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		if line.Lost != nil {
			lost += line.Lost.Count
		} else {
			received++
		}
	}
	if received != ring*bursts || received+lost != source.made[0]+source.made[1] || lost != source.lost[0]+source.lost[1] {
		t.Errorf("received %d + lost %d, want %d generated and %d lost", received, lost, source.made[0]+source.made[1], source.lost[0]+source.lost[1])
	}
}
