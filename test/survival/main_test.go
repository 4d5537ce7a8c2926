// SPDX-License-Identifier: Apache-2.0

// Package survival holds the long runs: agents that are killed again and again
// under load, a thousand pods that come and go, events that overflow. They run
// with WEFT_SLOW=1, as .ci/run has it.
package survival

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/weft-mesh/weft/test/testlab"
)

func TestMain(m *testing.M) { os.Exit(testlab.SlowMain(m)) }

// waitTime bounds the wait for what must come soon.
const waitTime = 30 * time.Second

// await looks again and again until look has nothing to complain about.
func await(t testing.TB, within time.Duration, look func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := look()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("after %v still: %v", within, err)
		}
	}
}

// pod is a manifest of a pod that runs a command.
func pod(name, node, command string) string {
	return `---
apiVersion: v1
kind: Pod
metadata: {name: ` + name + `, labels: {app: ` + name + `}}
spec:
  nodeName: ` + node + `
  terminationGracePeriodSeconds: 1
  containers: [{name: main, command: [` + command + `]}]
`
}
