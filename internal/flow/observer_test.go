// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/event"
)

// TestEveryEventIsAccountedFor: received + reported lost = generated, at the
// right places, for random interleavings of a kernel and a reader that is
// stopped and started in mid-stream.
func TestEveryEventIsAccountedFor(t *testing.T) {
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 2))
		events := r.IntN(3 * countersEvery)
		if seed%8 != 0 {
			events = r.IntN(2000)
		}
		k := newKernel(seed, 1+r.IntN(5), 1+r.IntN(40), 1+r.IntN(6), events)
		var position map[uint32]uint64
		var saved map[uint32]uint64
		var received, lost uint64
		for runs := r.IntN(4); runs >= 0; runs-- {
			k.reads = -1
			if runs > 0 {
				k.reads = r.IntN(300)
			}
			cfg := config()
			cfg.Acknowledged = maps.Clone(saved)
			cfg.Save = func(m map[uint32]uint64) error { saved = m; return nil }
			o := newObserver(t, cfg, k)
			if err := o.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			if position == nil {
				position = map[uint32]uint64{}
			}
			if err := walk(o.kept.all(), position); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			s := o.Stats()
			received, lost = received+s.Received, lost+s.LostKernel
			if s.Late != 0 {
				t.Fatalf("seed %d: %d late events", seed, s.Late)
			}
		}
		var made, full uint64
		for cpu, n := range k.made {
			made += n
			full += k.lost[cpu]
			if position[uint32(cpu)] != n {
				t.Fatalf("seed %d: cpu %d: stream ends at %d, want %d", seed, cpu, position[uint32(cpu)], n)
			}
		}
		if received+lost != made || lost != full {
			t.Fatalf("seed %d: received %d + lost %d, want %d generated and %d lost", seed, received, lost, made, full)
		}
	}
}

// TestEventsCountedBeforeTheyAreInTheRing: a kernel that counts an event before
// it is in the ring may make it seem lost. It is then refused when it comes, so
// that the sum stays exact.
func TestEventsCountedBeforeTheyAreInTheRing(t *testing.T) {
	late := uint64(0)
	for seed := range uint64(200) {
		k := newKernel(seed, 3, 20, 3, 1000)
		k.early = true
		o := newObserver(t, config(), k)
		if err := o.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		position := map[uint32]uint64{}
		if err := walk(o.kept.all(), position); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		s := o.Stats()
		late += s.Late
		if want := k.made[0] + k.made[1] + k.made[2]; s.Received+s.LostKernel != want {
			t.Fatalf("seed %d: received %d + lost %d, want %d", seed, s.Received, s.LostKernel, want)
		}
	}
	if late == 0 {
		t.Error("no event came late: the model does not do what this test is for")
	}
}

// TestLossOnQuietCPUWhileBusy: a ring that is never empty still shows what a
// CPU without further events has lost.
func TestLossOnQuietCPUWhileBusy(t *testing.T) {
	l := newLedger(nil, []event.Counters{{CPU: 0}, {CPU: 1}})
	l.event(0, 0, time.Unix(1, 0))
	l.read([]event.Counters{{CPU: 0, Generated: 5}, {CPU: 1, Generated: 3}})
	if gaps, _ := l.event(0, 1, time.Unix(2, 0)); len(gaps) != 0 {
		t.Fatalf("an event from before the reading settles nothing, got %v", gaps)
	}
	l.read([]event.Counters{{CPU: 0, Generated: 8}, {CPU: 1, Generated: 9}})
	for n := uint64(2); n < 8; n++ {
		if gaps, _ := l.event(0, n, time.Unix(3, 0)); len(gaps) != 0 {
			t.Fatalf("event %d: got %v", n, gaps)
		}
	}
	gaps, _ := l.event(0, 8, time.Unix(4, 0))
	if len(gaps) != 1 || gaps[0] != (gap{cpu: 1, count: 3, to: time.Unix(4, 0)}) {
		t.Fatalf("got %v, want 3 lost on cpu 1: the first reading, not the second", gaps)
	}
}

func TestDuplicateAndLateEventsAreRefused(t *testing.T) {
	l := newLedger(nil, []event.Counters{{CPU: 0, Generated: 2}})
	if gaps := l.drained(time.Unix(1, 0)); len(gaps) != 1 || gaps[0].count != 2 {
		t.Fatalf("got %v, want 2 lost", gaps)
	}
	if _, ok := l.event(0, 1, time.Unix(2, 0)); ok {
		t.Error("an event that was reported as lost was delivered too")
	}
	if gaps, ok := l.event(0, 2, time.Unix(2, 0)); !ok || len(gaps) != 0 {
		t.Errorf("the next event: delivered %v, gaps %v", ok, gaps)
	}
}

