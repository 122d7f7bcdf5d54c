#!/usr/bin/env bash
# line-bench.sh [-l LOAD]... [-n RUNS] [-o FILE] [GATEWAY]...: measures ping times and goodput on a home line of 50 mbit
# down and 10 mbit up, with a path of 20 ms and a modem that queues for 500 ms. It prints a Markdown table. A row takes
# about half a minute, in a guest whose clock counts instructions, so the host's load changes nothing.
#   -l LOAD  measure this load (default all)
#   -n RUNS  repeat each load; the table has the medians (default 1)
#   -o FILE  write each run to FILE, too, as tab-separated values
# A GATEWAY does nothing (none), limits by cake, by htb with fq_codel, or by `shapectl line` (line), or applies the
# policy in a file. Default: the first four. The loads, by hosts a, b and c:
#   down1, up1, down8, up8  one TCP connection, or eight, of one host
#   hosts-down, hosts-up    a has eight and b has one; b pings
#   dual-down, dual-up      a, b and c have two each, of IPv4 and of IPv6
#   rrul                    a and b have two down and two up each
#   loss                    a has four down, and the internet loses 1 % of the packets to home
#   web                     a has eight down while b fetches pages: 10 kB, then six times 50 kB side by side
# Pings come from an idle host, except for hosts-*, every 30 ms by each of IPv4 and IPv6.
set -euo pipefail
export LC_ALL=C
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

columns=(gateway load ping_mean_ms ping_p50_ms ping_p99_ms ping_lost {down,up}{,_a,_b,_c}_mbit page_mean_ms page_p95_ms)

