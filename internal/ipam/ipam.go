// SPDX-License-Identifier: Apache-2.0

// Package ipam gives addresses of the node's pod CIDRs to pods and remembers
// to whom, across restarts of the agent and reboots of the node.
//
// Each allocation carries Data, what its owner knows about it: both are stored
// by the same write, so that they cannot disagree after a crash.
//
// The file is a journal: one JSON object a line, compacted from time to time
// into a new file (written aside, synced, renamed). Appended lines are not
// synced one by one, on purpose: a write survives the death of the agent
// without it, and when the kernel dies the boot id changes, at which every
// allocation is released anyway.
//
// Time is measured since boot, so that no step of the wall clock shortens or
// lengthens a quarantine. On another boot everything counts as released when
// the node booted: that is when the last pod was gone.
package ipam

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultQuarantine is how long a released address is not given out.
const DefaultQuarantine = 60 * time.Second

// Options are what a Pool needs.
type Options struct {
	// Path of the file. Beside it Path.lock is made, which keeps a second
	// agent out.
	Path string
	// CIDRs are the node's pod CIDRs, at most one of each family. None: SetCIDRs
	// must come before an allocation.
	CIDRs []netip.Prefix
	// BootID tells one boot of the node from the next; see BootID.
	BootID string
	// Now is the time since boot; see SinceBoot.
	Now func() time.Duration
	// Quarantine of a released address; 0 is DefaultQuarantine.
	Quarantine time.Duration
	Log        *slog.Logger
}

func (o *Options) validate() error {
	switch {
	case o.Path == "":
		return errors.New("path of the address file must be set")
	case o.BootID == "":
		return errors.New("boot id must be set")
	case o.Now == nil || o.Log == nil:
		return errors.New("clock and logger must be set")
	case o.Quarantine < 0:
		return fmt.Errorf("quarantine %s: must not be negative", o.Quarantine)
	}
	return nil
}

// BootID returns the kernel's id of this boot.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// SinceBoot returns the time since boot, suspension included.
func SinceBoot() time.Duration {
	var ts unix.Timespec
	// The clock exists since Linux 2.6.39; there is no other error.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return time.Duration(ts.Nano())
}

// Key names an interface of a pod's sandbox.
type Key struct {
	ContainerID string `json:"containerID"`
	Interface   string `json:"interface"`
}

func (k Key) String() string { return k.ContainerID + "/" + k.Interface }

// Allocation is what a Key was given. It is not to be changed.
type Allocation struct {
	Key
	IPs  []netip.Addr    `json:"ips"` // in the order of the CIDRs
	Data json.RawMessage `json:"data,omitempty"`
}

// Usage counts the addresses of one pod CIDR. Size = Allocated + Quarantined +
// Free, but for allocations from an earlier CIDR, which are not counted.
type Usage struct {
	CIDR        netip.Prefix
	Size        int // addresses that may be given out, MaxAddresses at most
	Allocated   int
	Quarantined int
	Free        int
}

// FullError says that a pod CIDR has no address to give.
type FullError struct {
	Usage
	Next time.Duration // until the first one leaves its quarantine; 0 if none is in it
}

func (e *FullError) Error() string {
	s := fmt.Sprintf("pod CIDR %s is full: of %d addresses %d are allocated and %d were released too recently",
		e.CIDR, e.Size, e.Allocated, e.Quarantined)
	if e.Next > 0 {
		s += fmt.Sprintf("; the next is free in %s", e.Next.Round(time.Second/10))
	}
	return s
}

// ErrNoCIDR is returned by Allocate while the node's pod CIDRs are not known.
var ErrNoCIDR = errors.New("no pod CIDR of this node is known")

// Pool gives out addresses. It is safe for concurrent use.
type Pool struct {
	quarantine time.Duration
	now        func() time.Duration
	log        *slog.Logger

	mu     sync.Mutex
	byKey  map[Key]*Allocation     // protected by mu
	inUse  map[netip.Addr]struct{} // of byKey; protected by mu
	ranges []*span                 // protected by mu
	// outside are released addresses that are in no range, kept for the case
	// that their range comes back within the quarantine; protected by mu.
	outside []released
	file    *journal // protected by mu
}

