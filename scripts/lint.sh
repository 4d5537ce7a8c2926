#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks form: licence lines, gofmt, go vet, staticcheck, clang-format. Reports
# everything that is wrong before it fails.
set -euo pipefail
cd "$(dirname "$0")/.."

failed=0
# check NAME OUTPUT: a check passes when it has nothing to say.
check() {
	[[ -z $2 ]] && return
	printf 'lint: %s:\n%s\n' "$1" "$2" >&2
	failed=1
}

tracked() { git ls-files --cached --others --exclude-standard -- "$@"; }
existing() { while read -r f; do [[ -f $f ]] && echo "$f"; done; true; }

# Generated Go files have the mark of their generator instead.
without_spdx() {
	tracked '*.go' '*.c' 'bpf/lib/*.h' '*.sh' '.ci/run' 'Makefile' '*.proto' | existing | while read -r f; do
		head -n 5 "$f" | grep -q 'SPDX-License-Identifier: ' && continue
		head -n 5 "$f" | grep -q '^// Code generated .* DO NOT EDIT\.$' && continue
		echo "$f"
	done
}

c_format() {
	tracked 'bpf/*.c' 'bpf/lib/*.h' | existing |
		xargs -r clang-format-19 --style=file --dry-run 2>&1 | grep -E 'warning|error' || true
}

scripts_syntax() {
	tracked '*.sh' '.ci/run' | existing | while read -r f; do bash -n "$f" 2>&1; done || true
}

check "no SPDX line within the first five lines" "$(without_spdx)"
check "gofmt -l" "$(tracked '*.go' | existing | xargs -r gofmt -l)"
check "clang-format (fix with: make format)" "$(c_format)"
check "shell syntax" "$(scripts_syntax)"
check "go vet" "$(go vet ./... 2>&1 || true)"
check "staticcheck" "$(go tool staticcheck ./... 2>&1 || true)"
exit $failed
