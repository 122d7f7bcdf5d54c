#!/usr/bin/env bash
# capture.sh [KERNEL]: writes anew what a kernel of scripts/kernel.sh (6.1 if none is named) says of the set-ups here.
set -euo pipefail
cd "$(dirname "$0")/../.."
kernel=${1:-6.1}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
CGO_ENABLED=0 go test -c -trimpath -ldflags '-s -w' -o "$tmp/importer.test" .
modules=()
for module in veth sch_htb sch_tbf sch_ingress cls_u32 cls_fw cls_flower cls_matchall act_police act_gact act_mirred; do
	modules+=(-M "$module")
done
for setup in testdata/tc/*.tc; do
	name=$(basename "$setup" .tc)
	../../scripts/guest.sh "$kernel" "${modules[@]}" -f "$tmp/importer.test:/t/importer.test" -f "$PWD/testdata:/t/testdata" -p ip -p tc \
		-- sh -c "cd /t && ./importer.test -test.run '^TestCapture\$' -capture $name" >"$tmp/out" || { cat "$tmp/out" >&2; exit 1; }
	sed '/^PASS$/d' "$tmp/out" >"testdata/tc/$name.json"
done