# table: prints runs as rows of a Markdown table, and what are no runs as they are. Runs of one row follow each other.
table() {
	awk -F '\t' -v columns=${#columns[@]} '
		function median(column,    i, j, swap, sorted) {
			for (i = 1; i <= runs; i++) {
				if (run[i, column] == "-") return "-"
				sorted[i] = run[i, column]
				for (j = i; j > 1 && sorted[j - 1] > sorted[j]; j--) {
					swap = sorted[j]; sorted[j] = sorted[j - 1]; sorted[j - 1] = swap
				}
			}
			return (sorted[int((runs + 1) / 2)] + sorted[int(runs / 2) + 1]) / 2
		}
		function number(format, column,    value) {
			value = median(column)
			return value == "-" ? "" : sprintf(format, value)
		}
		# A rate in all, and of each host if there are several.
		function rates(column,    i, hosts, count, text) {
			for (i = 1; i <= 3; i++) {
				text = number("%.1f", column + i)
				if (text != "") hosts = hosts (count++ ? " + " : "") text
			}
			return number("%.1f", column) (count > 1 ? " (" hosts ")" : "")
		}
		function row() {
			if (runs) printf "| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", name[1], name[2],
				number("%.1f", 3), number("%.1f", 4), number("%.1f", 5), number("%.0f", 6), rates(7), rates(11),
				number("%.0f", 15), number("%.0f", 16)
			runs = 0
		}
		NF != columns { print; next }
		$1 FS $2 != key { row(); key = $1 FS $2; name[1] = $1; name[2] = $2 }
		{ runs++; for (i = 3; i <= NF; i++) run[runs, i] = $i == "-" ? $i : $i + 0 }
		END { row() }'
}

if [[ ! ${LINE_GUEST-} ]]; then
	all=(down1 up1 down8 up8 hosts-down hosts-up dual-down dual-up rrul loss web) loads=() runs=1 out=/dev/null
	while getopts :l:n:o: option; do
		case $option in
		l)
			[[ " ${all[*]} " == *" $OPTARG "* ]] || die "-l $OPTARG: there is no such load; there are ${all[*]}"
			loads+=("$OPTARG")
			;;
		n)
			runs=$OPTARG
			[[ $runs =~ ^[1-9][0-9]?$ ]] || die "-n $runs: RUNS is a number from 1 to 99"
			;;
		o) out=$OPTARG ;;
		*) die "usage: ${0##*/} [-l LOAD]... [-n RUNS] [-o FILE] [none|cake|htb|line|POLICY]..." ;;
		esac
	done
	shift $((OPTIND - 1))
	[[ ${loads[*]} ]] || loads=("${all[@]}")
	gateways=("$@")
	[[ $# -gt 0 ]] || gateways=(none htb cake line)
	for gateway in "${gateways[@]}"; do
		[[ -f $gateway || $gateway =~ ^(none|cake|htb|line)$ ]] ||
			die "$gateway: there is no such file, and the other gateways are none, cake, htb and line"
	done
	[[ -x $SHAPECTL ]] || die "$SHAPECTL is not there: build it with make"
	call=(6.12 -i -t $((600 * ${#loads[@]} * runs)))
	for module in veth ifb sch_{fq,cake,htb,fq_codel,tbf,netem,ingress} cls_{bpf,matchall} act_mirred tcp_diag; do
		call+=(-M "$module")
	done
	for program in bash ip tc ss iperf3; do
		call+=(-p "$program")
	done
	call+=(-f "$here:/line/scripts" -f "$SHAPECTL:/line/bin/shapectl")
	(IFS=$'\t' && echo "${columns[*]}") >"$out"
	echo '| gateway | load | ping mean, ms | 50 % | 99 % | lost of 700 | down, Mbit/s | up, Mbit/s | page mean, ms | 95 % |'
	echo '| --- | --- | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: |'
	for gateway in "${gateways[@]}"; do
		file=()
		[[ ! -f $gateway ]] || file=(-f "$gateway:/line/policy/${gateway##*/}")
		"$here/guest.sh" "${call[@]}" "${file[@]}" -- \
			env LINE_GUEST=1 bash /line/scripts/line-bench.sh "${gateway##*/}" "$runs" "${loads[@]}" | tee -a "$out" | table
	done
	exit
fi

# The guest: hosts at home -- br-lan gateway eth0 -- modem, whose queues hold half a second -- the internet, 20 ms away.
tmp=$(mktemp -d)
for ns in home gateway modem internet; do
	ip netns add "$ns"
	ip -n "$ns" link set lo up
	# No connection learns from an earlier one.
	ip netns exec "$ns" sysctl -q -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 \
		net.ipv6.conf.default.accept_dad=0 net.ipv4.tcp_no_metrics_save=1
done
# join NS DEVICE NS DEVICE NETWORK
join() {
	ip link add "$2" netns "$1" type veth peer name "$4" netns "$3"
	ip -n "$1" address add "192.168.$5.1/24" dev "$2"
	ip -n "$3" address add "192.168.$5.2/24" dev "$4"
	ip -n "$1" address add "2001:db8:$5::1/64" dev "$2" nodad
	ip -n "$3" address add "2001:db8:$5::2/64" dev "$4" nodad
	# Packets of one segment, as they come off a wire.
	ip -n "$1" link set "$2" gso_max_segs 1 up
	ip -n "$3" link set "$4" gso_max_segs 1 up
	for family in -4 -6; do
		ip -n "$3" "$family" route add default via "$([[ $family == -4 ]] && echo "192.168.$5.1" || echo "2001:db8:$5::1")"
	done
}
join gateway br-lan home lan0 1
join modem line gateway eth0 2
join internet isp modem wan 3
for n in 1 2; do
	ip -n internet route add 192.168.$n.0/24 via 192.168.3.2
	ip -n internet route add 2001:db8:$n::/64 via 2001:db8:3::2
done
ip -n modem route add 192.168.1.0/24 via 192.168.2.2
ip -n modem route add 2001:db8:1::/64 via 2001:db8:2::2
declare -A number=([a]=11 [b]=12 [c]=13 [idle]=14)
for n in "${number[@]}"; do
	ip -n home address add "192.168.1.$n/24" dev lan0
	ip -n home address add "2001:db8:1::$n/64" dev lan0 nodad
done
tc -n modem qdisc add dev line root tbf rate 50mbit burst 3028 limit 3125000
tc -n modem qdisc add dev wan root tbf rate 10mbit burst 3028 limit 625000
tc -n internet qdisc add dev isp root netem delay 20ms limit 100000

# The web server has an address of its own, to which b's address is the source.
ip -n internet address add 192.168.3.80/24 dev isp
ip -n home route add 192.168.3.80 via 192.168.1.1 src "192.168.1.${number[b]}"
mkdir "$tmp/www"
head -c 10000 /dev/urandom >"$tmp/www/page"
head -c 50000 /dev/urandom >"$tmp/www/object"
ip netns exec internet httpd -p 80 -h "$tmp/www"

# redirect: sends what enters eth0 through the device ifb0.
redirect() {
	ip -n gateway link add ifb0 type ifb
	ip -n gateway link set ifb0 up
	tc -n gateway qdisc add dev eth0 ingress
	tc -n gateway filter add dev eth0 parent ffff: matchall action mirred egress redirect dev ifb0
}
# htb DEVICE RATE
htb() {
	tc -n gateway qdisc add dev "$1" root handle 1: htb default 1
	tc -n gateway class add dev "$1" parent 1: classid 1:1 htb rate "$2" quantum 1514
	tc -n gateway qdisc add dev "$1" parent 1:1 fq_codel
}
case $1 in
none) ;;
cake)
	redirect
	tc -n gateway qdisc add dev eth0 root cake bandwidth 9500kbit besteffort dual-srchost
	tc -n gateway qdisc add dev ifb0 root cake bandwidth 47500kbit besteffort dual-dsthost
	;;
htb)
	redirect
	htb eth0 9500kbit
	htb ifb0 47500kbit
	;;
line) "$SHAPECTL" -n gateway line eth0 --down 50mbit --up 10mbit >"$tmp/line" 2>&1 || die "$(<"$tmp/line")" ;;
*) "$SHAPECTL" -n gateway apply "/line/policy/$1" --setup-fq >"$tmp/apply" 2>&1 || die "$(<"$tmp/apply")" ;;
esac

# bulk HOST down|up CONNECTIONS [-6]: starts them. They end with $pids.
bulk() {
	local from=192.168.1.${number[$1]} to=192.168.3.1 direction=()
	[[ ${4-} != -6 ]] || from=2001:db8:1::${number[$1]} to=2001:db8:3::1
	[[ $2 != down ]] || direction=(-R)
	ip netns exec internet iperf3 -s -1 -p $port >"$tmp/server$port" 2>&1 &
	pids+=($!)
	until [[ $(ss -N internet -Hltn "sport = :$port") ]]; do pause 0.05; done
	ip netns exec home iperf3 "${direction[@]}" -C cubic -P "$3" -i 0 -t 3600 -p $port -B "$from" -c "$to" \
		>"$tmp/client$port" 2>&1 &
	pids+=($!)
	port=$((port + 1))
	loaded[$1_$2]=yes
}

# arrived: prints the time in us, and the bytes of payload that have arrived: down or up, the host's number, bytes.
arrived() {
	now_us
	echo "$now"
	{
		ss -N home -HtniO | sed 's/^/down /'
		ss -N internet -HtniO | sed 's/^/up /'
	} | awk '{
		host = $1 == "down" ? $5 : $6
		sub(/\]?:[0-9]+$/, "", host)
		sub(/.*[.:]/, "", host)
		if (match($0, /bytes_received:[0-9]+/)) bytes[$1 " " host] += substr($0, RSTART + 15, RLENGTH - 15)
	}
	END { for (key in bytes) printf "%s %.0f\n", key, bytes[key] }'
}

