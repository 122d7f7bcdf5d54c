#!/usr/bin/env bash
# kernels-guest.sh kinds|life|queues|costs|pace|queue|traffic|refused: kernels-test.sh runs this in a guest, in a tree with the
# program, the test binaries beside their packages, and the scripts. It covers only what depends on the kernel;
# `make test` covers everything.
set -euo pipefail
export LC_ALL=C
part=$1
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
tree=${here%/*}

echo "Linux $(uname -r), CPUs $(nproc), clocksource $(</sys/devices/system/clocksource/clocksource0/current_clocksource)"

# Linux has tcx from 6.6 on. The script states this itself, so that no test of tcx can be skipped unnoticed.
hook=tcx
[[ $(printf '%s\n' 6.6 "$(uname -r)" | sort -V | head -1) == 6.6 ]] || hook=clsact

# tests PACKAGE PATTERN...: runs these tests of a package. Each pattern must match a test, and all must pass. As in
# `go test -run`, slashes separate the patterns of subtests.
tests() {
	local package=$1 pattern name said=/tmp/said run began=$SECONDS count
	shift
	run=$(IFS='|'; echo "$*")
	cd "$tree/$package"
	if ! ./package.test -test.v -test.timeout 1800s -test.run "$run" >"$said" 2>&1; then
		grep -vE '^ *(=== |--- PASS)' "$said" || cat "$said"
		die "the tests of ./$package failed"
	fi
	for pattern; do
		name=${pattern%%/*}
		[[ $name == "$pattern" ]] || name+='/.*'
		grep -qE -- "--- PASS: ${name//[$^]/} " "$said" || die "no tests ran: ./$package has none for $pattern"
	done
	count=$(grep -c -- '--- PASS' "$said")
	echo "ok   ./$package: $count tests and subtests ($((SECONDS - began)) s)"
}

# flood: sends three times the rate. From the first packet on, at most capacity + rate * time may pass; once the bucket is
# full, exactly rate * time. The guest's clock counts instructions, so the host's load changes nothing.
flood() {
	local rate=4000000 capacity=65536 frame=1514 case="udp egress gcra $hook" begin first second bytes most expected
	serve "$far"
	"$SHAPECTL" -n "$near" set eth0 egress "${network[4]}" --rate $rate --capacity ${capacity}b --algorithm gcra >/dev/null
	grep -q "\"hook\": \"$hook\"" < <("$SHAPECTL" -n "$near" show eth0 -j) || die "$case: not attached to $hook"
	received 4
	bytes=$received
	now_us
	begin=$now
	send "$near" "${far_address[4]}" -u -b $((rate * 3)) -l $((frame - 42)) -t 60
	sleep 1
	now_us
	first=$now
	received 4
	most=$((capacity + rate * (now - begin) / 8000000)) bytes=$((received - bytes))
	((bytes <= most)) || die "$case: expected at most $most bytes, measured $bytes"
	bytes=$received
	sleep 3
	now_us
	second=$now
	received 4
	bytes=$((received - bytes)) expected=$((rate * (second - first) / 8000000))
	kill -0 "$client" 2>/dev/null || die "$case: iperf3: $(<"$tmp/client")"
	stop
	"$SHAPECTL" -n "$near" flush eth0 >/dev/null
	# Tolerates a packet at either end, and the time between reading the clock and the counters.
	if ((bytes < expected - 3 * frame - expected / 500 || bytes > expected + 3 * frame + expected / 500)); then
		die "$case: expected $expected bytes, measured $bytes"
	fi
	echo "ok   $case: $bytes bytes of $expected"
}

# stream: TCP must use at least 85 % of the rate, with the device's segmentation offload.
stream() {
	local rate=20000000 case="tcp ingress leaky $hook" begin bytes least most
	serve "$near"
	"$SHAPECTL" -n "$near" set eth0 ingress "${network[6]}" --rate $rate --algorithm leaky >/dev/null
	received 6
	bytes=$received
	now_us
	begin=$now
	send "$far" "${near_address[6]}" -t 60
	sleep 4
	now_us
	received 6
	bytes=$((received - bytes))
	kill -0 "$client" 2>/dev/null || die "$case: iperf3: $(<"$tmp/client")"
	stop
	"$SHAPECTL" -n "$near" flush eth0 >/dev/null
	# The default burst is 300 ms of the rate.
	least=$((rate * (now - begin) * 85 / 800000000)) most=$((rate * (now - begin + 310000) / 8000000))
	((bytes >= least && bytes <= most)) || die "$case: expected $least to $most bytes, measured $bytes"
	echo "ok   $case: $bytes bytes, expected $least to $most"
}

case $part in
kinds)
	# Each kind of program is accepted, decides as the model, and is attached by the hook that the kernel has.
	export SHAPECTL_NO_SKIP=1
	tests bpf TestKernelIsModel TestWithoutLinkHeader TestWireBytes$/./38/84/TCP$
	tests pkg/loader "TestFirstRuleAttachesAndLastDetaches/${hook}_egress"
	tests cmd/shapectl "TestPermissions/enough_with_$hook" TestNATKeys TestNATShares TestCgroupLimitsTraffic
	tests pkg/fq TestSetupAndRemove TestIfb TestReleases
	;;
life)
	# What happens to limits in force. These tests load many programs, and the newest kernel takes minutes for each of them.
	export SHAPECTL_NO_SKIP=1
	tests pkg/loader "TestUpgradeKeepsRulesBucketsAndCounters/${hook}_egress" "TestColoursOnTheWire/${hook}_egress" \
		"TestDeviceMovedToAnotherNamespace/$hook" "TestRenamedDevice/$hook" TestWireBytesThroughTunnels
	tests cmd/shapectl "TestUnconfirmed/$hook"
	# Before 6.4, bpf_redirect to an ifb loses packets; there is nothing between 6.1 and tcx here.
	ingress=(TestIngressThroughIfb TestLineQueues)
	[[ $hook == tcx ]] || ingress=(TestIngressOnOldKernel)
	tests cmd/shapectl TestDelayByHand "${ingress[@]}"
	;;
queues)
	# What depends on fq, which the machine that runs `make test` may lack: on one kernel.
	export SHAPECTL_NO_SKIP=1
	tests pkg/fq TestDeviceWithoutFQ TestConfiguredQdiscStays \
		TestKilledSetup TestLost TestSetupKeepsFilters TestStateCounts
	tests cmd/shapectl TestDelayRefused TestSetupFQ TestPatternsRemoveFQs TestQdiscReplacedSince TestLimitsOfFQ TestConfiguredQdisc \
		TestWatchSetsUpFQ TestAttachedAgainWithoutFQ TestKilledHalfWay TestNoHeaderNoIfb TestIfbGoesWithItsDevice TestApplyHoldsBack \
		TestLineSetsUpFQ TestLineLeavesOtherDevices TestLineOffBesideOthers
	;;
traffic)
	make_pair kernels
	flood
	stream
	;;
costs)
	export SHAPECTL_NO_SKIP=1
	tests internal/program TestCost
	sed -n "s/^cost: /$(uname -r)\t/p" /tmp/said
	;;
pace)
	# Time is virtual, here and in the next part, so the host's load changes no result.
	tests internal/wire TestRate TestBurst TestTimestamps/egress
	;;
queue)
	cases=(TestECN TestVLAN TestQueues TestLimitOfFlow TestLongestQueue TestTCP$ TestTCPSparseFirst)
	# Packets that a program redirects to an ifb leave it again from Linux 6.4 on.
	[[ $hook != tcx ]] || cases+=(TestIngress TestTimestamps/ingress TestTCPIngress)
	tests internal/wire "${cases[@]}"
	sed -nE 's/^ +[a-z_]+\.go:[0-9]+: /     /p' /tmp/said
	if [[ $hook == tcx ]]; then
		tests cmd/shapectl TestRTTOfPath TestRTTOfQueue
	else
		tests cmd/shapectl TestRTTRefused
	fi
	;;
refused)
	# An unusable kernel is refused in one line, and nothing is left behind.
	status=0
	"$SHAPECTL" set lo egress 10.0.0.0/8 --rate 1mbit >/tmp/out 2>/tmp/err || status=$?
	cat /tmp/err
	[[ $status == 2 || $status == 5 ]] || die "expected exit status 2 or 5, it was $status"
	[[ ! -s /tmp/out && $(wc -l </tmp/err) == 1 ]] || die "expected one line on stderr, and nothing else"
	grep -qE 'kernel|Linux' /tmp/err || die "expected an error that names the kernel"
	left=$(find /sys/fs/bpf -mindepth 1 -not -path /sys/fs/bpf/shapectl; tc qdisc show dev lo | grep clsact || true
		tc filter show dev lo egress 2>&1 || true)
	[[ ! $left ]] || die "left behind: $left"
	echo "ok   refused, exit status $status"
	;;
esac
