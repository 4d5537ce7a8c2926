#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Shows weft on this machine: two nodes, native and then through VXLAN; who
# reaches whom, how fast beside plain veth and kernel forwarding, the flows, two
# tenants kept apart by policy, Services and a backend of theirs that dies under
# load, and the drops of a pod that sends from an address that is not its own. Exits 0 when all of it is as it should be, and takes
# everything down again.
set -euo pipefail
cd "$(dirname "$0")/.."

weft=$PWD/bin/weft
lab=demo$$
port=8080 # of the web servers of examples/basic
failures=0

down() { "$weft" lab --name "$lab" down >/dev/null 2>&1 || true; }
trap down EXIT
trap 'exit 130' INT TERM

section() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }
fail() {
	printf 'demo: WRONG: %s\n' "$*" >&2
	failures=$((failures + 1))
}
lab() { "$weft" lab --name "$lab" "$@"; }
status() { lab status -o json; }
node() { lab node exec "$1" -- "${@:2}"; }
nodes() { status | jq -r '.nodes[].name'; }

# pods LABEL prints NAMESPACE/NAME NODE IP... of each ready pod with app=LABEL.
pods() {
	status | jq -r --arg app "$1" '.pods[] | select(.labels.app == $app and .ready) |
		"\(.namespace)/\(.name) \(.node) \(.ips | join(" "))"'
}

# url IP prints the URL of the web server there.
url() { [[ $1 == *:* ]] && echo "http://[$1]:$port/" || echo "http://$1:$port/"; }

reach() {
	local client client_node _ server server_node ips ip where answer text
	printf '%-10s %-24s %-24s %-26s %s\n' where from to address answer
	while read -r client client_node _; do
		while read -r server server_node ips; do
			where=across
			[[ $client_node == "$server_node" ]] && where=same-node
			for ip in $ips; do
				answer=ok
				if ! text=$(lab exec "$client" -- weft get "$(url "$ip")" </dev/null 2>&1); then
					answer=FAILED
					fail "$client does not reach $server at $ip: $text"
				fi
				printf '%-10s %-24s %-24s %-26s %s\n' "$where" "$client" "$server" "$ip" "$answer"
				seen["$where"]=1
			done
		done < <(pods web)
	done < <(pods client)
	for where in same-node across; do
		[[ -n ${seen[$where]:-} ]] || fail "no pair of a client and a web server $where"
	done
}

# drops NODE prints its drop counters, REASON PACKETS a line.
drops() { node "$1" weft status -o json | jq -r '.drops[] | "\(.name) \(.packets)"'; }

# show_drops ALLOWED prints the counters of all nodes; only reasons that match may be there.
show_drops() {
	local n reason packets any
	for n in $(nodes); do
		any=
		while read -r reason packets; do
			printf '%-10s %-24s %s\n' "$n" "$reason" "$packets"
			any=1
			[[ $reason =~ ^($1)$ ]] || fail "$n has dropped $packets packets: $reason"
		done < <(drops "$n")
		[[ -n $any ]] || printf '%-10s %-24s 0\n' "$n" "every reason"
	done
}

spoofed() {
	local n
	for n in $(nodes); do drops "$n"; done | grep '^spoofed-address ' >/dev/null # -q would cut the loop off
}

spoof() {
	local deadline=$((SECONDS + 15))
	lab apply -f examples/spoof
	until spoofed; do
		((SECONDS < deadline)) || {
			fail "no packet of the spoofing pod was counted"
			return
		}
	done
}

# ask FROM TO WANT requests a page of the web server of a pod and says what
# became of it, which must be what the policy trace says: allowed or denied.
ask() {
	local from=$1 to=$2 want=$3 ip at got=denied trace
	read -r at ip < <(status | jq -r --arg to "$to" '.pods[] | select("\(.namespace)/\(.name)" == $to) | "\(.node) \(.ips[0])"')
	lab exec "$from" -- weft get --quiet --timeout 1s "$(url "$ip")" >/dev/null 2>&1 </dev/null && got=allowed
	trace=$(node "$at" weft policy trace --from "$from" --to "$to" --port "$port/TCP" -o json </dev/null |
		jq -r '.paths[0].ingress | "\(.verdict) \(.rule)"')
	printf '%-18s %-18s %-8s the trace of %s: %s\n' "$from" "$to" "$got" "$at" "$trace"
	[[ $got == "$want" ]] || fail "$from to $to is $got, not $want"
	[[ $trace == "${want/allowed/allow} "* || $trace == "${want/denied/deny} "* ]] || fail "the trace of $from to $to does not agree"
	[[ $got == allowed ]] && return
	node "$at" weft observe --since 10s --verdict dropped -o json --from-pod "$from" --to-pod "$to" </dev/null |
		jq -rn 'first(inputs) | "  dropped: \(.flow.source.namespace)/\(.flow.source.pod) to \(.flow.destination.namespace)/\(.flow.destination.pod), \(.flow.policy)"' |
		grep -F "${trace#* }" || fail "no drop names the rule of the trace"
}