# pages: fetches pages one by one, 20 or more, for as long as the pings last. Prints the time of each in us.
pages() {
	local count start pid pids end=$((${EPOCHREALTIME/./} + 10500000)) _
	for ((count = 0; count < 20 || ${EPOCHREALTIME/./} < end; count++)); do
		start=${EPOCHREALTIME/./} pids=()
		wget -q -O /dev/null http://192.168.3.80/page || exit
		for _ in 1 2 3 4 5 6; do
			wget -q -O /dev/null http://192.168.3.80/object &
			pids+=($!)
		done
		for pid in "${pids[@]}"; do
			wait "$pid" || exit
		done
		echo $((${EPOCHREALTIME/./} - start))
	done
}
export -f pages

# statistics UNIT PERCENT...: prints the mean and these percentiles of the numbers in stdin, in that unit.
statistics() {
	sort -n | awk -v unit="$1" -v percents="${*:2}" '
		{ all[NR] = $1 / unit; sum += all[NR] }
		END {
			count = split(percents, percent, " ")
			printf "%s", NR ? sprintf("%.2f", sum / NR) : "-"
			for (i = 1; i <= count; i++) printf "\t%s", NR ? sprintf("%.2f", all[int(NR * percent[i] / 100 + 0.5)]) : "-"
		}'
}

