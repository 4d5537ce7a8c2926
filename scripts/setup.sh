#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what a make target needs beside Go, git and make, where it is missing.
#
#   scripts/setup.sh LEVEL...      levels: generate, lint, test, demo, all
#
# Quiet and repeatable: with everything in place it runs no apt at all, and it
# fetches the package index only when the one that is there does not do.
# Building needs no level: generated code is committed.
set -euo pipefail

# The compiler whose output is committed. Another build of the same upstream
# version is taken where this one cannot be had; `make check-generated` then says
# whether it makes the same objects.
llvm=1:19.1.7-3~deb12u1

# packages LEVEL prints the level's packages, each with the command that shows
# that it is there and the version it is pinned to, if any.
packages() {
	case $1 in
	generate)
		echo "clang-19 clang-19 $llvm"
		echo "llvm-19 llvm-strip-19 $llvm"
		echo "protobuf-compiler protoc"
		;;
	lint)
		echo "clang-format-19 clang-format-19 $llvm"
		;;
	test)
		echo "iproute2 ip"
		echo "iputils-ping ping"
		;;
	demo)
		packages test
		echo "jq jq"
		;;
	all)
		packages generate
		packages lint
		packages demo
		;;
	*)
		echo "setup: no level $1: it is one of generate, lint, test, demo, all" >&2
		return 2
		;;
	esac
}

# spec NAME VERSION prints what to ask apt for: the pinned version if it is on
# offer, else the package as it comes.
spec() {
	if [[ -n $2 ]] && apt-cache madison "$1" | grep -qF " $2 "; then
		echo "$1=$2"
	else
		echo "$1"
	fi
}

wanted=() pins=()
read_levels() {
	local level list name command version
	for level in "$@"; do
		list=$(packages "$level")
		while read -r name command version; do
			command -v "$command" >/dev/null && continue
			wanted+=("$name") pins+=("${version:-}")
		done <<<"$list"
	done
}

# install asks apt for all that is wanted; its output is shown only on failure.
install() {
	local specs=() i log
	for i in "${!wanted[@]}"; do
		specs+=("$(spec "${wanted[i]}" "${pins[i]}")")
	done
	log=$(DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
		"${specs[@]}" 2>&1) && return
	echo "$log"
	return 1
}

main() {
	(($#)) || set -- all
	read_levels "$@"
	((${#wanted[@]})) || return 0
	if ! command -v apt-get >/dev/null; then
		echo "setup: missing: ${wanted[*]}; this script installs Debian packages only" >&2
		return 1
	fi
	if ((EUID)); then
		echo "setup: missing: ${wanted[*]}; installing them needs root" >&2
		return 1
	fi
	echo "setup: installing ${wanted[*]}" >&2
	install >/dev/null && return
	apt-get update -q >/dev/null 2>&1 || echo "setup: apt-get update reported errors; going on" >&2
	install >&2
}

main "$@"
