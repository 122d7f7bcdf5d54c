#!/usr/bin/env bash
# netns-test.sh [--quick|--brief]: holds real TCP and UDP to a rate and measures what arrives. Each case is one line; the
# last line says how many passed. --quick takes a minute; --brief half of it, with one kind of hook. $SHAPECTL is the
# program under test, ./bin/shapectl by default.
set -euo pipefail
export LC_ALL=C
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

seconds=10 brief=0
case ${1-} in
'') ;;
--quick) seconds=3 ;;
--brief) seconds=3 brief=1 ;;
*) die "usage: ${0##*/} [--quick|--brief]" ;;
esac

# In namespaces of its own, whose first process it is, so that shapectl sees no rules and pins of this machine.
if [[ ! ${ALONE-} ]]; then
	[[ $EUID -eq 0 ]] || die "making namespaces needs root: run it with sudo"
	ALONE=1 exec unshare --mount --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi
mount -t bpf -o mode=0700 bpf /sys/fs/bpf
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
make_pair netns-test

# Static neighbours: neighbour discovery is never limited, so it would be counted as arrived and not as passed.
for family in 4 6; do
	ip -n "$near" neighbour add "${far_address[$family]}" lladdr 02:00:00:00:00:02 dev eth0
	ip -n "$far" neighbour add "${near_address[$family]}" lladdr 02:00:00:00:00:01 dev eth0
done

passed=0 failed=0
pass() {
	echo "ok   $case: $*"
	passed=$((passed + 1))
}
fail() {
	echo "FAIL $case: $*"
	failed=$((failed + 1))
}

# amount BYTES: prints kB or MB.
amount() {
	if (($1 < 10000000)); then
		echo "$(($1 / 1000)).$(($1 / 100 % 10)) kB"
	else
		echo "$(($1 / 1000000)).$(($1 / 100000 % 10)) MB"
	fi
}

