// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"os"

	"sigs.k8s.io/yaml"
)

// AgentConfig is what the lab chooses of an agent's configuration.
type AgentConfig struct {
	Node, RunDir, PinPath, CgroupRoot, Folder string
	Tunnel                                    string // "none" or "vxlan"
	// Extra is laid over the rest, key by key, so that a test can choose
	// anything else.
	Extra map[string]any
}

// Write writes the configuration file of an agent.
func (c AgentConfig) Write(file string) error {
	m := map[string]any{
		"node":       c.Node,
		"runDir":     c.RunDir,
		"pinPath":    c.PinPath,
		"cgroupRoot": c.CgroupRoot,
		"source":     map[string]any{"folder": c.Folder},
		"datapath":   map[string]any{"uplink": "eth0", "tunnel": c.Tunnel},
	}
	b, err := yaml.Marshal(merge(m, c.Extra))
	if err != nil {
		return fmt.Errorf("encode the configuration of the agent of %s: %w", c.Node, err)
	}
	if err := os.WriteFile(file, b, 0o644); err != nil {
		return fmt.Errorf("write the configuration of the agent of %s: %w", c.Node, err)
	}
	return nil
}

// merge lays over on top of m; maps are merged, everything else is replaced.
func merge(m, over map[string]any) map[string]any {
	for k, v := range over {
		below, ok1 := m[k].(map[string]any)
		above, ok2 := v.(map[string]any)
		if ok1 && ok2 {
			v = merge(below, above)
		}
		m[k] = v
	}
	return m
}
