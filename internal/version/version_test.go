// SPDX-License-Identifier: Apache-2.0

package version

import (
	"runtime/debug"
	"testing"
)

func TestFromBuildInfo(t *testing.T) {
	setting := func(kv ...string) *debug.BuildInfo {
		info := &debug.BuildInfo{}
		for i := 0; i < len(kv); i += 2 {
			info.Settings = append(info.Settings, debug.BuildSetting{Key: kv[i], Value: kv[i+1]})
		}
		return info
	}
	for _, c := range []struct {
		name, want string
		info       *debug.BuildInfo
	}{
		{"no version control", "unknown", setting()},
		{"clean tree", "abc", setting("vcs.revision", "abc", "vcs.modified", "false")},
		{"changed tree", "abc-dirty", setting("vcs.revision", "abc", "vcs.modified", "true")},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := fromBuildInfo(c.info); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}
