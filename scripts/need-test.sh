#!/usr/bin/env bash
# need-test.sh: need.sh says what is missing, and installs it for root unless that is forbidden. A stub stands in for
# apt-get. Root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
umask 0
chmod 777 "$tmp"
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

try 'not root' 1 0 setpriv --reuid=65534 --clear-groups bash -s -- "${need[@]:1}" <"${need[0]}"
try 'SHAPECTL_INSTALL=no' 1 0 env SHAPECTL_INSTALL=no "${need[@]}"
try 'root' 0 2 "${need[@]}" </dev/null