// Open reads the file, or starts a new one. Allocations of an earlier boot are
// released. Allocations outside the CIDRs, which may have changed, are kept
// until they are released.
func Open(o Options) (_ *Pool, err error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	p := &Pool{
		quarantine: cmp.Or(o.Quarantine, DefaultQuarantine),
		now:        o.Now,
		log:        o.Log,
		byKey:      map[Key]*Allocation{},
		inUse:      map[netip.Addr]struct{}{},
	}
	p.file, err = openJournal(o.Path, o.BootID)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = p.file.close()
		}
	}()
	if err := p.load(); err != nil {
		return nil, err
	}
	if err := p.setCIDRs(o.CIDRs); err != nil {
		return nil, err
	}
	return p, p.compact()
}

// Close lets another Pool open the file. The Pool is of no use then.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.file.close()
}

// load rebuilds the state from the file, into outside: setCIDRs sorts it.
func (p *Pool) load() error {
	sameBoot, torn, err := p.file.read(p.apply)
	if err != nil {
		return err
	}
	if torn != "" {
		p.log.Warn("end of the address file is torn and was dropped", "path", p.file.path, "reason", torn)
	}
	p.outside = p.latest(p.outside)
	if sameBoot {
		return nil
	}
	for i := range p.outside {
		p.outside[i].at = 0
	}
	n := len(p.byKey)
	for _, a := range p.sorted() {
		p.drop(a, 0)
	}
	if n > 0 {
		p.log.Info("node was rebooted: every address is released", "allocations", n)
	}
	return nil
}

// latest returns list without addresses that are in use again, and only the
// last release of any other.
func (p *Pool) latest(list []released) []released {
	seen := make(map[netip.Addr]struct{}, len(list))
	var out []released
	for _, r := range slices.Backward(list) {
		if _, again := seen[r.addr]; !again && !p.taken(r.addr) {
			seen[r.addr] = struct{}{}
			out = append(out, r)
		}
	}
	slices.Reverse(out)
	return out
}

// apply carries out one line of the file.
func (p *Pool) apply(r record) {
	switch {
	case r.Set != nil:
		p.put(r.Set)
	case r.Delete != nil:
		if a, ok := p.byKey[*r.Delete]; ok {
			p.drop(a, r.At)
		}
	case r.Free.IsValid():
		p.outside = append(p.outside, released{r.Free, r.At})
	}
}

func (p *Pool) put(a *Allocation) {
	p.byKey[a.Key] = a
	for _, ip := range a.IPs {
		p.inUse[ip] = struct{}{}
	}
}

// drop forgets a, whose addresses were released at the time at.
func (p *Pool) drop(a *Allocation, at time.Duration) {
	delete(p.byKey, a.Key)
	for _, ip := range a.IPs {
		delete(p.inUse, ip)
		p.release(released{ip, at})
	}
}

func (p *Pool) release(r released) {
	for _, s := range p.ranges {
		if s.contains(r.addr) {
			s.push(r)
			return
		}
	}
	p.outside = append(p.outside, r)
}

// SetCIDRs puts other pod CIDRs in force. Allocations outside them are kept
// until they are released.
func (p *Pool) SetCIDRs(cidrs []netip.Prefix) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.setCIDRs(cidrs)
}

func (p *Pool) setCIDRs(cidrs []netip.Prefix) error {
	if slices.EqualFunc(cidrs, p.ranges, func(c netip.Prefix, s *span) bool { return c.Masked() == s.cidr }) {
		return nil
	}
	ranges := make([]*span, 0, len(cidrs))
	for _, c := range cidrs {
		s, err := newSpan(c)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(ranges, func(o *span) bool { return o.cidr.Addr().Is4() == c.Addr().Is4() }) {
			return fmt.Errorf("pod CIDRs %v: want one of each family at most", cidrs)
		}
		ranges = append(ranges, s)
	}
	all := p.outside
	for _, s := range p.ranges {
		all = append(all, s.queue...)
	}
	slices.SortStableFunc(all, func(a, b released) int { return cmp.Compare(a.at, b.at) })
	p.ranges, p.outside = ranges, nil
	for _, r := range all {
		p.release(r)
	}
	p.pruneOutside()
	return nil
}

// pruneOutside forgets what is out of its quarantine, so that the list stays
// bounded. While no CIDR is known, nothing is known to be outside.
func (p *Pool) pruneOutside() {
	if len(p.ranges) == 0 {
		return
	}
	now := p.now()
	p.outside = slices.DeleteFunc(p.outside, func(r released) bool { return now-r.at >= p.quarantine })
}

