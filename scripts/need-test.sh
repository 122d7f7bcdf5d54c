#!/usr/bin/env bash
# need-test.sh: need.sh tells what is missing, and installs it only where it may. A stub stands in for apt-get. Root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export PATH=$tmp:$PATH WANTED=$tmp/shapectl-test-wanted LOG=$tmp/log
unset SHAPECTL_INSTALL
cat >"$tmp/apt-get" <<'END'
#!/bin/sh
echo "$*" >>"$LOG"
[ "$1" != install ] || { echo '#!/bin/sh' >"$WANTED" && chmod +x "$WANTED"; }
END
chmod +x "$tmp/apt-get"
need=("$here/need.sh" 'make test' shapectl-test-wanted=wanted)

# try WHAT STATUS CALLS COMMAND...: CALLS is how often apt-get runs.
try() {
	local what=$1 status=0 calls
	rm -f "$WANTED" "$LOG"
	touch "$LOG"
	"${@:4}" >"$tmp/said" 2>&1 || status=$?
	calls=$(wc -l <"$LOG")
	if [[ $status != "$2" || $calls != "$3" ]] ||
		! grep -q 'make test needs shapectl-test-wanted.*apt-get install --no-install-recommends wanted' "$tmp/said"; then
		echo "FAIL need.sh, $what: expected status $2 and $3 calls of apt-get, got $status and $calls; it said: $(<"$tmp/said")"
		exit 1
	fi
	echo "ok   need.sh, $what"
}

# typed ANSWER: at a terminal.
typed() {
	echo "$1" | script -qec "${need[*]@Q}" /dev/null
}

try 'no terminal' 1 0 "${need[@]}" </dev/null
try 'SHAPECTL_INSTALL=yes' 0 2 env SHAPECTL_INSTALL=yes "${need[@]}" </dev/null
try 'a terminal, n' 1 0 typed n
try 'a terminal, y' 0 2 typed y
