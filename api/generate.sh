#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Makes the Go code of the protobufs in this folder anew, beside them. Needs
# protoc (Debian: protobuf-compiler, libprotobuf-dev); its Go plugins are the ones pinned in
# go.mod. The output is the same for the same protoc version.
set -eu

want=3.21.12 # of Debian 12 and 13; it is written into the generated files

cd "$(dirname "$0")/.."
command -v protoc >/dev/null || {
	echo "api/generate.sh: protoc is not installed: apt-get install protobuf-compiler libprotobuf-dev" >&2
	exit 1
}
have=$(protoc --version | cut -d' ' -f2)
[ "$have" = "$want" ] || {
	echo "api/generate.sh: protoc $have: want $want, so that everybody generates the same" >&2
	exit 1
}

bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
go build -o "$bin" google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
PATH="$bin:$PATH"

protoc -I . \
	--go_out=. --go_opt=paths=source_relative \
	--go-grpc_out=. --go-grpc_opt=paths=source_relative \
	$(find api -name '*.proto' | LC_ALL=C sort)
