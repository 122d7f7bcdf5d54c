#!/usr/bin/env bash
# demo-test.sh: runs the demo to its end, and interrupts it at several times. It must leave nothing behind.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# The kernel has files of its own at the top of a bpffs, which the demo may be the first to mount.
list_pins() {
	find /sys/fs/bpf -mindepth 2 -type f | sort
}

left_over() {
	ip netns list | grep "^demo-$demo-" || true
	comm -13 <(echo "$pins") <(list_pins)
	# The demo leads a process group of its own.
	if kill -0 -- "-$demo" 2>/dev/null; then echo "processes of group $demo"; fi
}

# try SIGNAL SECONDS STATUS: signal 0 lets the demo end by itself.
try() {
	local status=0 start=$SECONDS
	# A background process would ignore INT, which Ctrl-C sends.
	setsid env --default-signal=INT "$here/demo.sh" >"$log" 2>&1 &
	demo=$!
	if [[ $1 != 0 ]]; then
		sleep "$2"
		kill -"$1" "$demo" || true
	fi
	wait "$demo" || status=$?
	# Killed processes may take a moment to end.
	for _ in {1..20}; do
		kill -0 -- "-$demo" 2>/dev/null || break
		sleep 0.1
	done
	found=$(left_over)
	if [[ $found || $status != "$3" ]]; then
		echo "FAIL demo, signal $1 after $2 s: expected status $3 and nothing left, got $status and '$found'"
		cat "$log"
		failed=$((failed + 1))
	else
		echo "ok   demo, signal $1 after $2 s, took $((SECONDS - start)) s"
		passed=$((passed + 1))
	fi
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 failed=0
pins=$(list_pins) # of this machine

try 0 0 0
cat "$log"
for after in 0.1 0.3 0.6 2 4 9; do
	try INT $after 130
	try TERM $after 143
done
echo "$passed passed, $failed failed"
((failed == 0))
