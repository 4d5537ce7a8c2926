// SPDX-License-Identifier: Apache-2.0

// Package flow makes flows out of datapath events: it names the pods, nodes
// and protocols of each, says exactly how many events were lost and where in
// the stream, keeps the newest, and streams them to clients.
package flow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/event"
	"github.com/weft-mesh/weft/internal/state"
)

// Config of an Observer.
type Config struct {
	// Node is the name of this node, as in its row of the node table.
	Node string
	// Keep is how many items (flows, and reports of lost ones) stay for
	// clients that come later. 0 keeps none.
	Keep int
	// Queue is how many items may wait for one client before it loses some;
	// at least 1.
	Queue int
	// MaxClients is how many may observe at the same time; at least 1.
	MaxClients int
	// Acknowledged is what Save got last, for the same kernel maps: for each
	// CPU, the sequence number from which on events are not accounted for.
	// Nil on the first start.
	Acknowledged map[uint32]uint64
	// Save keeps what is acknowledged for the next start: about every
	// SaveInterval if it has changed, and at the end. Events that were read
	// but not saved when the agent was killed are reported as lost by the
	// next one, which does not have them. Nil for no saving.
	Save func(map[uint32]uint64) error
	// SaveInterval is the least time between two saves; 0 is one second.
	SaveInterval time.Duration
	// DeviceName names a network device that is not of a pod, or returns "".
	// Its answers are kept. Nil leaves such devices without a name.
	DeviceName func(ifindex uint32) string
	// RuleName names the rule of network policy that dropped a packet; nil
	// leaves it out.
	RuleName func(rule uint32) string
	// Reasons are the names of all drop reasons, to check what clients ask
	// for; nil accepts any.
	Reasons []string
	// Now is the clock; nil is time.Now.
	Now    func() time.Time
	Logger *slog.Logger
}

func (c *Config) validate() error {
	switch {
	case c.Node == "":
		return errors.New("node: want the name of this node")
	case c.Keep < 0:
		return fmt.Errorf("keep %d: want 0 or more", c.Keep)
	case c.Queue < 1:
		return fmt.Errorf("queue %d: want 1 or more", c.Queue)
	case c.MaxClients < 1:
		return fmt.Errorf("maxClients %d: want 1 or more", c.MaxClients)
	case c.Logger == nil:
		return errors.New("logger: want one")
	}
	return nil
}

// Stats are totals since the observer was made.
type Stats struct {
	Received     uint64 // events delivered
	LostKernel   uint64 // events that never came, as reported in the stream
	LostObserver uint64 // flows that clients were too slow for, summed over clients
	Late         uint64 // events refused because they were reported as lost already
	Clients      int    // now
}

// Observer reads events and serves them as flows. Use New.
type Observer struct {
	cfg    Config
	tables *state.Tables
	source event.Source
	done   chan struct{} // closed when Run has returned

	mu      sync.Mutex
	kept    *ring               // protected by mu
	clients map[*queue]struct{} // protected by mu
	stats   Stats               // protected by mu; LostObserver without the clients of now
}

// New checks cfg. It reads nothing yet. The caller closes source, after Run
// has returned.
func New(cfg Config, tables *state.Tables, source event.Source) (*Observer, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("flow observer: %w", err)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.SaveInterval == 0 {
		cfg.SaveInterval = time.Second
	}
	return &Observer{
		cfg: cfg, tables: tables, source: source, done: make(chan struct{}),
		kept: newRing(cfg.Keep), clients: map[*queue]struct{}{},
	}, nil
}

// Stats returns the totals.
func (o *Observer) Stats() Stats {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.stats
	s.Clients = len(o.clients)
	for q := range o.clients {
		s.LostObserver += q.dropped()
	}
	return s
}

// Made is how many events the datapath has made since its maps were, and how
// many of them found no room in the ring.
func (o *Observer) Made() (generated, lost uint64, err error) {
	rows, err := o.source.Counters()
	if err != nil {
		return 0, 0, fmt.Errorf("read event counters: %w", err)
	}
	for _, r := range rows {
		generated += r.Generated
		lost += r.Lost
	}
	return generated, lost, nil
}

// countersEvery is after how many events the counters are read while the ring
// is never empty.
const countersEvery = 4096

// Run reads events until ctx is done or the source is closed (nil), or a read
// fails. It returns as soon as the source's Read does. Run may be called once.
func (o *Observer) Run(ctx context.Context) error {
	defer close(o.done)
	x, err := newIndex(o.cfg.Node, o.tables, o.cfg.Now)
	if err != nil {
		return fmt.Errorf("flow observer: %w", err)
	}
	defer x.close()
	rows, err := o.source.Counters()
	if err != nil {
		return fmt.Errorf("flow observer: read event counters: %w", err)
	}
	r := &reader{
		Observer: o, index: x,
		decoder: newDecoder(o.cfg.Node, x, o.cfg.DeviceName, o.cfg.RuleName),
		ledger:  newLedger(o.cfg.Acknowledged, rows),
		saved:   o.cfg.Now(),
	}
	err = r.loop(ctx)
	r.save()
	if err != nil {
		return fmt.Errorf("flow observer: %w", err)
	}
	return nil
}

