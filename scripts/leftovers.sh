#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Prints what weft and its tests could leave behind on this machine, one a line:
# namespaces, links, pins, cgroups, run folders and processes. Two runs of it, before
# and after, tell whether something was left.
set -euo pipefail

find /run/netns -mindepth 1 -maxdepth 1 2>/dev/null | sed 's/^/netns /' || true
ip -o link show 2>/dev/null | awk -F': ' '{sub(/@.*/, "", $2); print "link " $2}'
find /sys/fs/bpf -mindepth 1 2>/dev/null | sed 's/^/pin /' || true
find /sys/fs/cgroup -mindepth 1 -type d -path '*weft*' 2>/dev/null | sed 's/^/cgroup /' || true
find /run /tmp -maxdepth 2 -name 'weft*' 2>/dev/null | grep -v ^/run/netns/ | sed 's/^/file /' || true
awk '{print $2}' /proc/mounts | grep weft | sed 's/^/mount /' || true
for p in /proc/[0-9]*; do
	[[ $(readlink "$p/exe" 2>/dev/null) == */weft* ]] && tr '\0' ' ' <"$p/cmdline" 2>/dev/null |
		sed "s|^|process ${p#/proc/} |;s|\$|\\n|"
done || true
