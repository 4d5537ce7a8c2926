#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# What network policy costs: round trips and connections to a pod that 10 or
# 1,000 policies select, beside one that none does; on one node, in turns.
# Arguments go to weft bench rr, such as --duration 1s --rounds 9.
set -euo pipefail
cd "$(dirname "$0")/.."

weft=$PWD/bin/weft
lab=polbench
folder=$(mktemp -d)

down() { "$weft" lab --name "$lab" down >/dev/null 2>&1 || true; }
trap 'down; rm -rf "$folder"' EXIT

# server N is a pod that N policies select, each of another client's.
server() {
	cat <<YAML
apiVersion: v1
kind: Pod
metadata: {name: server$1, namespace: bench, labels: {app: server$1}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: weft, command: [weft, serve, echo]}]
---
YAML
	for ((i = 1; i <= $1; i++)); do
		cat <<YAML
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: server$1-$i, namespace: bench}
spec:
  podSelector: {matchLabels: {app: server$1}}
  ingress: [{from: [{podSelector: {matchLabels: {app: client, number: "$i"}}}]}, {from: [{podSelector: {matchLabels: {app: client}}}]}]
---
YAML
	done
}

{
	cat <<YAML
apiVersion: v1
kind: Namespace
metadata: {name: bench}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: bench, labels: {app: client}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: weft, command: [weft, serve, echo]}]
---
YAML
	server 0
	server 10
	server 1000
} >"$folder/bench.yaml"

"$weft" lab --name "$lab" up -f "$folder" --nodes 1 2>/dev/null
echo "policies in force: $("$weft" lab --name "$lab" node exec node1 -- "$weft" policy status | tr '\n' ' ')"

path() {
	local ip
	ip=$("$weft" lab --name "$lab" status -o json | jq -r --arg pod "server$1" '.pods[] | select(.name == $pod) | .ips[0]')
	echo "weft-$lab-pod-bench-client,weft-$lab-pod-bench-server$1,$ip"
}
for n in 10 1000; do
	echo "== $n policies (A) beside none (B)"
	"$weft" bench rr --pair-a "$(path $n)" --pair-b "$(path 0)" -c 1,16 "$@"
	"$weft" bench rr --pair-a "$(path $n)" --pair-b "$(path 0)" --connect-per-request "$@"
done
