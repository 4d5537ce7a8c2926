// SPDX-License-Identifier: Apache-2.0

// Package identity gives numbers to workloads: one number for each distinct
// (namespace, namespace labels, service account, pod labels). Kernel maps and
// policies speak of the numbers.
//
// A number means something on this node only. It is the same for the same
// content for as long as a workload uses it, also over restarts, and it never
// comes to mean something else: the counter is kept in a file beside the
// numbers and only grows.
package identity

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/cilium/statedb"

	"github.com/weft-mesh/weft/internal/state"
)

// Reserved identities, below First. They have no row in the table.
const (
	// Node is this node itself, whatever address of its own it uses, and every
	// process in its network namespace.
	Node uint64 = 1
	// RemoteNode is any other node of the cluster.
	RemoteNode uint64 = 2
	// World is everything outside of the cluster.
	World uint64 = 3
	// Unknown is an address of the cluster that no workload is known to have.
	Unknown uint64 = 4
	// First is the least number that a workload gets.
	First uint64 = 256
)

// reserveAhead is how many numbers the file says are used beyond those that
// are. A number that was handed out in any way is therefore below the counter
// that the next start reads.
const reserveAhead = 256

// DefaultGrace is how long an identity outlives its last workload.
const DefaultGrace = time.Hour

// Name returns the name of a reserved identity and the decimal number of any
// other.
func Name(id uint64) string {
	switch id {
	case Node:
		return "node"
	case RemoteNode:
		return "remote-node"
	case World:
		return "world"
	case Unknown:
		return "unknown"
	}
	return strconv.FormatUint(id, 10)
}

// Content is what an identity stands for. A nil map is an empty one; an empty
// service account is "default".
type Content struct {
	Namespace       string
	NamespaceLabels map[string]string
	ServiceAccount  string
	Labels          map[string]string
}

// key is a text that is equal for equal contents: json writes maps in the
// order of their keys.
func (c Content) key() (string, error) {
	b, err := json.Marshal([]any{c.Namespace, nonNil(c.NamespaceLabels), serviceAccount(c.ServiceAccount), nonNil(c.Labels)})
	if err != nil {
		return "", fmt.Errorf("encode identity of namespace %s: %w", c.Namespace, err)
	}
	return string(b), nil
}

