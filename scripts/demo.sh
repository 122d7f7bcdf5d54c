#!/usr/bin/env bash
# demo.sh: shows in half a minute what shapectl does: traffic between two network namespaces, before and after a limit.
set -euo pipefail

bar='#' mark='|' wire='------------'
if [[ $(locale charmap 2>/dev/null) == UTF-8 ]]; then
	bar=█ mark=│ wire=────────────
fi
export LC_ALL=C
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

columns=80
if [[ -t 1 ]]; then
	{ size=$(stty size <&3); } 3<&1
	columns=${size#* }
fi
((columns < 40)) && columns=80 # a terminal that does not know says 0
((columns > 100)) && columns=100
width=$((columns - 22)) # of the longest bar
scale=110               # the longest bar, in Mbit/s

bold='' dim='' before='' after='' plain=''
if [[ -t 1 && ! ${NO_COLOR-} && ${TERM:-dumb} != dumb ]]; then
	bold=$'\e[1m' dim=$'\e[2m' before=$'\e[33m' after=$'\e[32m' plain=$'\e[0m'
fi

# say COMMAND...: prints a command as a user would type it.
say() {
	echo "$bold\$ $*$plain"
}

# run ARGUMENT...: prints a shapectl command and runs it.
run() {
	say shapectl "$@"
	"$SHAPECTL" "$@"
}

axis() {
	local tick line
	printf -v line '%10s' 0
	for tick in 20 40 60 80 100; do
		printf -v line '%-*s%s' $((9 + width * tick / scale)) "$line" "$tick"
	done
	echo "$dim$line Mbit/s$plain"
}

# row SPEED LIMIT: one bar. SPEED is in tenths of Mbit/s; LIMIT is in Mbit/s, 0 for none.
row() {
	local i line='' length=$(((width * $1 / scale + 5) / 10)) colour=$before
	(($2)) && colour=$after
	for ((i = 0; i < width; i++)); do
		if (($2 && i == width * $2 / scale)); then
			line+=$plain$mark$colour
		elif ((i < length)); then
			line+=$bar
		else
			line+=' '
		fi
	done
	printf '%4d.%d s %s%4d.%d Mbit/s\n' $((clock / 10)) $((clock % 10)) "$colour$line$plain" $(($1 / 10)) $(($1 % 10))
}

# watch FAMILY ROWS LIMIT: a row every half second.
watch() {
	local i received_before begin
	received "$1"
	now_us
	for ((i = 0; i < $2; i++)); do
		received_before=$received begin=$now
		pause 0.5
		received "$1"
		now_us
		clock=$((clock + 5))
		row $(((received - received_before) * 80 / (now - begin))) "$3"
	done
}

# show_limit TITLE FAMILY IPERF3-ARGUMENT...: draws traffic, then sets a limit and goes on.
show_limit() {
	local family=$2
	echo
	echo "$bold$1$plain: iperf3 sends 100 Mbit/s; the bars show what arrives."
	serve "$far"
	say ip netns exec "$near" iperf3 -c "${far_address[$family]}" -b 100M "${@:3}"
	send "$near" "${far_address[$family]}" -b 100M -t 30 "${@:3}"
	received "$family"
	local silent=$received
	while ((received < silent + 100000)); do
		kill -0 "$client" 2>/dev/null || die "iperf3: $(<"$tmp/client")"
		pause 0.01
		received "$family"
	done
	clock=0
	axis
	watch "$family" 5 0
	run -n "$near" set eth0 egress "${network[$family]}" --rate 20mbit
	watch "$family" 1 20 # with the first burst
	local steady_received=$received steady_begin=$now tenths
	watch "$family" 9 20
	tenths=$(((received - steady_received) * 80 / (now - steady_begin)))
	echo "On average, after the first burst: $bold$((tenths / 10)).$((tenths % 10)) Mbit/s$plain"
	stop
}

make_pair demo

echo "Two network namespaces joined by a virtual cable, for this demo only:"
echo
echo "    $near [eth0] $wire [eth0] $far"

show_limit 'TCP over IPv4' 4
show_limit 'UDP over IPv6' 6 -u

echo
echo "The rules, and what they did:"
run -n "$near" show --wide
echo
echo "Next, on a device of your own (\`make install\` puts shapectl in the path):"
echo "    shapectl doctor eth0                     what may bypass a limit there"
echo "    shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host"
echo "    shapectl show eth0 --wide                the rules and their counters"
echo "    shapectl flush eth0                      remove them"
