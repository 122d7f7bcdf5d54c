#!/usr/bin/env bash
# capture.sh [KERNEL [SET-UP]...]: writes anew what a kernel of scripts/kernel.sh (6.1 if none is named) says of set-ups here.
set -euo pipefail
cd "$(dirname "$0")/../.."
kernel=${1:-6.1}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
CGO_ENABLED=0 go test -c -trimpath -ldflags '-s -w' -o "$tmp/importer.test" .
modules=()
for module in veth ifb sch_{htb,tbf,ingress,hfsc,prio,netem,cake,fq,red,sfq} cls_{u32,fw,flower,matchall,basic,flow,bpf} em_cmp \
	act_{police,gact,mirred,skbedit,gate}; do
	modules+=(-M "$module")
done
setups=("${@:2}")
[[ ${setups[*]} ]] || setups=($(basename -s .tc testdata/tc/*.tc))
for name in "${setups[@]}"; do
	../../scripts/guest.sh "$kernel" "${modules[@]}" -f "$tmp/importer.test:/t/importer.test" -f "$PWD/testdata:/t/testdata" -p ip -p tc \
		-- sh -c "cd /t && ./importer.test -test.run '^TestCapture\$' -capture $name" >"$tmp/out" || { cat "$tmp/out" >&2; exit 1; }
	sed '/^PASS$/d' "$tmp/out" >"testdata/tc/$name.json"
done