// reader is the state of Run.
type reader struct {
	*Observer
	index   *index
	decoder *decoder
	ledger  *ledger
	record  event.Record
	events  uint64    // since the counters were read
	dirty   bool      // something was acknowledged since it was saved
	saved   time.Time // when that was
}

func (r *reader) loop(ctx context.Context) error {
	for ctx.Err() == nil {
		err := r.source.Read(&r.record)
		r.index.refresh()
		switch {
		case err == nil:
			err = r.event()
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = r.drained()
		default:
			err = fmt.Errorf("read event: %w", err)
		}
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) event() error {
	rec := &r.record
	gaps, deliver := r.ledger.event(rec.CPU, rec.Sequence, rec.Time)
	r.publishGaps(gaps)
	if deliver {
		r.publish(r.decoder.decode(rec))
		r.dirty = true
	} else {
		r.late()
	}
	if r.events++; r.events < countersEvery {
		return nil
	}
	r.saveSometimes()
	return r.readCounters()
}

// drained comes after the ring was seen empty. The counters that are trusted
// are those that were read before; then they are read for the next time.
func (r *reader) drained() error {
	r.publishGaps(r.ledger.drained(r.cfg.Now()))
	r.saveSometimes()
	return r.readCounters()
}

func (r *reader) readCounters() error {
	r.events = 0
	rows, err := r.source.Counters()
	if err != nil {
		return fmt.Errorf("read event counters: %w", err)
	}
	r.ledger.read(rows)
	return nil
}

func (r *reader) saveSometimes() {
	if r.cfg.Now().Sub(r.saved) >= r.cfg.SaveInterval {
		r.save()
	}
}

func (r *reader) save() {
	if r.cfg.Save == nil || !r.dirty {
		return
	}
	r.saved = r.cfg.Now()
	if err := r.cfg.Save(r.ledger.acknowledged()); err != nil {
		r.cfg.Logger.Warn("flow position not saved", "error", err)
		return
	}
	r.dirty = false
}

func (r *reader) publishGaps(gaps []gap) {
	for _, g := range gaps {
		l := &weftv1.Lost{Count: g.count, Where: WhereKernelRing, Cpu: g.cpu, To: timestamppb.New(g.to)}
		if !g.from.IsZero() {
			l.From = timestamppb.New(g.from)
		}
		r.dirty = true
		r.publish(lostItem(l))
	}
}

func (o *Observer) late() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stats.Late++
}

// publish gives an item to everybody. It must not be changed afterwards.
func (o *Observer) publish(i *weftv1.ObserveResponse) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if l := i.GetLost(); l != nil {
		o.stats.LostKernel += l.Count
	} else {
		o.stats.Received++
	}
	o.kept.add(i)
	for q := range o.clients {
		q.push(i)
	}
}

// Observe sends what req asks for, oldest first, until ctx is done, send fails
// or, without req.Follow, the kept ones are sent. Between kept and new ones
// there is neither gap nor duplicate. Items that are sent are shared and must
// not be changed. The error is a gRPC status, but for send's own.
func (o *Observer) Observe(ctx context.Context, req *weftv1.ObserveRequest, send func(*weftv1.ObserveResponse) error) error {
	f, err := newFilter(req, o.cfg.Reasons)
	if err != nil {
		return err
	}
	kept, q, err := o.join(f, req.Follow)
	if err != nil {
		return err
	}
	defer o.leave(q)
	if err := sendAll(f.newest(kept, req.Last), send); err != nil {
		return err
	}
	if !req.Follow {
		return nil
	}
	return o.follow(ctx, q, send)
}

func (o *Observer) follow(ctx context.Context, q *queue, send func(*weftv1.ObserveResponse) error) error {
	var items []*weftv1.ObserveResponse
	for {
		select {
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-q.wake:
			items = q.take(items)
			if err := sendAll(items, send); err != nil {
				return err
			}
		case <-o.done:
			if err := sendAll(q.take(items), send); err != nil {
				return err
			}
			return status.Error(codes.Unavailable, "the agent has stopped observing flows")
		}
	}
}

func sendAll(items []*weftv1.ObserveResponse, send func(*weftv1.ObserveResponse) error) error {
	for _, i := range items {
		if err := send(i); err != nil {
			return err
		}
	}
	return nil
}

// join returns what is kept and the queue of all that comes after it.
func (o *Observer) join(f *filter, follow bool) ([]*weftv1.ObserveResponse, *queue, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.clients) >= o.cfg.MaxClients {
		return nil, nil, status.Errorf(codes.ResourceExhausted, "%d clients observe flows already, the most there may be", len(o.clients))
	}
	q := newQueue(f, o.cfg.Queue)
	if !follow {
		return o.kept.all(), q, nil
	}
	o.clients[q] = struct{}{}
	return o.kept.all(), q, nil
}

func (o *Observer) leave(q *queue) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.clients[q]; ok {
		delete(o.clients, q)
		o.stats.LostObserver += q.dropped()
	}
}
