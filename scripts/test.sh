#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs all Go tests and prints a summary at the end. In CI it fails as well when
# the tests left something behind on the machine. Arguments go to go test.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(./...)
if [[ ${1:-} == ./* ]]; then
	packages=("$1")
	shift
fi
before=$(scripts/leftovers.sh | sort)
status=0
go test -json -count=1 -timeout "${TEST_TIMEOUT:-15m}" "$@" "${packages[@]}" |
	go run ./scripts/testsummary || status=$?
if [[ -n ${CI:-} ]]; then
	left=$(comm -13 <(echo "$before") <(scripts/leftovers.sh | sort) | sed '/^$/d')
	if [[ -n $left ]]; then
		printf 'test: left behind on this machine:\n%s\n' "$left" >&2
		status=1
	fi
fi
exit $status
