// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"testing"

	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

func TestCookie(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	var n *Net
	if err := a.Do(func() (err error) { n, err = Open(); return err }); err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	own, err := n.Cookie("")
	if err != nil {
		t.Fatal(err)
	}
	same, err := n.Cookie(a.Path())
	if err != nil || same != own {
		t.Errorf("own namespace by path: %d, %v, want %d", same, err, own)
	}
	other, err := n.Cookie(b.Path())
	if err != nil || other == own || other == 0 {
		t.Errorf("another namespace: %d, %v, own %d", other, err, own)
	}
	if _, err := n.Cookie("/nowhere"); !errors.Is(err, ErrNoNetns) {
		t.Errorf("no namespace: %v", err)
	}
}
