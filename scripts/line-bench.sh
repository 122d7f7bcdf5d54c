#!/usr/bin/env bash
# line-bench.sh [-l LOAD]... [LIMITER]...: measures ping times and goodput on a home line of 50 mbit down and 10 mbit up,
# with a path of 20 ms and a modem that queues for 500 ms. It prints a table, from which docs/for/line.md has the 99 %
# column. A row takes about half a minute, in a guest whose clock counts instructions, so the host's load changes nothing.
#   -l LOAD  measure this load (default all)
# A LIMITER is none, htb (with fq_codel), cake, line (`shapectl line`), flow (the same by connection) or drop (`shapectl set`).
# Behind masquerade, they are nat-cake, nat-line and nat-flow. Default: none, htb, cake, line and flow. The loads, by hosts a, b
# and c:
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

all=(down1 up1 down8 up8 hosts-down hosts-up dual-down dual-up rrul loss web)
# shellcheck disable=SC2016 # Markdown
declare -A words=(
	[none]='no limit' [htb]='HTB + fq_codel' [cake]=CAKE [line]='`line`' [flow]='`line`, by connection' [drop]='`set`, excess is dropped'
	[nat-cake]='CAKE `nat`' [nat-line]='`line`, NAT' [nat-flow]='`line`, by connection, NAT'
	[down1]='one download' [up1]='one upload' [down8]='eight downloads' [up8]='eight uploads'
	[hosts-down]='downloads: 8 of a host, 1 of another' [hosts-up]='uploads: 8 of a host, 1 of another'
	[dual-down]='downloads by IPv4 and IPv6, 3 hosts' [dual-up]='uploads by IPv4 and IPv6, 3 hosts'
	[rrul]='4 downloads and 4 uploads' [loss]='4 downloads, 1 % loss' [web]='8 downloads beside pages of another host'
)

if [[ ! ${LINE_GUEST-} ]]; then
	loads=()
	while getopts :l: option; do
		[[ $option == l && " ${all[*]} " == *" $OPTARG "* ]] || die "usage: ${0##*/} [-l LOAD]... [LIMITER]...; loads: ${all[*]}"
		loads+=("$OPTARG")
	done
	shift $((OPTIND - 1))
	[[ ${loads[*]} ]] || loads=("${all[@]}")
	[[ $# -gt 0 ]] || set -- none htb cake line flow
	[[ -x $SHAPECTL ]] || die "$SHAPECTL is not there: build it with make"
	call=(6.12 -i -t $((600 * ${#loads[@]})))
	for module in veth ifb sch_{fq,cake,htb,fq_codel,tbf,netem,ingress} cls_{bpf,matchall} act_mirred tcp_diag nft_{chain_nat,masq}; do
		call+=(-M "$module")
	done
	for program in bash ip tc ss iperf3 nft; do
		call+=(-p "$program")
	done
	call+=(-f "$here:/line/scripts" -f "$SHAPECTL:/line/bin/shapectl")
	echo '| load | limiter | ping mean | 50 % | 99 % | lost of 700 | down, Mbit/s | up, Mbit/s | page mean, 95 % |'
	echo '| --- | --- | --: | --: | --: | --: | --: | --: | --: |'
	for name in "$@"; do
		[[ $name =~ ^(none|htb|drop|(nat-)?(cake|line|flow))$ ]] || die "$name: the limiters are none, htb, drop, [nat-]cake, [nat-]line and [nat-]flow"
		"$here/guest.sh" "${call[@]}" -- env LINE_GUEST=1 bash /line/scripts/line-bench.sh "$name" "${loads[@]}"
	done | sort -s -t '|' -k 1,1n | cut -f 2-
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
nat=()
if [[ $1 == nat-* ]]; then
	nat=(nat)
	for family in ip ip6; do
		ip netns exec gateway nft "table $family nat { chain out { type nat hook postrouting priority srcnat; oifname eth0 masquerade; }; }"
	done
fi
case ${1#nat-} in
none) ;;
cake)
	redirect
	tc -n gateway qdisc add dev eth0 root cake bandwidth 9500kbit besteffort dual-srchost "${nat[@]}"
	tc -n gateway qdisc add dev ifb0 root cake bandwidth 47500kbit besteffort dual-dsthost "${nat[@]}"
	;;
htb)
	redirect
	htb eth0 9500kbit
	htb ifb0 47500kbit
	;;
line | flow)
	options=()
	[[ $1 != *flow ]] || options=(--fair flow)
	"$SHAPECTL" -n gateway line eth0 --down 50mbit --up 10mbit "${options[@]}" >"$tmp/line" 2>&1 || die "$(<"$tmp/line")"
	;;
drop)
	# One bucket for both families, as a line has.
	"$SHAPECTL" -n gateway set up --new --rate 9500kbit >"$tmp/line"
	"$SHAPECTL" -n gateway set down --new --rate 47500kbit >"$tmp/line"
	"$SHAPECTL" -n gateway set eth0 egress any --within up >"$tmp/line"
	"$SHAPECTL" -n gateway set eth0 ingress any --within down >"$tmp/line"
	;;
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
	ss -N home -HtniO | awk '{
		host = $4
		sub(/\]?:[0-9]+$/, "", host)
		sub(/.*[.:]/, "", host)
		if (match($0, /bytes_received:[0-9]+/)) bytes["down " host] += substr($0, RSTART + 15, RLENGTH - 15)
		if (match($0, /bytes_acked:[0-9]+/)) bytes["up " host] += substr($0, RSTART + 12, RLENGTH - 12)
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

# statistics SEPARATOR FORMAT UNIT PERCENT...: prints the mean and these percentiles of the numbers in stdin, in that unit.
statistics() {
	sort -n | awk -v separator="$1" -v format="$2" -v unit="$3" -v percents="${*:4}" '
		{ all[NR] = $1 / unit; sum += all[NR] }
		END {
			if (!NR) exit
			count = split(percents, percent, " ")
			printf format, sum / NR
			for (i = 1; i <= count; i++) printf separator format, all[int(NR * percent[i] / 100 + 0.5)]
		}'
}

# rates DIRECTION: prints the goodput of all hosts that load it, and of each if there are several.
rates() {
	local host hosts=''
	for host in a b c; do
		[[ ! ${loaded[${host}_$1]-} ]] || hosts+=" ${number[$host]}"
	done
	awk -v direction="$1" -v hosts="$hosts" '
		NF == 1 { us = $1 - us; sign = sign ? 1 : -1 }
		$1 == direction { bytes[$2] += sign * $3 }
		END {
			count = split(hosts, host, " ")
			for (i = 1; i <= count; i++) {
				sum += bytes[host[i]] * 8 / us
				text = text (i > 1 ? " + " : "") sprintf("%.1f", bytes[host[i]] * 8 / us)
			}
			if (count) printf "%.1f%s", sum, (count > 1 ? " (" text ")" : "")
		}' "$tmp/before" "$tmp/after"
}

# measure LOAD: prints a row, after the number of the load.
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
	local pages
	pages=$(statistics ', ' %.0f 1000 95 <"$tmp/pages")
	printf '%s\t| %s | %s | %s | %s | %s | %s | %s |\n' "$2" "${words[$1]}" "${words[$limiter]}" \
		"$(statistics ' | ' %.1f 1 50 99 <"$tmp/pings")" $((700 - $(wc -l <"$tmp/pings"))) "$(rates down)" "$(rates up)" \
		"${pages:+$pages ms}"
}

limiter=$1
for load in "${@:2}"; do
	for i in "${!all[@]}"; do
		[[ ${all[i]} != "$load" ]] || measure "$load" "$i"
	done
done
