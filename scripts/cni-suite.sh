#!/usr/bin/env bash
# cni-suite.sh: runs the integration tests of the reference CNI plugins as they are, with shapectl-cni in place of bandwidth.
set -euo pipefail

cni=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/bin/shapectl-cni
export GOFLAGS=-modcacherw
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$(cd / && go mod download -json github.com/containernetworking/plugins@v1.9.1 | sed -n 's/.*"Dir": "\(.*\)",/\1/p')"/. "$work"
chmod -R u+w "$work"
cd "$work"
mkdir bin
go build -o bin/ ./plugins/main/{bridge,ptp} ./plugins/ipam/host-local
GOBIN=$work/tools go install github.com/containernetworking/cni/cnitool@v1.3.0
cp "$cni" bin/bandwidth
PATH=$PATH:$work/tools go test -count=1 -v ./integration -ginkgo.no-color