policies() {
	lab apply -f examples/policy
	ask tenant-a/client tenant-a/web allowed
	ask tenant-b/client tenant-a/web denied
	ask tenant-a/client tenant-b/web denied
	node node1 weft policy status || fail "the policy of node1 is not in force"
	node node1 weft policy show tenant-a/web
}

flows() {
	local n
	for n in $(nodes); do
		node "$n" weft observe --since 1m "$@" | head -n 8 || true
	done
}

# from_outside COMMAND... runs it where clients outside of the cluster are.
from_outside() { ip netns exec "weft-$lab-underlay" "$@" </dev/null; }

# web_pids prints the processes of the first web server of the shop.
web_pids() {
	local folder
	folder=$(status | jq -r '[.pods[] | select(.namespace == "shop" and .labels.app == "web")][0].cgroup')
	find "$folder" -name cgroup.procs -exec cat {} +
}

services() {
	local address trace answered out
	lab apply -f examples/services
	node node1 weft service list
	printf '\nby name, through the DNS server that is a pod behind a Service:\n'
	lab exec shop/client -- weft get http://web/ || fail "the pod does not reach http://web/"
	printf '\nfrom outside, at port 30080 of each node:\n'
	for address in $(status | jq -r '.nodes[].ips[]'); do
		[[ $address == *:* ]] && address="[$address]"
		from_outside "$weft" get "http://$address:30080/" || fail "$address:30080 does not answer"
	done
	printf '\na backend dies under 200 requests a second:\n'
	out=$(mktemp)
	lab exec shop/client -- weft get --quiet --count 0 --rate 200 --duration 3s --timeout 1s --servers http://web/ >"$out" 2>&1 &
	sleep 1
	web_pids | xargs kill -9
	wait $! || true # what was under way in that server may have failed
	cat "$out"
	rm -f "$out"
	lab exec shop/client -- weft get --quiet --count 300 --rate 300 --servers http://web/ || fail "requests fail after a backend died"
	printf '\nwhich backend would a connection get, and why:\n'
	address=$(lab exec shop/client -- weft resolve web.shop.svc.cluster.local | grep -Eo '([0-9]+\.){3}[0-9]+' | head -n 1)
	node node1 weft service trace --from shop/client "$address:80"
	trace=$(node node1 weft service trace --from shop/client "$address:80" -o json | jq -r '.backends[].pod')
	answered=$(lab exec shop/client -- weft get http://web/ | sed 's/.*"server":"\([^"]*\)".*/\1/')
	grep -qx "shop/$answered" <<<"$trace" || fail "$answered answered, which the trace does not name"
}

run() {
	local -A seen=()
	section "$1: two nodes from examples/basic"
	lab up -f examples/basic --nodes 2 --tunnel "$2"
	lab status
	section "$1: who reaches whom, over HTTP"
	reach
	section "$1: drops so far"
	show_drops none
	section "$1: 200-byte round trips beside plain veth and kernel forwarding"
	"$weft" bench net --lab "$lab" --loads rr --duration 200ms --warmup 50ms --calibration 200ms 2>/dev/null ||
		fail "the measurement ended early"
	section "$1: some flows"
	flows
	section "$1: two tenants, kept apart by policy"
	policies
	section "$1: Services"
	services
	section "$1: a pod that sends from an address that is not its own"
	spoof
	flows --verdict dropped
	show_drops 'spoofed-address|policy'
	section "$1: taking it down"
	lab down
}

run native none
run vxlan vxlan

left=$(scripts/leftovers.sh | grep -F "$lab" || true)
[[ -z $left ]] || fail "left behind: $left"
printf '\n== demo: %d s, %d wrong\n' "$SECONDS" "$failures"
((failures == 0))
