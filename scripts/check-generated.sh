#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Generates again and fails when the result is not what is committed.
set -euo pipefail
cd "$(dirname "$0")/.."

make --no-print-directory generate
changed=$(git status --porcelain -- api 'internal/**/*_bpf*.go' 'internal/**/*.o')
if [[ -n $changed ]]; then
	printf 'check-generated: these differ from what is committed (run make generate and commit):\n%s\n' "$changed" >&2
	clang-19 --version | head -n 1 >&2
	git --no-pager diff --stat -- api internal >&2
	exit 1
fi
echo "check-generated: generated files are as committed"
