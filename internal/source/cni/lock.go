// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"sync"
)

// locks has one lock for each container that somebody works on.
type locks struct {
	mu   sync.Mutex
	held map[string]*lock // protected by mu
}

type lock struct {
	sem   chan struct{} // holds one value while it is locked
	users int           // who holds it or waits for it; protected by locks.mu
}

// lock waits for the container's lock, or for the end of ctx.
func (l *locks) lock(ctx context.Context, containerID string) (unlock func(), err error) {
	k := l.use(containerID)
	select {
	case k.sem <- struct{}{}:
		return func() {
			<-k.sem
			l.leave(containerID, k)
		}, nil
	case <-ctx.Done():
		l.leave(containerID, k)
		return nil, ctx.Err()
	}
}

// busy says whether somebody holds the container's lock or waits for it.
func (l *locks) busy(containerID string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held[containerID] != nil
}

func (l *locks) use(containerID string) *lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.held[containerID]
	if k == nil {
		k = &lock{sem: make(chan struct{}, 1)}
		l.held[containerID] = k
	}
	k.users++
	return k
}

func (l *locks) leave(containerID string, k *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.users--; k.users == 0 {
		delete(l.held, containerID)
	}
}
