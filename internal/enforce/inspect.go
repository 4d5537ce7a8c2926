// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/weft-mesh/weft/internal/policy"
)

// Status is what is in force.
type Status struct {
	Revision   uint64 // of changes put in force by this agent
	Generation uint64 // of the manifest folder, that the change is of
	Changed    time.Time
	Policies   int
	Subjects   int // distinct compiled policies of this node's pods
	Endpoints  int // pods of this node that a policy selects
	Entries    int
	MaxEntries int
	Classes    int
	Problems   []policy.Problem // what is not enforced as written
	Err        error            // why the last change is not in force; nil where it is
}

// ErrNotYet is returned before the first change is in force.
var ErrNotYet = errors.New("no policy was compiled yet")

// Status returns what is in force.
func (e *Enforcer) Status() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := Status{
		Revision: e.revision, Generation: e.generation, Changed: e.changed, Subjects: len(e.subjects), Classes: len(e.classes),
		MaxEntries: e.cfg.Kernel.MaxEntries(), Err: e.err,
		Policies: e.cfg.Tables.Policies.NumObjects(e.cfg.Tables.DB.ReadTxn()),
	}
	for _, list := range [][]*installed{slices.Collect(maps.Values(e.subjects)), slices.Collect(maps.Values(e.adopted)), e.retired, e.garbage} {
		for _, i := range list {
			s.Entries += len(i.entries)
		}
	}
	for _, n := range e.endpoints {
		if n != 0 {
			s.Endpoints++
		}
	}
	if e.result != nil {
		s.Problems = e.result.Problems
	}
	return s
}

// Result returns the compiled state that is in force.
func (e *Enforcer) Result() (*policy.Result, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.result == nil {
		return nil, ErrNotYet
	}
	return e.result, nil
}

// State returns the compiled state that is in force, and the pods of the cluster
// that it is for.
func (e *Enforcer) State() (*policy.Result, []policy.Pod, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.result == nil {
		return nil, nil, ErrNotYet
	}
	return e.result, e.pods, nil
}

// RuleName names the rule of a drop event.
func (e *Enforcer) RuleName(number uint32) string {
	r, err := e.Result()
	if err != nil {
		return fmt.Sprintf("rule %d", number)
	}
	return r.Rule(number).String()
}
