// SPDX-License-Identifier: Apache-2.0

// Package enforce puts compiled network policy in force in the kernel such that
// each endpoint goes from its old rules to its new ones at once, and from a
// policy that cannot be installed nowhere.
//
// Each compiled policy (policy.Subject) gets a number, which is never used
// again, and its entries. A change is made in this order: entries of new
// subjects, classes that are new, the endpoints' subjects one by one, classes
// that nobody names any more, entries of old subjects. A class that comes or
// goes changes what the entries beside it match; so the old subjects get, before
// a class comes, the entries of the class that its addresses had until then, and
// new ones, while a class is still there, those of the class that they will
// have.
//
// The datapath judges an established connection again when the subject of one of
// its ends is another. That is also how a pod that takes on another identity
// is judged again by its peers: all subjects get new numbers.
package enforce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/statedb"

	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// Kernel is the policy map; *datapath/policy.Map is one.
type Kernel interface {
	Install(subject uint32, entries []policy.Entry) error
	Remove(subject uint32, entries []policy.Entry) error
	Prune(keep func(subject uint32) bool) error
	Subjects() (map[uint32]int, error)
	SetClass(p netip.Prefix, class uint64) error
	DeleteClass(p netip.Prefix) error
	Classes() (map[netip.Prefix]uint64, error)
	MaxEntries() int
}

// Endpoints sets the subject of attached pods.
type Endpoints interface {
	SetSubject(ips []netip.Addr, ifindex int, subject uint32) error
}

// Config is what an Enforcer needs.
type Config struct {
	Node       string // name of this node
	Tables     *state.Tables
	Identities *identity.Allocator
	Kernel     Kernel
	Endpoints  Endpoints
	Log        *slog.Logger
}

// installed is a subject in the kernel.
type installed struct {
	number  uint32
	entries []policy.Entry // with those made for classes in passing
}

// Enforcer keeps the kernel's policy in step with the tables.
type Enforcer struct {
	cfg Config

	mu         sync.Mutex // protects what follows; changes take turns
	compiler   policy.Compiler
	result     *policy.Result
	subjects   map[policy.SubjectKey]*installed
	endpoints  map[policy.EndpointID]uint32 // in force
	classes    map[netip.Prefix]uint64      // in the kernel
	numbered   map[netip.Prefix]uint64      // not yet in the kernel
	nextClass  uint64
	nextNumber uint32
	pending    map[string]*state.Pod // attached before their rows are there, by container
	identities map[netip.Addr]uint64 // of the last change
	revision   uint64
	changed    time.Time
	err        error
}

// New reads what an earlier agent left, so that numbers are not used again.
func New(c Config) (*Enforcer, error) {
	subjects, err := c.Kernel.Subjects()
	if err != nil {
		return nil, err
	}
	classes, err := c.Kernel.Classes()
	if err != nil {
		return nil, err
	}
	e := &Enforcer{
		cfg: c, classes: classes, nextClass: policy.FirstClass, nextNumber: 1,
		subjects: map[policy.SubjectKey]*installed{}, endpoints: map[policy.EndpointID]uint32{},
		numbered: map[netip.Prefix]uint64{}, pending: map[string]*state.Pod{}, identities: map[netip.Addr]uint64{},
	}
	for n := range subjects {
		e.nextNumber = max(e.nextNumber, n&^subjectIngress+1)
	}
	for _, n := range classes {
		e.nextClass = max(e.nextClass, n+1)
	}
	return e, nil
}

// Attach returns the subject of a pod that is about to be attached, once it is
// in force; 0 where no policy selects it. The pod counts as one of this node
// until Detach.
func (e *Enforcer) Attach(p *state.Pod) (uint32, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pending[p.ContainerID] = p
	err := e.apply()
	number, ok := e.endpoints[policy.Endpoint(p.Namespace, p.Name, p.IPs)]
	if err != nil && !ok {
		return 0, fmt.Errorf("policy of pod %s: %w", state.Key(p.Namespace, p.Name), err)
	}
	return number, nil
}

