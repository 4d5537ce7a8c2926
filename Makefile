# SPDX-License-Identifier: Apache-2.0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.PHONY: build build-arm64 check-generated clean demo format generate help lint setup test test-unit

VERSION ?= $(shell git describe --always --dirty --tags 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X github.com/weft-mesh/weft/internal/version.linked=$(VERSION)
# The version comes from git describe, so the Go tool need not ask git as well.
GOBUILD := CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'

# The pinned compiler of the kernel programs; see scripts/setup.sh.
export BPF2GO_CC := clang-19
export BPF2GO_STRIP := llvm-strip-19

help: ## what there is to make
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install the Debian packages that the other targets need (root)
	@scripts/setup.sh all

build: ## bin/weft and bin/weft-cni; needs nothing but Go
	@mkdir -p bin
	$(GOBUILD) -o bin/ ./cmd/...

build-arm64: ## the same for arm64, in bin/arm64
	@mkdir -p bin/arm64
	GOOS=linux GOARCH=arm64 $(GOBUILD) -o bin/arm64/ ./cmd/...

generate: ## kernel objects and their Go (clang), protobuf Go (protoc)
	@scripts/setup.sh generate
	go generate ./internal/datapath/...
	@if [[ -x api/generate.sh ]]; then echo api/generate.sh; api/generate.sh; fi

check-generated: ## fail when generating again changes a committed file
	@scripts/setup.sh generate
	@scripts/check-generated.sh

lint: ## licence lines, gofmt, vet, staticcheck, clang-format
	@scripts/setup.sh lint
	@scripts/lint.sh

format: ## gofmt and clang-format, in place
	@scripts/setup.sh lint
	@gofmt -w $$(git ls-files '*.go')
	@git ls-files 'bpf/*.c' 'bpf/lib/*.h' | xargs -r clang-format-19 --style=file -i

test: build ## every test, as root; leaves nothing behind
	@scripts/setup.sh test
	@scripts/test.sh

test-unit: ## the tests that need no privileges; the others are skipped
	@go test -count=1 -short ./...

demo: build ## two nodes on this machine: who reaches whom, how fast, and the flows (root)
	@scripts/setup.sh demo
	@scripts/demo.sh

clean: ## remove bin
	rm -rf bin
