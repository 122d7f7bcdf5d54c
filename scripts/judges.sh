#!/usr/bin/env bash
# judges.sh [TC-TESTS]: runs the judges of docs/judges.md that need a kernel with all of tc, in a guest whose clock counts
# instructions. TC-TESTS is the folder tools/testing/selftests/tc-testing/tc-tests of a Linux source tree; without it, only
# traffic is judged.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "${here%/*}"

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export CGO_ENABLED=0
go test -c -tags guest -trimpath -ldflags '-s -w' -o "$tmp/shapectl.test" ./cmd/shapectl
go test -c -trimpath -ldflags '-s -w' -o "$tmp/importer.test" ./internal/importer
call=(6.12 -i -t 3000 -p ip -p tc -f "$tmp:/judges" -f "$PWD/internal/importer/testdata:/judges/testdata" -f "$PWD/go.mod:/judges/go.mod")
for module in veth dummy sch_{htb,tbf,ingress,cake} cls_{u32,flower,matchall,bpf} act_{police,gact,mirred}; do
	call+=(-M "$module")
done
judges='SHAPECTL_NO_SKIP=1 ./shapectl.test -test.v -test.run "^TestTCPolice\$"'
if [[ ${1-} ]]; then
	call+=(-f "$1:/judges/tc-tests")
	judges+=' && ./importer.test -test.v -test.run "^TestCorpus\$" -corpus tc-tests'
fi
"$here/guest.sh" "${call[@]}" -- sh -c "cd /judges && $judges"