func nonNil(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

func serviceAccount(s string) string {
	if s == "" {
		return "default"
	}
	return s
}

// Options are the settings of an Allocator.
type Options struct {
	// Grace is how long an identity stays that Prune finds unused; 0 means
	// DefaultGrace.
	Grace time.Duration
	// Floor is the largest number that something else than the file speaks of,
	// such as a kernel map: see Raise.
	Floor uint64
}

// Allocator hands out identities. It is the only writer of the identity table
// and safe for concurrent use.
type Allocator struct {
	path   string
	grace  time.Duration
	tables *state.Tables

	mu sync.Mutex // protects all below, and the file
	// next is the next number to hand out; reserved is what the file says is
	// the next. Invariant: next ≤ reserved whenever mu is free.
	next, reserved uint64
	byKey          map[string]*state.Identity
	unusedSince    map[uint64]time.Time // of identities that the last Prune found unused
}

// New reads the identities in the file at path, which need not exist yet, into
// the table. Its folder must exist. A file that is there and cannot be read is
// an error: to start numbering anew beside kernel maps that hold old numbers
// would give workloads the rights of others.
func New(path string, t *state.Tables, o Options) (*Allocator, error) {
	if o.Grace == 0 {
		o.Grace = DefaultGrace
	}
	a := &Allocator{
		path: path, grace: o.Grace, tables: t, next: First, reserved: First,
		byKey: map[string]*state.Identity{}, unusedSince: map[uint64]time.Time{},
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return a, a.Raise(o.Floor)
	}
	if err != nil {
		return nil, fmt.Errorf("read identities: %w", err)
	}
	c, err := decode(data)
	if err == nil {
		err = a.load(c)
	}
	if err != nil {
		return nil, fmt.Errorf("identity file %s: %w; restore it from a backup, or stop the node's pods and remove it "+
			"together with the pinned maps (pinPath) to number identities anew", path, err)
	}
	return a, a.Raise(o.Floor)
}

// Raise makes every number that is handed out from now on greater than floor,
// also over restarts. It is for numbers that are in use although the file, lost
// or out of date, does not know of them.
func (a *Allocator) Raise(floor uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if floor < a.next {
		return nil
	}
	if floor == math.MaxUint64 {
		return fmt.Errorf("number identities above %d: there is no such number", floor)
	}
	before := a.next
	a.next = floor + 1
	if err := a.save(); err != nil {
		a.next = before
		return err
	}
	return nil
}

// load takes over the content of a file and fills the table.
func (a *Allocator) load(c content) error {
	ids := map[uint64]bool{}
	for _, i := range c.Identities {
		key, err := contentOf(i).key()
		if err != nil {
			return err
		}
		switch {
		case i.ID < First || i.ID >= c.Next:
			return fmt.Errorf("identity %d: want a number from %d to %d", i.ID, First, c.Next-1)
		case ids[i.ID]:
			return fmt.Errorf("identity %d is there twice", i.ID)
		case a.byKey[key] != nil:
			return fmt.Errorf("identities %d and %d have the same content", a.byKey[key].ID, i.ID)
		}
		ids[i.ID] = true
		a.byKey[key] = i
	}
	a.next, a.reserved = c.Next, c.Next
	return a.commit(c.Identities, nil)
}

func contentOf(i *state.Identity) Content {
	return Content{Namespace: i.Namespace, NamespaceLabels: i.NamespaceLabels, ServiceAccount: i.ServiceAccount, Labels: i.Labels}
}

// Assign returns the number of one content; see AssignAll.
func (a *Allocator) Assign(namespace string, nsLabels map[string]string, serviceAccount string, labels map[string]string) (uint64, error) {
	ids, err := a.AssignAll([]Content{{namespace, nsLabels, serviceAccount, labels}})
	if err != nil {
		return 0, err
	}
	return ids[0], nil
}

// AssignAll returns the numbers of cs, in their order. New numbers are on disk
// and in the table when it returns, all with one write of the file; the maps of
// cs must not change afterwards. After an error none of the new ones is valid.
func (a *Allocator) AssignAll(cs []Content) ([]uint64, error) {
	keys := make([]string, len(cs))
	for i, c := range cs {
		var err error
		if keys[i], err = c.key(); err != nil {
			return nil, err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	ids := make([]uint64, len(cs))
	fresh := map[string]*state.Identity{}
	for i, c := range cs {
		row := a.byKey[keys[i]]
		if row == nil {
			row = fresh[keys[i]]
		}
		if row == nil {
			if a.next == math.MaxUint64 {
				return nil, errors.New("assign an identity: all numbers are used")
			}
			row = &state.Identity{ID: a.next, Namespace: c.Namespace, NamespaceLabels: c.NamespaceLabels,
				ServiceAccount: serviceAccount(c.ServiceAccount), Labels: c.Labels}
			a.next++
			fresh[keys[i]] = row
		}
		delete(a.unusedSince, row.ID)
		ids[i] = row.ID
	}
	if err := a.add(fresh); err != nil {
		return nil, err
	}
	return ids, nil
}

// add makes new identities durable, then visible. On an error they are
// forgotten; their numbers are not used again. Precondition: mu is held.
func (a *Allocator) add(fresh map[string]*state.Identity) error {
	if len(fresh) == 0 {
		return nil
	}
	rows := make([]*state.Identity, 0, len(fresh))
	for key, row := range fresh {
		a.byKey[key] = row
		rows = append(rows, row)
	}
	if err := a.save(); err != nil {
		for key := range fresh {
			delete(a.byKey, key)
		}
		return err
	}
	return a.commit(rows, nil)
}

// Lookup returns the row of a number. Reserved numbers have none.
func (a *Allocator) Lookup(id uint64) (*state.Identity, bool) {
	row, _, ok := a.tables.Identities.Get(a.tables.DB.ReadTxn(), state.IdentityByID.Query(id))
	return row, ok
}

// Prune drops the identities that are not in inUse and were not at any call, or
// assigned, since the grace period began, and returns how many those were. Call
// it from time to time with the numbers of all workloads and kernel state.
func (a *Allocator) Prune(inUse map[uint64]bool, now time.Time) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	gone := map[string]*state.Identity{}
	for key, row := range a.byKey {
		since, unused := a.unusedSince[row.ID]
		switch {
		case inUse[row.ID]:
			delete(a.unusedSince, row.ID)
		case !unused:
			a.unusedSince[row.ID] = now
		case now.Sub(since) >= a.grace:
			gone[key] = row
		}
	}
	if len(gone) == 0 {
		return 0, nil
	}
	rows := make([]*state.Identity, 0, len(gone))
	for key, row := range gone {
		delete(a.byKey, key)
		rows = append(rows, row)
	}
	if err := a.save(); err != nil {
		for key, row := range gone {
			a.byKey[key] = row
		}
		return 0, err
	}
	for _, row := range rows {
		delete(a.unusedSince, row.ID)
	}
	return len(rows), a.commit(nil, rows)
}

// commit changes the table in one transaction.
func (a *Allocator) commit(insert, remove []*state.Identity) error {
	txn := a.tables.DB.WriteTxn(a.tables.Identities)
	defer txn.Abort()
	if err := change(txn, a.tables.Identities, insert, remove); err != nil {
		return fmt.Errorf("write the identity table: %w", err)
	}
	txn.Commit()
	return nil
}

func change(txn statedb.WriteTxn, table statedb.RWTable[*state.Identity], insert, remove []*state.Identity) error {
	for _, row := range insert {
		if _, _, err := table.Insert(txn, row); err != nil {
			return err
		}
	}
	for _, row := range remove {
		if _, _, err := table.Delete(txn, row); err != nil {
			return err
		}
	}
	return nil
}