// Detach forgets a pod.
func (e *Enforcer) Detach(p *state.Pod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.pending, p.ContainerID)
	delete(e.endpoints, policy.Endpoint(p.Namespace, p.Name, p.IPs))
}

// Apply puts what follows from the tables as they are now in force.
func (e *Enforcer) Apply() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.apply()
}

// Prune removes what an earlier agent left; to be called once all pods of this
// node are attached.
func (e *Enforcer) Prune() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	numbers := map[uint32]bool{}
	for _, s := range e.subjects {
		numbers[s.number] = true
	}
	return e.cfg.Kernel.Prune(func(n uint32) bool { return numbers[n] })
}

// retry is how long a change that failed waits for its next attempt.
const retry = 2 * time.Second

// Run follows the tables until ctx ends.
func (e *Enforcer) Run(ctx context.Context) error {
	for {
		turn, stop := context.WithCancel(ctx)
		changed := e.watch(turn)
		err := e.Apply()
		if err != nil {
			e.cfg.Log.Error("policy is not in force as written; what was before stays", "err", err)
		}
		var again <-chan time.Time
		if err != nil {
			again = time.After(retry)
		}
		select {
		case <-ctx.Done():
			stop()
			return nil
		case <-changed:
		case <-again:
		}
		stop()
	}
}

// watch returns a channel that is closed after the next change of a row that
// policy depends on.
func (e *Enforcer) watch(ctx context.Context) <-chan struct{} {
	t := e.cfg.Tables
	txn := t.DB.ReadTxn()
	set := statedb.NewWatchSet()
	_, w := t.Policies.AllWatch(txn)
	set.Add(w)
	_, w = t.Namespaces.AllWatch(txn)
	set.Add(w)
	_, w = t.Workloads.AllWatch(txn)
	set.Add(w)
	_, w = t.Pods.AllWatch(txn)
	set.Add(w)
	_, w = t.Nodes.AllWatch(txn)
	set.Add(w)
	changed := make(chan struct{})
	go func() {
		defer close(changed)
		_, _ = set.Wait(ctx, 2*time.Millisecond) // gather what changes at once
	}()
	return changed
}

// apply makes one change. Callers hold mu.
func (e *Enforcer) apply() error {
	in, ifindexes, err := e.input()
	if err != nil {
		e.err = err
		return err
	}
	if e.othersIdentity(in.Pods) {
		e.renumber()
	}
	result := e.compiler.Compile(in)
	e.err = e.install(result, ifindexes)
	if e.err == nil {
		e.result = result
		e.revision++
		e.changed = time.Now()
	}
	return e.err
}

// othersIdentity says whether an address has another identity than at the last
// change, and remembers those of now.
func (e *Enforcer) othersIdentity(pods []policy.Pod) bool {
	now := make(map[netip.Addr]uint64, len(pods))
	other := false
	for _, p := range pods {
		for _, a := range p.IPs {
			now[a] = p.Identity
			before, known := e.identities[a]
			other = other || known && before != p.Identity
		}
	}
	e.identities = now
	return other
}

// renumber makes every subject a new one, so that the datapath judges all
// connections again. The old ones are removed when their endpoints have left.
func (e *Enforcer) renumber() {
	renamed := make(map[policy.SubjectKey]*installed, len(e.subjects))
	for k, s := range e.subjects {
		k[0] ^= 0xff // no subject has this key; install finds none of the result's
		renamed[k] = s
	}
	e.subjects = renamed
}

// install puts a result in force, or leaves everything as it was.
func (e *Enforcer) install(r *policy.Result, ifindexes map[policy.EndpointID]podLink) error {
	wanted := map[netip.Prefix]uint64{}
	for _, c := range r.Prefixes {
		wanted[c.Prefix] = c.Number
	}
	added, err := e.installSubjects(r, wanted)
	if err == nil {
		err = e.addClasses(wanted)
	}
	if err != nil {
		return errors.Join(err, e.removeSubjects(added))
	}
	if err := e.switchEndpoints(r, ifindexes); err != nil {
		return err
	}
	if err := e.dropClasses(wanted); err != nil {
		return err
	}
	return e.removeUnused(r)
}

