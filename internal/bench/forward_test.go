// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// TestForward: each way sends on what it gets, and nothing is left behind.
func TestForward(t *testing.T) {
	nstest.Need(t)
	r, err := ForwardPlan{Rounds: 1, Duration: 10 * time.Millisecond, Clients: 8, Services: 100}.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, way := range r.Ways {
		if len(way.Rates) != 1 || way.Rates[0] < 1000 {
			t.Errorf("%s: %v datagrams a second", way.Name, way.Rates)
		}
	}
	var out strings.Builder
	if err := r.Print(&out); err != nil || !strings.Contains(out.String(), "iptables") {
		t.Errorf("print: %v\n%s", err, out.String())
	}
	names, err := netdev.ListNetNS()
	if err != nil {
		t.Fatal(err)
	}
	pins, err := filepath.Glob(filepath.Join(pinFolder, namePrefix+"*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(names, pins...) {
		if base := filepath.Base(name); strings.HasPrefix(base, fmt.Sprintf("%s%d-", namePrefix, os.Getpid())) && strings.HasSuffix(base, "-node") {
			t.Errorf("%s is still there", name)
		}
	}
}

func TestForwardRefuses(t *testing.T) {
	for _, p := range []ForwardPlan{{}, {Rounds: 1}, {Rounds: 1, Clients: 5000}, {Rounds: 1, Clients: 1, Services: -1}} {
		if _, err := p.Run(context.Background()); err == nil {
			t.Errorf("%+v: no error", p)
		}
	}
}