// Allocate gives k an address of each pod CIDR and stores data with it; where
// k has addresses, it returns what it has, with created false. The address
// taken is the one that is free for the longest time. A full CIDR gives a
// *FullError.
func (p *Pool) Allocate(k Key, data json.RawMessage) (_ Allocation, created bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if a, ok := p.byKey[k]; ok {
		return *a, false, nil
	}
	if len(p.ranges) == 0 {
		return Allocation{}, false, ErrNoCIDR
	}
	a := &Allocation{Key: k, Data: data}
	for _, s := range p.ranges {
		ip, ok := s.peek(p.taken, p.now()-p.quarantine)
		if !ok {
			return Allocation{}, false, p.full(s)
		}
		a.IPs = append(a.IPs, ip)
	}
	if err := p.append(record{Set: a}); err != nil {
		return Allocation{}, false, err
	}
	for i, s := range p.ranges {
		s.take(a.IPs[i])
	}
	p.put(a)
	return *a, true, nil
}

func (p *Pool) taken(ip netip.Addr) bool {
	_, ok := p.inUse[ip]
	return ok
}

func (p *Pool) full(s *span) error {
	e := &FullError{Usage: p.usage(s)}
	if len(s.queue) > 0 {
		e.Next = s.queue[0].at + p.quarantine - p.now()
	}
	return e
}

// SetData replaces what is stored with the allocation of k.
func (p *Pool) SetData(k Key, data json.RawMessage) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	old, ok := p.byKey[k]
	if !ok {
		return fmt.Errorf("%s has no address", k)
	}
	a := &Allocation{Key: k, IPs: old.IPs, Data: data}
	if err := p.append(record{Set: a}); err != nil {
		return err
	}
	p.byKey[k] = a
	return nil
}

// Release takes the addresses of k back, and forgets its data. An unknown k is
// no error.
func (p *Pool) Release(k Key) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	a, ok := p.byKey[k]
	if !ok {
		return nil
	}
	at := p.now()
	if err := p.append(record{Delete: &k, At: at}); err != nil {
		return err
	}
	p.drop(a, at)
	return nil
}

// Get returns the allocation of k.
func (p *Pool) Get(k Key) (Allocation, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a, ok := p.byKey[k]
	if !ok {
		return Allocation{}, false
	}
	return *a, true
}

// All returns every allocation, sorted by key.
func (p *Pool) All() []Allocation {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Allocation, 0, len(p.byKey))
	for _, a := range p.sorted() {
		out = append(out, *a)
	}
	return out
}

func (p *Pool) sorted() []*Allocation {
	out := make([]*Allocation, 0, len(p.byKey))
	for _, a := range p.byKey {
		out = append(out, a)
	}
	slices.SortFunc(out, func(a, b *Allocation) int {
		return cmp.Or(strings.Compare(a.ContainerID, b.ContainerID), strings.Compare(a.Interface, b.Interface))
	})
	return out
}

// Usage counts the addresses of each pod CIDR.
func (p *Pool) Usage() []Usage {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Usage, 0, len(p.ranges))
	for _, s := range p.ranges {
		out = append(out, p.usage(s))
	}
	return out
}

func (p *Pool) usage(s *span) Usage {
	u := Usage{CIDR: s.cidr, Size: s.size}
	for ip := range p.inUse {
		if s.contains(ip) {
			u.Allocated++
		}
	}
	limit := p.now() - p.quarantine
	for _, r := range s.queue {
		if r.at > limit {
			u.Quarantined++
		}
	}
	u.Free = u.Size - u.Allocated - u.Quarantined
	return u
}

// append adds a line to the file, compacting it first where it has grown far
// beyond what it says.
func (p *Pool) append(r record) error {
	if p.file.lines > compactSlack+2*p.live() {
		if err := p.compact(); err != nil {
			return err
		}
	}
	return p.file.append(r)
}

func (p *Pool) live() int {
	n := len(p.byKey) + len(p.outside)
	for _, s := range p.ranges {
		n += len(s.queue)
	}
	return n
}

// compact writes the file anew, without what is over.
func (p *Pool) compact() error {
	p.pruneOutside()
	records := make([]record, 0, p.live())
	for _, s := range p.ranges {
		for _, r := range s.queue {
			records = append(records, record{Free: r.addr, At: r.at})
		}
	}
	for _, r := range p.outside {
		records = append(records, record{Free: r.addr, At: r.at})
	}
	for _, a := range p.sorted() {
		records = append(records, record{Set: a})
	}
	return p.file.rewrite(records)
}