// installSubjects writes the entries of subjects that are new.
func (e *Enforcer) installSubjects(r *policy.Result, wanted map[netip.Prefix]uint64) ([]policy.SubjectKey, error) {
	leaving := leavingClasses(e.classes, wanted)
	var added []policy.SubjectKey
	for key, s := range r.Subjects {
		if _, ok := e.subjects[key]; ok {
			continue
		}
		i := &installed{number: e.number(s), entries: inherit(s.Entries, leaving)}
		if err := e.cfg.Kernel.Install(i.number, i.entries); err != nil {
			return added, err
		}
		e.subjects[key] = i
		added = append(added, key)
	}
	return added, nil
}

// subjectIngress is set in the number of a subject whose ingress a policy judges
// (SUBJECT_INGRESS of bpf/lib/policy.h).
const subjectIngress uint32 = 1 << 31

// number returns one that no subject has had.
func (e *Enforcer) number(s *policy.Subject) uint32 {
	n := e.nextNumber
	e.nextNumber++
	if s.Ingress {
		n |= subjectIngress
	}
	return n
}

func (e *Enforcer) removeSubjects(keys []policy.SubjectKey) error {
	var errs []error
	for _, k := range keys {
		errs = append(errs, e.cfg.Kernel.Remove(e.subjects[k].number, e.subjects[k].entries))
		delete(e.subjects, k)
	}
	return errors.Join(errs...)
}

// addClasses makes classes that are new known; before that, subjects that do
// not speak of them get what their addresses had until now.
func (e *Enforcer) addClasses(wanted map[netip.Prefix]uint64) error {
	coming := leavingClasses(wanted, e.classes)
	if len(coming) == 0 {
		return nil
	}
	for _, s := range e.subjects {
		more := inherited(s.entries, coming)
		if err := e.cfg.Kernel.Install(s.number, more); err != nil {
			return err
		}
		s.entries = append(s.entries[:len(s.entries):len(s.entries)], more...)
	}
	for p, n := range wanted {
		if e.classes[p] == n {
			continue
		}
		if err := e.cfg.Kernel.SetClass(p, n); err != nil {
			return err
		}
		e.classes[p] = n
	}
	clear(e.numbered)
	return nil
}

func (e *Enforcer) dropClasses(wanted map[netip.Prefix]uint64) error {
	for p := range e.classes {
		if _, ok := wanted[p]; ok {
			continue
		}
		if err := e.cfg.Kernel.DeleteClass(p); err != nil {
			return err
		}
		delete(e.classes, p)
	}
	return nil
}

// switchEndpoints gives every pod of this node the subject that it now has.
func (e *Enforcer) switchEndpoints(r *policy.Result, links map[policy.EndpointID]podLink) error {
	for id, link := range links {
		number := uint32(0)
		if key, ok := r.Endpoints[id]; ok {
			number = e.subjects[key].number
		}
		if err := e.cfg.Endpoints.SetSubject(link.ips, link.ifindex, number); err != nil {
			return err
		}
		e.endpoints[id] = number
	}
	for id := range e.endpoints {
		if _, ok := links[id]; !ok {
			delete(e.endpoints, id)
		}
	}
	return nil
}

// removeUnused removes the subjects that no result names any more.
func (e *Enforcer) removeUnused(r *policy.Result) error {
	for key, s := range e.subjects {
		if _, ok := r.Subjects[key]; ok {
			continue
		}
		if err := e.cfg.Kernel.Remove(s.number, s.entries); err != nil {
			return err
		}
		delete(e.subjects, key)
	}
	return nil
}
