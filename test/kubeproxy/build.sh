#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds kube-proxy, kube-apiserver and etcd into a folder: build.sh [FOLDER].
# Minutes of compiling the first time; they go into Go's build cache.
set -euo pipefail
cd "$(dirname "$0")"
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/weft/kubeproxy}
version=v$(go list -m -f '{{.Version}}' k8s.io/kubernetes | tr -d v)
number=${version#v}
minor=${number#*.}
flags=
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	flags+=" -X $package.gitVersion=$version -X $package.gitMajor=${number%%.*} -X $package.gitMinor=${minor%%.*}"
done
mkdir -p "$folder"
GOGC=${GOGC:-400} nice -n 19 go build -buildvcs=false -trimpath -p "${JOBS:-1}" -ldflags "-s -w$flags" -o "$folder/kubeproxy" .
for component in etcd kube-apiserver kube-proxy; do
	ln -sf kubeproxy "$folder/$component"
done
echo "$folder"
