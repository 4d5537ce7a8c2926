#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# clean.sh PREFIX COMMAND... runs a command that makes labs with package proberlab
# and removes those of them that it left, which it does only when it is killed
# or panics. It ends with the command's exit code.
set -euo pipefail
prefix=$1
shift
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/weft-$prefix-run-XXXXXX")
export TMPDIR
clean() {
	shopt -s nullglob
	for lab in "$TMPDIR/weft-$prefix-"*/labs/*/; do
		echo "clean: removing the lab $(basename "$lab")" >&2
		WEFT_LAB_DIR=$(dirname "$lab") "$(dirname "$lab")/../bin/weft" lab --name "$(basename "$lab")" down || true
	done
	rm -rf "$TMPDIR"
}
trap clean EXIT
"$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' INT TERM
# A signal ends the first wait early.
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child" || code=$?; done
exit "$code"
