// SPDX-License-Identifier: Apache-2.0

// Package reconcile keeps a target, such as a kernel map or the routes of a
// node, equal to what is wanted: it applies what changed, tries again what
// failed, and from time to time removes and restores what others changed.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"
)

// Target is what a Reconciler drives. Each operation is safe to repeat and may
// be cut short by its context. A Reconciler calls one at a time.
type Target[K comparable, V any] interface {
	// Update makes key hold value, whatever it held before.
	Update(ctx context.Context, key K, value V) error
	// Delete removes key; an absent key is not an error.
	Delete(ctx context.Context, key K) error
	// Prune removes everything that the target has, whoever put it there, and
	// that is not a key of want. It leaves the wanted keys alone.
	Prune(ctx context.Context, want map[K]V) error
}

// Config is what a Reconciler needs.
type Config[K comparable, V any] struct {
	// Name of the target, for messages.
	Name   string
	Target Target[K, V]
	// Desired returns what the target should hold, and the revision of that:
	// it grows with each change. The map is not changed by either side
	// afterwards.
	Desired func() (want map[K]V, revision uint64)
	// Equal tells whether a value needs no update; nil means
	// reflect.DeepEqual.
	Equal func(a, b V) bool
	// MinBackoff is the wait before a failed key is tried again; it doubles
	// with each failure up to MaxBackoff. 0 means 50 ms and 30 s.
	MinBackoff, MaxBackoff time.Duration
	// Interval is how often the target is pruned and every key written again;
	// 0 means 5 minutes, less than 0 never.
	Interval time.Duration
	Log      *slog.Logger
}

func (c *Config[K, V]) validate() error {
	switch {
	case c.Name == "":
		return errors.New("reconciler: no Name")
	case c.Target == nil || c.Desired == nil || c.Log == nil:
		return fmt.Errorf("reconciler %s: want Target, Desired and Log", c.Name)
	}
	if c.Equal == nil {
		c.Equal = func(a, b V) bool { return reflect.DeepEqual(a, b) }
	}
	if c.MinBackoff <= 0 {
		c.MinBackoff = 50 * time.Millisecond
	}
	if c.MaxBackoff <= 0 {
		c.MaxBackoff = 30 * time.Second
	}
	if c.Interval == 0 {
		c.Interval = 5 * time.Minute
	}
	return nil
}

// Status is how far a Reconciler has come.
type Status struct {
	Desired uint64 // revision that was last read; 0 before the first
	Applied uint64 // revision that is in force in full
	Keys    int    // in force
	Pending int    // keys that failed and will be tried again, and 1 for a prune that failed
	// LastError is why the last operation failed that did; nil when nothing is
	// pending.
	LastError error
}

// Reconciler drives one target.
type Reconciler[K comparable, V any] struct {
	c    Config[K, V]
	poke chan struct{} // holds at most one

	// Of Run's goroutine only. A key is in one of applied and failed: what
	// the target holds for a failed one is not known.
	applied   map[K]V
	failed    map[K]*failure[V]
	unpruned  *failure[V] // while the target may hold what nobody wants
	nextSweep time.Time   // zero for never

	mu      sync.Mutex // protects all below
	status  Status
	renew   bool          // the next round prunes, and writes every key
	ran     bool          // status is of a round that happened
	changed chan struct{} // closed at the next change of status
}

// failure is a key that has to be tried again.
type failure[V any] struct {
	value    V    // that failed
	deleting bool // it was to be deleted, value means nothing
	attempts int
	at       time.Time // not before
	err      error
}

// New makes a Reconciler; Run drives it.
func New[K comparable, V any](c Config[K, V]) (*Reconciler[K, V], error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	return &Reconciler[K, V]{
		c: c, poke: make(chan struct{}, 1), applied: map[K]V{}, failed: map[K]*failure[V]{}, changed: make(chan struct{}),
	}, nil
}

// Trigger says that Desired may return something new. It does not wait.
func (r *Reconciler[K, V]) Trigger() {
	select {
	case r.poke <- struct{}{}:
	default:
	}
}

// Renew is for a target that something else has changed: it asks for a round
// that prunes it and writes every key again. It does not wait.
func (r *Reconciler[K, V]) Renew() {
	r.mu.Lock()
	r.renew = true
	r.mu.Unlock()
	r.Trigger()
}

func (r *Reconciler[K, V]) takeRenew() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	renew := r.renew
	r.renew = false
	return renew
}

// Status returns how far the reconciler has come, and a channel that is closed
// when that changes.
func (r *Reconciler[K, V]) Status() (Status, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status, r.changed
}

// Wait returns once the revision, or a later one, is in force in full. When ctx
// ends before, the error says what stands in the way.
func (r *Reconciler[K, V]) Wait(ctx context.Context, revision uint64) error {
	for {
		r.mu.Lock()
		s, ran, changed := r.status, r.ran, r.changed
		r.mu.Unlock()
		if ran && s.Pending == 0 && s.Applied >= revision {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			err := fmt.Errorf("%s: revision %d is not in force: at revision %d with %d of %d pending: %w",
				r.c.Name, revision, s.Applied, s.Pending, s.Pending+s.Keys, ctx.Err())
			if s.LastError != nil {
				err = fmt.Errorf("%w: last error: %w", err, s.LastError)
			}
			return err
		}
	}
}

