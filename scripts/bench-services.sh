#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# What services cost at 10 to 50,000 of them, beside a real kube-proxy in both
# of its modes; as root. The first run compiles kube-proxy, some ten minutes.
# Arguments go to weft bench services, such as --rounds 9 -o json.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${XDG_CACHE_HOME:-$HOME/.cache}/weft/kubeproxy
if [ ! -x "$folder/kube-proxy" ]; then
	echo "compiling kube-proxy into $folder" >&2
	test/kubeproxy/build.sh "$folder" >&2
fi
exec bin/weft bench services --kube-proxy "$folder" "$@"