# measure LOAD: prints a run.
measure() {
	local host pinger=idle pid pids=() waits=() port=5201 loss=0% count
	local -A loaded=()
	[[ $1 != loss ]] || loss=1%
	tc -n internet qdisc change dev isp root netem delay 20ms loss $loss limit 100000
	case $1 in
	down[18] | up[18]) bulk a "${1%?}" "${1: -1}" ;;
	hosts-*)
		bulk a "${1#*-}" 8
		bulk b "${1#*-}" 1
		pinger=b
		;;
	dual-*)
		for host in a b c; do
			bulk $host "${1#*-}" 1
			bulk $host "${1#*-}" 1 -6
		done
		;;
	rrul)
		for host in a b; do
			bulk $host down 2
			bulk $host up 2
		done
		;;
	loss) bulk a down 4 ;;
	web) bulk a down 8 ;;
	esac
	pause 6
	for pid in "${pids[@]}"; do
		kill -0 "$pid" 2>/dev/null || die "iperf3 ended too soon: $(cat "$tmp"/client*)"
	done

	arrived >"$tmp/before"
	ip netns exec home ping -4 -i 0.03 -c 350 -I "192.168.1.${number[$pinger]}" 192.168.3.1 >"$tmp/ping4" &
	waits+=($!)
	ip netns exec home ping -6 -i 0.03 -c 350 -I "2001:db8:1::${number[$pinger]}" 2001:db8:3::1 >"$tmp/ping6" &
	waits+=($!)
	: >"$tmp/pages"
	if [[ $1 == web ]]; then
		ip netns exec home bash -c pages >"$tmp/pages" &
		waits+=($!)
		loaded[b_down]=yes
	fi
	for pid in "${waits[@]}"; do
		wait "$pid" || true # ping fails if packets are lost
	done
	arrived >"$tmp/after"
	if [[ $1 == web ]]; then
		count=$(wc -l <"$tmp/pages")
		((count >= 20)) || die "wget failed after $count pages"
		# The connections have ended, and ss knows no more of them. A page has 310 kB.
		echo "down ${number[b]} $((count * 310000))" >>"$tmp/after"
	fi
	kill -KILL "${pids[@]}"
	wait "${pids[@]}" 2>/dev/null || true
	until [[ ! $(ss -N home -Htn && ss -N internet -Htn) ]]; do pause 0.2; done
	pause 2 # the queues are empty then

	sed -nE 's/.* time=([0-9.]+) ms/\1/p' "$tmp"/ping[46] >"$tmp/pings"
	local direction rates='' rate sum all
	for direction in down up; do
		sum=- all=''
		for host in a b c; do
			rate=-
			if [[ ${loaded[${host}_$direction]-} ]]; then
				rate=$(awk -v key="$direction ${number[$host]}" '
					NF == 1 { us = $1 - us; sign = sign ? 1 : -1 }
					$1 " " $2 == key { bytes += sign * $3 }
					END { printf "%.2f", bytes * 8 / us }' "$tmp/before" "$tmp/after")
				sum=$(awk "BEGIN { printf \"%.2f\", ${sum#-} + $rate }")
			fi
			all+=$'\t'$rate
		done
		rates+=$'\t'$sum$all
	done
	printf '%s\t%s\t%s\t%s%s\t%s\n' "$name" "$1" "$(statistics 1 50 99 <"$tmp/pings")" \
		$((700 - $(wc -l <"$tmp/pings"))) "$rates" "$(statistics 1000 95 <"$tmp/pages")"
}

name=$1
for load in "${@:3}"; do
	for ((run = 0; run < $2; run++)); do
		measure "$load"
	done
done
