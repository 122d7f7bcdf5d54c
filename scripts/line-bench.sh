#!/usr/bin/env bash
# line-bench.sh [none|cake|FILE]...: measures ping times on a line of 50 mbit down and 10 mbit up while IPv4 and IPv6 TCP
# fill it. The gateway does nothing (none), runs CAKE, or applies the policy in FILE. Without arguments the script
# measures the table in examples/slow-line.yaml. Each row takes about a minute in a guest whose clock counts
# instructions, so the host's load changes nothing.
set -euo pipefail
export LC_ALL=C
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

if [[ ! ${LINE_GUEST-} ]]; then
	gateways=("$@")
	[[ $# -gt 0 ]] || gateways=(none "${here%/*}"/examples/{home-gateway,slow-line}.yaml cake)
	[[ -x $SHAPECTL ]] || die "$SHAPECTL is not there: build it with make"
	call=(6.12 -i -t 3600)
	for module in veth ifb sch_fq sch_cake sch_tbf sch_netem sch_ingress cls_bpf; do
		call+=(-M "$module")
	done
	for program in bash ip tc ss iperf3; do
		call+=(-p "$program")
	done
	call+=(-f "$here:/line/scripts" -f "$SHAPECTL:/line/bin/shapectl")
	printf '%-18s  %-32s  %s\n' '' down up '' "${head:=Mbit/s IPv4  IPv6  ping mean  p99}" "$head"
	for gateway in "${gateways[@]}"; do
		file=() name=$gateway
		[[ ! -f $gateway ]] || file=(-f "$gateway:/line/policy.yaml") name=${gateway##*/}
		"$here/guest.sh" "${call[@]}" "${file[@]}" -- env LINE_GUEST=1 bash /line/scripts/line-bench.sh "$name"
	done
	exit
fi

# The guest: hosts at home -- br-lan gateway eth0 -- modem, whose queues hold half a second -- the internet, 20 ms away.
tmp=$(mktemp -d)
for ns in home gateway modem internet; do
	ip netns add "$ns"
	ip -n "$ns" link set lo up
	ip netns exec "$ns" sysctl -q -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0
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
for n in 11 12 13; do
	ip -n home address add 192.168.1.$n/24 dev lan0
	ip -n home address add 2001:db8:1::$n/64 dev lan0 nodad
done
tc -n modem qdisc add dev line root tbf rate 50mbit burst 3028 limit 3125000
tc -n modem qdisc add dev wan root tbf rate 10mbit burst 3028 limit 625000
tc -n internet qdisc add dev isp root netem delay 20ms limit 100000

case $1 in
none) ;;
cake)
	tc -n gateway qdisc replace dev eth0 root cake bandwidth 9500kbit
	tc -n gateway qdisc replace dev br-lan root cake bandwidth 47500kbit
	;;
*)
	"$SHAPECTL" -n gateway apply /line/policy.yaml --setup-fq >"$tmp/apply" 2>&1 || die "$(<"$tmp/apply")"
	;;
esac

# load -R|'': loads the line down or up, with a connection of each family for each of three hosts. Sets $result.
load() {
	local host address family rates=() waits port=5201 pid pids=()
	for host in 11 12 13; do
		for address in 192.168.1.$host,192.168.3.1 2001:db8:1::$host,2001:db8:3::1; do
			ip netns exec internet iperf3 -s -1 -p $port >/dev/null &
			until [[ $(ss -N internet -Hltn "sport = :$port") ]]; do pause 0.05; done
			# shellcheck disable=SC2086 # nothing, or one word
			ip netns exec home iperf3 $1 -f k -O 5 -t 20 -p $port -B "${address%,*}" -c "${address#*,}" >"$tmp/rate$port" &
			pids+=($!)
			port=$((port + 1))
		done
	done
	pause 6
	ip netns exec home ping -4 -i 0.05 -c 350 -I 192.168.1.11 192.168.3.1 >"$tmp/ping4" &
	pids+=($!)
	ip netns exec home ping -6 -i 0.05 -c 350 -I 2001:db8:1::11 2001:db8:3::1 >"$tmp/ping6" &
	pids+=($!)
	for pid in "${pids[@]}"; do
		wait "$pid"
	done
	for family in 0 1; do
		rates+=("$(for ((port = 5201 + family; port < 5207; port += 2)); do
			sed -nE 's/.* ([0-9]+) Kbits\/sec.*receiver/\1/p' "$tmp/rate$port"
		done | awk '{ sum += $1 } END { printf "%11.1f", sum / 1000 }')")
	done
	waits=$(sed -nE 's/.* time=([0-9.]+) ms/\1/p' "$tmp/ping4" "$tmp/ping6" | sort -n |
		awk '{ all[NR] = $1; sum += $1 } END { if (NR < 690) exit 1; printf "%8.0f ms %2.0f ms", sum / NR, all[int(NR * 0.99 + 0.5)] }') ||
		die "more than 10 of 700 pings were lost"
	result="${rates[0]}${rates[1]}$waits"
}
load -R
down=$result
load ''
printf '%-18s  %s  %s\n' "$1" "$down" "$result"
