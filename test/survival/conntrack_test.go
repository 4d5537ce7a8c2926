// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/weft-mesh/weft/test/testlab"
)

// passTime is more than the collector ever waits between two passes.
const passTime = 75 * time.Second

// TestConnectionsAreCollected: connections that are over leave the table, IPv6
// like IPv4, and with them what masquerading had noted.
func TestConnectionsAreCollected(t *testing.T) {
	l := testlab.New(t)
	config := filepath.Join(t.TempDir(), "agent.yaml")
	lifetimes := "conntrack: {tcpSyn: 1s, tcpEstablished: 2s, tcpClosing: 1s, udp: 1s, udpReplied: 1s, other: 1s}\n"
	if err := os.WriteFile(config, []byte(lifetimes), 0o644); err != nil {
		t.Fatal(err)
	}
	l.Up(t, pod("a", "node1", "sleep, infinity")+pod("b", "node1", `weft, serve, echo, --port, "7"`), "--nodes", "1", "--agent-config", config)
	outside := l.Command(context.Background(), testlab.OnNode("outside", "weft", "serve", "echo", "--port", "7")...)
	if err := outside.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = outside.Process.Signal(os.Interrupt)
		_ = outside.Wait()
	})
	st, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var b []string
	for _, p := range st.Pods {
		if p.Name == "b" {
			b = p.IPs
		}
	}
	await(t, waitTime, func() error {
		_, err := l.Weft(t.Context(), testlab.InPod("default/a", "weft", "probe", b[0]+":7/udp", "["+b[1]+"]:7/udp", b[0]+":7", "["+b[1]+"]:7",
			"172.30.0.254:7/udp", "[fd00:172:30::fe]:7/udp", "172.30.0.254:7", "[fd00:172:30::fe]:7")...)
		return err
	})
	const connections, masqueraded = 8, 4
	await(t, waitTime, func() error {
		have, err := fills(t, l)
		if err == nil && (have["conntrack"] < connections || have["nat"] < masqueraded) {
			err = fmt.Errorf("maps have %v entries, want at least %d connections and %d that are masqueraded", have, connections, masqueraded)
		}
		return err
	})
	await(t, passTime, func() error {
		have, err := fills(t, l)
		if err == nil && have["conntrack"]+have["nat"] > 0 {
			err = fmt.Errorf("maps have %v entries, want no connections", have)
		}
		return err
	})
}

// fills are the entries of each map of node1's agent.
func fills(t *testing.T, l *testlab.Lab) (map[string]uint64, error) {
	t.Helper()
	st, err := l.Agent(t.Context(), "node1")
	if err != nil {
		return nil, err
	}
	entries := map[string]uint64{}
	for _, m := range st.Maps {
		entries[m.Name] = m.Entries
	}
	return entries, nil
}
