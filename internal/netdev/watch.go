// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
)

// resubscribeDelay is between two attempts to renew a lost subscription.
const resubscribeDelay = time.Second

// WatchAddresses returns a channel that gets a value after addresses of the
// namespace changed; changes in quick succession may come as one. The channel
// is closed when ctx ends.
func (n *Net) WatchAddresses(ctx context.Context) (<-chan struct{}, error) {
	return watch(ctx, n.subscribeAddresses, func(netlink.AddrUpdate) bool { return true })
}

// WatchLinks is WatchAddresses for devices: those that come, go or change, but
// for the pod links, which come and go all the time.
func (n *Net) WatchLinks(ctx context.Context) (<-chan struct{}, error) {
	return watch(ctx, n.subscribeLinks, func(u netlink.LinkUpdate) bool { return !isHostName(u.Attrs().Name) })
}

func (n *Net) subscribeAddresses(ctx context.Context) (<-chan netlink.AddrUpdate, error) {
	ch := make(chan netlink.AddrUpdate, 64)
	if err := netlink.AddrSubscribeAt(n.ns, ch, ctx.Done()); err != nil {
		return nil, fmt.Errorf("subscribe to address changes: %w", err)
	}
	return ch, nil
}

func (n *Net) subscribeLinks(ctx context.Context) (<-chan netlink.LinkUpdate, error) {
	ch := make(chan netlink.LinkUpdate, 64)
	if err := netlink.LinkSubscribeAt(n.ns, ch, ctx.Done()); err != nil {
		return nil, fmt.Errorf("subscribe to link changes: %w", err)
	}
	return ch, nil
}

// watch tells of the updates that are relevant. A subscription ends early when
// its socket overran: what was missed then is in the next listing.
func watch[U any](ctx context.Context, subscribe func(context.Context) (<-chan U, error), relevant func(U) bool) (<-chan struct{}, error) {
	updates, err := subscribe(ctx)
	if err != nil {
		return nil, err
	}
	out := make(chan struct{}, 1)
	go func() {
		defer close(out)
		for {
			for u := range updates {
				if relevant(u) {
					notify(out)
				}
			}
			if ctx.Err() != nil {
				return
			}
			for updates, err = subscribe(ctx); err != nil; updates, err = subscribe(ctx) {
				select {
				case <-ctx.Done():
					return
				case <-time.After(resubscribeDelay):
				}
			}
			notify(out)
		}
	}()
	return out, nil
}

func notify(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}
