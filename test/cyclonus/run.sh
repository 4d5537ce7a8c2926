#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# All of cyclonus' cases against a lab, and its matcher against weft's compiler;
# as root. Arguments go to the program: run.sh -h tells which.
set -euo pipefail
cd "$(dirname "$0")"
go test -count=1 .
program=$(mktemp -d)
trap 'rm -rf "$program"' EXIT
go build -buildvcs=false -o "$program/cyclonus" .
../proberlab/clean.sh cyc "$program/cyclonus" "$@"
