// SPDX-License-Identifier: Apache-2.0

// Package version names the build.
package version

import "runtime/debug"

// linked is set by the linker: -X …/internal/version.linked=v0.1.0-3-gabcdef.
var linked string

// String returns what `git describe` said when weft was built with make, else
// the commit that the Go tool recorded, else "unknown".
func String() string {
	if linked != "" {
		return linked
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		return fromBuildInfo(info)
	}
	return "unknown"
}

func fromBuildInfo(info *debug.BuildInfo) string {
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	revision := settings["vcs.revision"]
	if revision == "" {
		return "unknown"
	}
	if settings["vcs.modified"] == "true" {
		revision += "-dirty"
	}
	return revision
}