func TestStateOfOtherMapsIsNotTrusted(t *testing.T) {
	l := newLedger(map[uint32]uint64{0: 1000}, []event.Counters{{CPU: 0, Generated: 3}})
	if gaps := l.drained(time.Unix(1, 0)); len(gaps) != 1 || gaps[0].count != 3 {
		t.Fatalf("got %v, want the 3 events of the new maps", gaps)
	}
}

func TestReadErrorEndsRunWithItsStep(t *testing.T) {
	boom := errors.New("boom")
	o := newObserver(t, config(), failing{boom})
	if err := o.Run(t.Context()); !errors.Is(err, boom) || !strings.Contains(err.Error(), "read event:") {
		t.Fatalf("got %v", err)
	}
	err := o.Observe(t.Context(), &weftv1.ObserveRequest{Follow: true}, nil)
	if status.Code(err) != codes.Unavailable {
		t.Fatalf("a client of an observer that has stopped: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read(*event.Record) error            { return f.err }
func (f failing) Counters() ([]event.Counters, error) { return nil, nil }
func (f failing) Close() error                        { return nil }

func TestSaveThatFailsIsTriedAgain(t *testing.T) {
	k := newKernel(3, 1, 10, 2, 50)
	cfg := config()
	calls := 0
	var last map[uint32]uint64
	cfg.Save = func(m map[uint32]uint64) error {
		if calls++; calls < 3 {
			return os.ErrPermission
		}
		last = m
		return nil
	}
	o := newObserver(t, cfg, k)
	if err := o.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if last[0] != 50 {
		t.Fatalf("saved %v after %d calls, want 50 of cpu 0", last, calls)
	}
}

// pipe is a source that gives what the test pushes.
type pipe struct {
	records chan event.Record
}

func (p *pipe) Read(r *event.Record) error {
	rec, ok := <-p.records
	if !ok {
		return os.ErrClosed
	}
	*r = rec
	return nil
}
func (p *pipe) Counters() ([]event.Counters, error) { return nil, nil }
func (p *pipe) Close() error                        { return nil }

// TestKeptThenNewWithoutGapOrDuplicate joins clients at random moments of a
// stream; each must see all of it exactly once.
func TestKeptThenNewWithoutGapOrDuplicate(t *testing.T) {
	const total = 5000
	p := &pipe{records: make(chan event.Record)}
	cfg := config()
	cfg.Queue, cfg.MaxClients = total, 8
	o := newObserver(t, cfg, p)
	run := make(chan error, 1)
	go func() { run <- o.Run(context.Background()) }()
	var clients sync.WaitGroup
	for n := range total {
		r := tcpRecord()
		r.Sequence, r.Time = uint64(n), time.Unix(int64(n), 0)
		p.records <- r
		if n%700 == 350 {
			clients.Add(1)
			go func() {
				defer clients.Done()
				var got []*weftv1.ObserveResponse
				err := o.Observe(context.Background(), &weftv1.ObserveRequest{Follow: true}, func(i *weftv1.ObserveResponse) error {
					got = append(got, i)
					return nil
				})
				if status.Code(err) != codes.Unavailable {
					t.Errorf("end of the stream: %v", err)
				}
				position := map[uint32]uint64{}
				if err := walk(got, position); err != nil || position[0] != total {
					t.Errorf("client that joined about %d: %d items, position %d, %v", n, len(got), position[0], err)
				}
			}()
		}
	}
	close(p.records)
	if err := <-run; err != nil {
		t.Fatal(err)
	}
	clients.Wait()
}

// TestSlowClientLosesItsOwnAndIsTold: a client's queue of 8 with random takes:
// its flows and its losses add up, and no report of the kernel's is missing.
func TestSlowClientLosesItsOwnAndIsTold(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		q := newQueue(&filter{}, 8)
		var got []*weftv1.ObserveResponse
		var flows, kernel uint64
		for range 500 {
			if r.IntN(5) == 0 {
				n := uint64(1 + r.IntN(9))
				kernel += n
				q.push(lostItem(&weftv1.Lost{Count: n, Where: WhereKernelRing, Cpu: uint32(r.IntN(3))}))
			} else {
				q.push(&weftv1.ObserveResponse{Item: &weftv1.ObserveResponse_Flow{Flow: &weftv1.Flow{Sequence: flows}}})
				flows++
			}
			if r.IntN(12) == 0 {
				got = append(got, q.take(nil)...)
			}
		}
		got = append(got, q.take(nil)...)
		var position, sumKernel, sumOwn uint64
		for _, i := range got {
			switch l := i.GetLost(); {
			case l == nil:
				if i.GetFlow().Sequence != position {
					t.Fatalf("seed %d: flow %d, want %d", seed, i.GetFlow().Sequence, position)
				}
				position++
			case l.Where == WhereObserver:
				position += l.Count
				sumOwn += l.Count
			default:
				sumKernel += l.Count
			}
		}
		if position != flows || sumKernel != kernel || sumOwn != q.dropped() {
			t.Fatalf("seed %d: flows %d of %d, kernel %d of %d, own %d of %d", seed, position, flows, sumKernel, kernel, sumOwn, q.dropped())
		}
	}
}

func TestLastAndSince(t *testing.T) {
	at := func(s int64) *timestamppb.Timestamp { return &timestamppb.Timestamp{Seconds: s} }
	flow := func(s int64, v weftv1.Verdict) *weftv1.ObserveResponse {
		return &weftv1.ObserveResponse{Item: &weftv1.ObserveResponse_Flow{Flow: &weftv1.Flow{Time: at(s), Verdict: v}}}
	}
	kept := []*weftv1.ObserveResponse{
		flow(1, 1), flow(2, 2), lostItem(&weftv1.Lost{Count: 3, To: at(3)}), flow(3, 1), flow(4, 2), flow(5, 1),
	}
	for _, c := range []struct {
		name string
		req  *weftv1.ObserveRequest
		want []int
	}{
		{"all", &weftv1.ObserveRequest{}, []int{0, 1, 2, 3, 4, 5}},
		{"last two", &weftv1.ObserveRequest{Last: 2}, []int{4, 5}},
		{"last two dropped, and the loss between them", &weftv1.ObserveRequest{Last: 2, Verdict: []weftv1.Verdict{2}}, []int{1, 2, 4}},
		{"since 3", &weftv1.ObserveRequest{Since: at(3)}, []int{2, 3, 4, 5}},
		{"since 4, more than there are", &weftv1.ObserveRequest{Since: at(4), Last: 9}, []int{4, 5}},
		{"in the future", &weftv1.ObserveRequest{Since: at(400)}, nil},
	} {
		f, err := newFilter(c.req, nil)
		if err != nil {
			t.Fatal(err)
		}
		var want []*weftv1.ObserveResponse
		for _, i := range c.want {
			want = append(want, kept[i])
		}
		if got := f.newest(kept, c.req.Last); !slices.Equal(got, want) {
			t.Errorf("%s: got %v", c.name, got)
		}
	}
}

func TestRingKeepsTheNewest(t *testing.T) {
	for _, limit := range []int{0, 1, 3, 10} {
		r := newRing(limit)
		var all []*weftv1.ObserveResponse
		for range 8 {
			i := &weftv1.ObserveResponse{}
			all = append(all, i)
			r.add(i)
			if want := all[max(0, len(all)-limit):]; !slices.Equal(r.all(), want) {
				t.Fatalf("limit %d after %d: wrong items", limit, len(all))
			}
		}
	}
}

func TestTooManyClients(t *testing.T) {
	cfg := config()
	cfg.MaxClients = 1
	o := newObserver(t, cfg, &pipe{})
	_, q, err := o.join(&filter{}, true)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := o.join(&filter{}, true); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("second client: %v", err)
	}
	o.leave(q)
	if _, _, err := o.join(&filter{}, true); err != nil {
		t.Fatalf("after the first has left: %v", err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.Node = "" }, "node"},
		{func(c *Config) { c.Keep = -1 }, "keep -1"},
		{func(c *Config) { c.Queue = 0 }, "queue 0"},
		{func(c *Config) { c.MaxClients = 0 }, "maxClients 0"},
		{func(c *Config) { c.Logger = nil }, "logger"},
	} {
		cfg := config()
		c.change(&cfg)
		if _, err := New(cfg, nil, nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("want %q, got %v", c.want, err)
		}
	}
}
