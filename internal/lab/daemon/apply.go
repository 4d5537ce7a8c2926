// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/model"
	"github.com/weft-mesh/weft/internal/lab/node"
	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/state"
)

// lastLook is how long agents that did not answer in time get after all, so
// that the message can say which ones do.
const lastLook = 2 * time.Second

// Decode reads manifest files; the errors of all of them are found.
func Decode(files []api.File) (objects []manifest.Object, errs []state.SourceError) {
	for _, f := range files {
		o, e := manifest.Decode(f.Name, f.Data)
		objects, errs = append(objects, o...), append(errs, e...)
	}
	return objects, errs
}

// apply takes the files in, all or nothing, and waits until they are in force.
func (l *Lab) apply(ctx context.Context, files []api.File) *api.Result {
	objects, errs := Decode(files)
	if len(errs) > 0 {
		return &api.Result{Refused: errs}
	}
	var changes []model.Change
	l.update(func(c *model.Cluster) { changes, errs = c.Apply(objects) })
	if len(errs) > 0 {
		return &api.Result{Refused: errs}
	}
	return &api.Result{Failures: l.await(ctx, l.announce(changes))}
}

// delete takes the objects of the files away and waits until they are gone.
func (l *Lab) delete(ctx context.Context, files []api.File) *api.Result {
	objects, errs := Decode(files)
	if len(errs) > 0 {
		return &api.Result{Refused: errs}
	}
	var changes []model.Change
	l.update(func(c *model.Cluster) { changes, errs = c.Delete(objects) })
	if len(errs) > 0 {
		return &api.Result{Refused: errs}
	}
	return &api.Result{Failures: l.await(ctx, l.announce(changes))}
}

func (l *Lab) announce(changes []model.Change) []model.ID {
	ids := make([]model.ID, 0, len(changes))
	for _, c := range changes {
		l.progress("%s: %s", c.ID, c.Outcome)
		ids = append(ids, c.ID)
	}
	return ids
}

// await returns when the objects are in force on every node, and otherwise what
// is not and why.
func (l *Lab) await(ctx context.Context, ids []model.ID) []string {
	lacks, generation, err := l.awaitPods(ctx, ids)
	var failures []string
	if err != nil {
		failures = append(failures, err.Error())
	}
	for _, lack := range lacks {
		failures = append(failures, l.describe(lack))
	}
	return append(failures, l.awaitAgents(ctx, generation)...)
}

// awaitPods waits until the pods are as the objects want them, or will not be.
func (l *Lab) awaitPods(ctx context.Context, ids []model.ID) ([]model.Lack, uint64, error) {
	for {
		l.mu.Lock()
		lacks, generation := l.cluster.Lacks(ids), l.folder.Generation()
		dirty, err, changed := l.dirty, l.folderErr, l.changed
		l.mu.Unlock()
		if !dirty && l.hopeless(lacks) {
			return lacks, generation, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return lacks, generation, err
		}
	}
}

// hopeless tells whether no lack will go away by waiting: a pod has failed for
// good, or its agent was stopped. It is true for no lacks.
func (l *Lab) hopeless(lacks []model.Lack) bool {
	return !slices.ContainsFunc(lacks, func(k model.Lack) bool {
		if k.Final {
			return false
		}
		n := l.node(k.Node)
		return n == nil || n.agent.State().Process != "stopped" || k.Why == "is terminating"
	})
}

func (l *Lab) describe(k model.Lack) string {
	if k.Pod == "" {
		return fmt.Sprintf("%s: %s", k.ID, k.Why)
	}
	l.mu.Lock()
	w := l.workers[k.Pod]
	l.mu.Unlock()
	if w != nil && !w.wired() && w.node.agent.State().Process == "stopped" {
		k.Why = "is not wired: " + node.ErrStopped.Error()
	}
	text := fmt.Sprintf("pod %s on %s: %s", k.Pod, k.Node, k.Why)
	if k.ID.Kind != "Pod" {
		text = k.ID.String() + ": " + text
	}
	if w == nil {
		return text
	}
	for _, ct := range slices.Concat(w.pod.Spec.InitContainers, w.pod.Spec.Containers) {
		text += lastLines(ct.Name, w.logPath(ct.Name))
	}
	return text
}

// awaitAgents waits until every agent has the generation in force.
func (l *Lab) awaitAgents(ctx context.Context, generation uint64) []string {
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(l.ctx, lastLook)
		defer cancel()
	}
	failures := make([][]string, len(l.nodes))
	var wg sync.WaitGroup
	for i, n := range l.nodes {
		wg.Go(func() { failures[i] = n.awaitApplied(ctx, generation) })
	}
	wg.Wait()
	return slices.Concat(failures...)
}

func (n *labNode) awaitApplied(ctx context.Context, generation uint64) []string {
	refused, err := n.agent.WaitApplied(ctx, generation)
	if errors.Is(err, node.ErrStopped) {
		return []string{fmt.Sprintf("%s: not in force: %v", n.Name, err)}
	}
	if err != nil {
		return []string{fmt.Sprintf("%s: not in force: %v%s", n.Name, err, lastLines("agent", n.lab.layout.AgentLog(n.Name)))}
	}
	var failures []string
	for _, r := range refused {
		failures = append(failures, fmt.Sprintf("%s: refused by the agent: %s", n.Name, r))
	}
	return failures
}

// agentVerb kills, starts or restarts an agent; a started one has everything in
// force when it returns.
func (l *Lab) agentVerb(ctx context.Context, name, verb string) *api.Result {
	n := l.node(name)
	if err := n.do(ctx, verb); err != nil {
		return &api.Result{Failures: []string{err.Error()}}
	}
	if verb == "kill" {
		l.progress("%s: agent killed", name)
		return &api.Result{}
	}
	l.mu.Lock()
	generation := l.folder.Generation()
	l.mu.Unlock()
	return &api.Result{Failures: n.awaitApplied(ctx, generation)}
}

func (n *labNode) do(ctx context.Context, verb string) error {
	switch verb {
	case "kill":
		return n.agent.Kill()
	case "restart":
		if err := n.agent.Stop(ctx); err != nil {
			return err
		}
		return n.startAgent(ctx)
	default:
		return n.startAgent(ctx)
	}
}