# deviation MEASURED EXPECTED: sets $deviation (parts in 10,000) and $percent.
deviation() {
	deviation=$((($1 - $2) * 10000 / $2))
	local size=${deviation#-} sign=+
	((deviation < 0)) && sign=-
	printf -v percent '%s%d.%02d %%' "$sign" $((size / 100)) $((size % 100))
}

# limit SET-ARGUMENT...: a rule on the near eth0.
limit() { "$SHAPECTL" -n "$near" "$@" >"$tmp/shapectl" 2>&1; }

# read_rule: sets the array `rule` to the numbers in `show -j` of the only rule.
read_rule() {
	local name value
	declare -gA rule=()
	while IFS=: read -r name value; do
		rule[$name]=$value
	done < <("$SHAPECTL" -n "$near" show eth0 -j | tr -d ' \t"{}[]' | tr ',' '\n' | grep -E '^[a-z_]+:[0-9]+$')
}

# tc_state: prints eth0's qdiscs and filters, without tcx. A clsact qdisc may stay: alone it does nothing.
tc_state() {
	tc -n "$near" qdisc show dev eth0 | grep -v '^qdisc clsact'
	tc -n "$near" filter show dev eth0 ingress 2>&1 || true
	tc -n "$near" filter show dev eth0 egress 2>&1 || true
}

# settle: waits for connections of the last case to end. Their packets would be counted in this case.
settle() {
	local ns
	for ns in "$near" "$far"; do
		for _ in {1..50}; do
			[[ $(ss -N "$ns" -Htn state fin-wait-1 state closing state last-ack) ]] || break
			pause 0.1
		done
	done
}

# start_case: sets the rule, checks its hook, and starts the server, for udp and tcp.
# Arguments: FAMILY DIRECTION ALGORITHM RATE
start_case() {
	local family=$1 direction=$2 algorithm=$3 rate=$4
	settle
	state_before=$(tc_state)
	if [[ $direction == egress ]]; then
		from=$near to=$far to_address=${far_address[$family]}
	else
		from=$far to=$near to_address=${near_address[$family]}
	fi
	serve "$to"
	if ! limit set eth0 "$direction" "${network[$family]}" --rate "$rate" --algorithm "$algorithm"; then
		fail "set: $(<"$tmp/shapectl")"
		return 1
	fi
	read_rule
	received "$family"
	received_before=$((received - ${rule[passed_bytes]-0}))
	if [[ ${rule[rate_bits_per_second]-} != "$((${rate%mbit} * 1000000))" ]]; then
		fail "show -j: expected a rate of $rate, has ${rule[rate_bits_per_second]-none}"
		return 1
	fi
	local bpf=no
	[[ $(tc -n "$near" filter show dev eth0 "$direction" 2>&1) == *bpf* ]] && bpf=yes
	if [[ $hook$bpf != clsactyes && $hook$bpf != tcxno ]]; then
		fail "attached to the wrong hook, tc shows a bpf filter: $bpf"
		return 1
	fi
}

# end_case FAMILY: checks the rule's counters against what arrived, and that flush leaves nothing.
end_case() {
	for _ in 1 2 3 4 5; do # the connections need a moment to end
		read_rule
		received "$1"
		arrived=$((received - received_before))
		((rule[passed_bytes] == arrived)) && break
		pause 0.2
	done
	stop
	"$SHAPECTL" -n "$near" flush eth0 >/dev/null
	if ((rule[passed_bytes] != arrived)); then
		fail "passed_bytes of show -j: expected $arrived as arrived, has ${rule[passed_bytes]}"
		return 1
	fi
	if [[ $(tc_state) != "$state_before" ]]; then
		fail "after flush: expected '$state_before', tc shows '$(tc_state)'"
		return 1
	fi
}

# udp FAMILY DIRECTION ALGORITHM RATE FRAME: offers three times the rate in frames of FRAME bytes.
# From the first packet of a flood, exactly capacity + rate * time may pass.
udp() {
	local family=$1 direction=$2 algorithm=$3 rate=$4 frame=$5
	local case="udp$family $direction $algorithm $hook $rate ${frame}B"
	local bits=$((${rate%mbit} * 1000000)) payload=$((frame - 42))
	[[ $family == 6 ]] && payload=$((frame - 62))

	if ! start_case "$family" "$direction" "$algorithm" "$rate"; then
		stop
		return
	fi
	# iperf3 counts payload.
	send "$from" "$to_address" -u -b $((bits * 3 * payload / frame)) -l "$payload" -t 60

	# The flood begins after client and server have exchanged about 2 kB.
	local begin=0 end
	while received "$family" && ((received - received_before < 4096)) && kill -0 "$client" 2>/dev/null; do
		now_us
		begin=$now
	done
	if ((begin == 0)) && kill -0 "$client" 2>/dev/null; then # it began while others had the CPU
		stop
		"$SHAPECTL" -n "$near" flush eth0 >/dev/null
		udp "$@"
		return
	fi
	pause "$seconds"
	for _ in {1..20}; do
		now_us
		end=$now
		received "$family"
		now_us
		((now - end < 5000)) && break # else something came between the clock and the counter
	done
	local delivered=$((received - received_before))
	local expected=$((bits * (end - begin) / 8000000 + rule[capacity_bytes]))
	if ! kill -0 "$client" 2>/dev/null; then
		fail "iperf3: $(<"$tmp/client")"
		stop
		return
	fi
	kill -KILL "$client"
	wait "$client" 2>/dev/null || true
	end_case "$family" || return 0

	local offered=$((rule[passed_bytes] + rule[excess_bytes]))
	deviation "$delivered" "$expected"
	if ((offered * 2 < expected * 3)); then
		fail "expected an offer of three times the rate, iperf3 sent $(amount "$offered") where $(amount "$expected") may pass"
	elif ((${deviation#-} > 100)); then
		fail "expected $(amount "$expected") within 1 %, measured $(amount "$delivered") ($percent)"
	else
		pass "$(amount "$delivered") of $(amount "$expected") ($percent)"
	fi
}

# goodput: waits for iperf3 -J; sets $bytes and $microseconds as the receiving application saw them.
goodput() {
	wait "$client" || true
	read -r bytes microseconds < <(awk -F '[:,]' '
		/"sum_received"/ { end = 1 }
		end && /"seconds"/ { seconds = $2 }
		end && /"bytes"/ { bytes = $2 }
		END { printf "%d %d\n", bytes, seconds * 1000000 }' "$tmp/client")
	((bytes > 0)) && return
	fail "iperf3: $(grep '"error"' "$tmp/client" || cat "$tmp/client")"
	return 1
}

# tcp FAMILY DIRECTION ALGORITHM RATE [CONGESTION-CONTROL]: expects 90 % of the rate for the application, and not more
# on the wire than capacity + rate * time.
tcp() {
	local family=$1 direction=$2 algorithm=$3 rate=$4 congestion=${5:-cubic}
	local case="tcp$family $direction $algorithm $hook $rate $congestion"
	local bits=$((${rate%mbit} * 1000000)) payload=1448
	[[ $family == 6 ]] && payload=1428

	if ! start_case "$family" "$direction" "$algorithm" "$rate"; then
		stop
		return
	fi
	send "$from" "$to_address" -C "$congestion" -t "$seconds" -J
	if ! goodput; then
		stop
		return
	fi
	end_case "$family" || return 0

	local share=$((bits * microseconds / 8000000)) wire=$((bytes * 1514 / payload))
	local most=$((share + rule[capacity_bytes]))
	if ((bytes * 10 < share * 9)); then
		fail "expected a goodput of at least 90 % of $(amount "$share"), measured $(amount "$bytes")"
	elif ((wire * 100 > most * 101)); then
		fail "expected at most $(amount "$most") with headers, measured $(amount "$wire")"
	else
		pass "$(amount "$bytes") of $(amount "$share") ($((bytes * 100 / share)) %)"
	fi
}

# after_flush LEAST MOST: checks TCP's rate in each direction after rules were set and flushed, in Mbit/s. MOST is for egress.
after_flush() {
	local state direction most mbit speeds=()
	state=$(tc_state)
	for direction in ingress egress; do
		if ! limit set eth0 "$direction" "${network[4]}" --rate 20mbit; then
			fail "set: $(<"$tmp/shapectl")"
			return
		fi
	done
	"$SHAPECTL" -n "$near" flush eth0 >/dev/null
	if [[ $(tc_state) != "$state" ]]; then
		fail "expected '$state', tc shows '$(tc_state)'"
		return
	fi
	for direction in egress ingress; do
		if [[ $direction == egress ]]; then
			most=$2
			serve "$far"
			send "$near" "${far_address[4]}" -t 1 -J
		else
			most=1000000 # no root qdisc in the way
			serve "$near"
			send "$far" "${near_address[4]}" -t 1 -J
		fi
		if ! goodput; then
			stop
			return
		fi
		stop
		mbit=$((bytes * 8 / microseconds))
		speeds+=("$direction $mbit Mbit/s")
		if ((mbit < $1 || mbit > most)); then
			fail "expected $1 to $most Mbit/s, measured $direction $mbit Mbit/s"
			return
		fi
	done
	pass "${speeds[*]}"
}

# Linux before 6.6 has no tcx; shapectl then exits with the code for a missing feature.
hooks=(tcx clsact) status=0
SHAPECTL_HOOK=tcx limit set eth0 egress "${network[4]}" --rate 20mbit || status=$?
if ((status == 5)) && [[ ! ${SHAPECTL_NO_SKIP-} ]]; then
	echo "skip tcx: $(<"$tmp/shapectl")"
	hooks=(clsact)
elif ((status)); then
	die "set: $(<"$tmp/shapectl")"
fi
"$SHAPECTL" -n "$near" flush eth0 >/dev/null
((!brief)) || hooks=("${hooks[0]}")

other=([4]=6 [6]=4)
family=4
for hook in "${hooks[@]}"; do
	export SHAPECTL_HOOK=$hook

	case="no rule left $hook"
	after_flush 200 1000000
	case="a foreign qdisc and filters stay $hook"
	tc -n "$near" qdisc add dev eth0 root tbf rate 100mbit burst 256kb latency 50ms
	tc -n "$near" qdisc add dev eth0 clsact 2>/dev/null || true # the last case may have made one
	for direction in ingress egress; do
		tc -n "$near" filter add dev eth0 "$direction" protocol all u32 match u32 0 0 classid 1:7
	done
	after_flush 60 100
	tc -n "$near" qdisc delete dev eth0 clsact || true # a failed case may have removed it
	tc -n "$near" qdisc delete dev eth0 root || true

	for algorithm in gcra leaky; do
		for direction in egress ingress; do
			if ((seconds < 10)); then
				# Each pair of hook, algorithm, direction, family and protocol comes up once.
				udp "$family" "$direction" "$algorithm" 20mbit 1514
				tcp "${other[family]}" "$direction" "$algorithm" 20mbit
				family=${other[family]}
				continue
			fi
			for family in 4 6; do
				udp "$family" "$direction" "$algorithm" 1mbit 1514
				udp "$family" "$direction" "$algorithm" 20mbit 128
				udp "$family" "$direction" "$algorithm" 20mbit 1514
				udp "$family" "$direction" "$algorithm" 500mbit 1514
				tcp "$family" "$direction" "$algorithm" 5mbit
				tcp "$family" "$direction" "$algorithm" 100mbit
				tcp "$family" "$direction" "$algorithm" 1000mbit
				tcp "$family" "$direction" "$algorithm" 5mbit bbr
				tcp "$family" "$direction" "$algorithm" 1000mbit bbr
			done
			udp 4 "$direction" "$algorithm" 20mbit 64
		done
	done
	family=6
done

echo "$passed passed, $failed failed"
((failed == 0))
