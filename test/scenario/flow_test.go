// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/weft-mesh/weft/test/testlab"
)

// flow waits for a flow whose fields have these values: fields of `weft observe
// -o json`, with dots for those inside of others.
func flow(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: flow NODE FIELD=VALUE...")
	}
	look := func() error {
		out, err := labOf(ts).Weft(ctxOf(ts), testlab.OnNode(args[0], "weft", "observe", "-o", "json")...)
		if err != nil {
			return err
		}
		return findFlow(out, args[1:])
	}
	if !neg {
		await(ts, look)
		return
	}
	if look() == nil {
		ts.Fatalf("there is a flow with %s", strings.Join(args[1:], " "))
	}
}

func findFlow(lines string, want []string) error {
	for line := range strings.Lines(lines) {
		var item struct{ Flow map[string]any }
		if err := json.Unmarshal([]byte(line), &item); err != nil {
			return fmt.Errorf("read a flow: %w: %s", err, line)
		}
		if item.Flow != nil && hasAll(item.Flow, want) {
			return nil
		}
	}
	return fmt.Errorf("no flow with %s among:\n%s", strings.Join(want, " "), lines)
}

func hasAll(flow map[string]any, want []string) bool {
	for _, w := range want {
		field, value, _ := strings.Cut(w, "=")
		var have any = flow
		for _, name := range strings.Split(field, ".") {
			inside, _ := have.(map[string]any)
			have = inside[name]
		}
		if fmt.Sprint(have) != value {
			return false
		}
	}
	return true
}
