#!/bin/bash -eu
# Builds every fuzz test that needs no kernel, for OSS-Fuzz and ClusterFuzzLite. Those in bpf/ load programs.
cd "$SRC/shapectl"
export GOFLAGS=-tags=nethttpomithttp2
printf 'package shapectl\nimport _ "github.com/AdamKorcz/go-118-fuzz-build/testing"\n' >fuzz.go
go mod tidy
grep -rhoP --include=*_test.go --exclude-dir=bpf '^func \KFuzz\w+' . | sort -u | while read -r fuzz; do
	folder=$(grep -rlP --include=*_test.go --exclude-dir=bpf "^func $fuzz\(" . | head -1 | xargs dirname)
	compile_native_go_fuzzer "github.com/shapectl/shapectl/${folder#./}" "$fuzz" "$fuzz"
done