// Run prunes the target, then keeps it equal to what is desired until ctx ends;
// then it returns nil. What is in the target stays.
func (r *Reconciler[K, V]) Run(ctx context.Context) error {
	r.unpruned = &failure[V]{}
	r.scheduleSweep(time.Now())
	for {
		r.round(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if !r.wait(ctx) {
			return nil
		}
	}
}

// wait returns true when there is something to do, false when ctx ends.
func (r *Reconciler[K, V]) wait(ctx context.Context) bool {
	var due <-chan time.Time
	if at := r.nextWork(); !at.IsZero() {
		t := time.NewTimer(time.Until(at))
		defer t.Stop()
		due = t.C
	}
	select {
	case <-ctx.Done():
		return false
	case <-r.poke:
	case <-due:
	}
	return true
}

// nextWork is when something is to be tried again or swept; zero for never.
func (r *Reconciler[K, V]) nextWork() time.Time {
	next := r.nextSweep
	earlier := func(f *failure[V]) {
		if f != nil && (next.IsZero() || f.at.Before(next)) {
			next = f.at
		}
	}
	earlier(r.unpruned)
	for _, f := range r.failed {
		earlier(f)
	}
	return next
}

func (r *Reconciler[K, V]) scheduleSweep(now time.Time) {
	if r.c.Interval > 0 {
		r.nextSweep = now.Add(r.c.Interval)
	}
}

// round brings the target as close to what is desired as it can now.
func (r *Reconciler[K, V]) round(ctx context.Context) {
	renew := r.takeRenew()
	want, revision := r.c.Desired()
	now := time.Now()
	if renew {
		for _, f := range r.failed {
			f.at, f.attempts = now, 0 // the cause may have gone
		}
	}
	if renew || !r.nextSweep.IsZero() && !now.Before(r.nextSweep) {
		r.scheduleSweep(now)
		r.unpruned = &failure[V]{}
		r.applied = make(map[K]V, len(want)) // what Prune leaves is written again, all else it removes
	}
	r.prune(ctx, want, now)
	r.deleteUnwanted(ctx, want, now)
	r.updateWanted(ctx, want, now)
	if ctx.Err() == nil {
		r.publish(revision)
	}
}

func (r *Reconciler[K, V]) prune(ctx context.Context, want map[K]V, now time.Time) {
	if r.unpruned == nil || now.Before(r.unpruned.at) {
		return
	}
	if err := r.c.Target.Prune(ctx, want); err != nil {
		r.again(r.unpruned, fmt.Errorf("prune %s: %w", r.c.Name, err))
		return
	}
	r.unpruned = nil
}

// deleteUnwanted goes before updates, to make room in a full target.
func (r *Reconciler[K, V]) deleteUnwanted(ctx context.Context, want map[K]V, now time.Time) {
	for k := range r.applied {
		if _, wanted := want[k]; !wanted {
			r.remove(ctx, k)
		}
	}
	for k, f := range r.failed {
		if _, wanted := want[k]; !wanted && (!f.deleting || !now.Before(f.at)) {
			r.remove(ctx, k)
		}
	}
}

func (r *Reconciler[K, V]) updateWanted(ctx context.Context, want map[K]V, now time.Time) {
	for k, v := range want {
		if f := r.failed[k]; f != nil {
			if f.deleting || !now.Before(f.at) || !r.c.Equal(f.value, v) {
				r.update(ctx, k, v)
			}
			continue
		}
		if old, ok := r.applied[k]; !ok || !r.c.Equal(old, v) {
			r.update(ctx, k, v)
		}
	}
}

func (r *Reconciler[K, V]) update(ctx context.Context, k K, v V) {
	if ctx.Err() != nil {
		return
	}
	if err := r.c.Target.Update(ctx, k, v); err != nil {
		f := r.fail(k, fmt.Errorf("update %v of %s: %w", k, r.c.Name, err))
		f.value, f.deleting = v, false
		return
	}
	delete(r.failed, k)
	r.applied[k] = v
}

func (r *Reconciler[K, V]) remove(ctx context.Context, k K) {
	if ctx.Err() != nil {
		return
	}
	if err := r.c.Target.Delete(ctx, k); err != nil {
		r.fail(k, fmt.Errorf("delete %v from %s: %w", k, r.c.Name, err)).deleting = true
		return
	}
	delete(r.failed, k)
	delete(r.applied, k)
}

func (r *Reconciler[K, V]) fail(k K, err error) *failure[V] {
	delete(r.applied, k)
	f := r.failed[k]
	if f == nil {
		f = &failure[V]{}
		r.failed[k] = f
	}
	r.again(f, err)
	return f
}

// again sets when to try next.
func (r *Reconciler[K, V]) again(f *failure[V], err error) {
	wait := r.c.MaxBackoff
	const most = 30 // doublings that cannot overflow
	if f.attempts < most {
		wait = min(wait, r.c.MinBackoff<<f.attempts)
	}
	f.attempts++
	f.err = err
	f.at = time.Now().Add(wait)
}

// publish makes the outcome of a round known.
func (r *Reconciler[K, V]) publish(revision uint64) {
	s := Status{Desired: revision, Keys: len(r.applied), Pending: len(r.failed)}
	fresh := 0
	note := func(f *failure[V]) {
		if s.LastError == nil || f.attempts == 1 {
			s.LastError = f.err
		}
		if f.attempts == 1 {
			fresh++
		}
	}
	for _, f := range r.failed {
		note(f)
	}
	if r.unpruned != nil {
		s.Pending++
		note(r.unpruned)
	}
	r.mu.Lock()
	before := r.status
	s.Applied = before.Applied
	if s.Pending == 0 {
		s.Applied = revision
	}
	r.status, r.ran = s, true
	close(r.changed)
	r.changed = make(chan struct{})
	r.mu.Unlock()
	switch {
	case s.Pending > before.Pending || fresh > 0:
		r.c.Log.Warn("target does not take all changes, trying again", "target", r.c.Name, "pending", s.Pending, "error", s.LastError)
	case s.Pending == 0 && before.Pending > 0:
		r.c.Log.Info("target has taken all changes", "target", r.c.Name, "keys", s.Keys)
	}
}
