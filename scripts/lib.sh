# shellcheck shell=bash disable=SC2034 # the scripts that source it use what it sets
# Sourced by scripts that send real traffic: two network namespaces joined by a veth pair, iperf3 between them, and an
# exact count of the bytes that arrive. `near` has the device eth0 that shapectl limits; `far` is the other end.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH=$PATH:/usr/sbin:/sbin # `su` leaves these out, and ip and tc live there
SHAPECTL=${SHAPECTL:-${here%/*}/bin/shapectl}

# The addresses that RFC 5737 and RFC 3849 set aside for examples.
declare -A network=([4]=192.0.2.0/24 [6]=2001:db8::/64)
declare -A near_address=([4]=192.0.2.1 [6]=2001:db8::1)
declare -A far_address=([4]=192.0.2.2 [6]=2001:db8::2)

die() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# pause SECONDS: `sleep` alone would delay the traps until it ends.
pause() {
	sleep "$1" &
	wait $!
}

now_us() {
	now=${EPOCHREALTIME/[.,]/}
}

# make_pair NAME: makes the two namespaces. All names have the process id in them. The EXIT trap removes everything.
make_pair() {
	[[ $EUID -eq 0 ]] || die "making network namespaces needs root: run it with sudo"
	"$here/need.sh" "${0##*/}" iperf3=iperf3 ip=iproute2
	[[ -x $SHAPECTL ]] || die "$SHAPECTL is not there: build it with make"
	SHAPECTL=$(realpath "$SHAPECTL")
	near=$1-$$-near far=$1-$$-far
	tmp=$(mktemp -d)
	trap remove_pair EXIT
	trap 'exit 129' HUP
	trap 'exit 130' INT
	trap 'exit 141' PIPE
	trap 'exit 143' TERM

	local ns
	ip netns add "$near"
	ip netns add "$far"
	ip link add eth0 netns "$near" address 02:00:00:00:00:01 type veth \
		peer name eth0 netns "$far" address 02:00:00:00:00:02
	for ns in "$near" "$far"; do
		ip -n "$ns" link set lo up
		# Without a link-local address the namespace sends only what the script sends.
		ip -n "$ns" link set eth0 addrgenmode none up
	done
	ip -n "$near" address add "${near_address[4]}/24" dev eth0
	ip -n "$near" address add "${near_address[6]}/64" dev eth0 nodad
	ip -n "$far" address add "${far_address[4]}/24" dev eth0
	ip -n "$far" address add "${far_address[6]}/64" dev eth0 nodad
}

remove_pair() {
	local status=$? ns
	trap '' HUP INT PIPE TERM
	set +e # interrupted early, not all of it is there to remove
	{
		# shellcheck disable=SC2046 # one word a process
		kill -KILL $(jobs -p)
		for ns in "$near" "$far"; do
			"$SHAPECTL" -n "$ns" flush eth0
			ip netns delete "$ns"
		done
		rm -rf "$tmp"
	} >/dev/null 2>&1
	exit "$status"
}

# serve NS: starts an iperf3 server. Its pid is in $server.
serve() {
	ip netns exec "$1" iperf3 -s >"$tmp/server" 2>&1 &
	server=$!
	until [[ $(ss -N "$1" -Hltn 'sport = :5201') ]]; do
		kill -0 "$server" 2>/dev/null || die "iperf3 -s: $(<"$tmp/server")"
		pause 0.02
	done
}

# send NS ADDRESS ARGUMENT...: starts an iperf3 client. Its pid is in $client, its output in $tmp/client.
send() {
	ip netns exec "$1" iperf3 -c "$2" "${@:3}" >"$tmp/client" 2>&1 &
	client=$!
}

# stop: kills client and server. A regular end would exchange messages over the limited link.
stop() {
	kill -KILL "$client" "$server" 2>/dev/null || true
	wait "$client" "$server" 2>/dev/null || true
}

# received 4|6: sets $received to the bytes that have entered the server's namespace, as frames on the wire.
# IP counts them, after the tc hooks. A device counts packets before its ingress hook drops them, and counts the
# headers of a GSO packet once.
received() {
	local -A count
	local file lines names values i prefix='' headers=52 # IPv4, TCP with timestamps
	# mapfile takes all of a file at once: `read` seeks in it, and the numbers get longer meanwhile.
	if [[ $1 == 4 ]]; then
		for file in snmp netstat; do
			mapfile -t lines <"/proc/$server/net/$file"
			# A line of names, then a line of values.
			while [[ ${lines[0]} != Ip:* && ${lines[0]} != IpExt:* ]]; do
				lines=("${lines[@]:2}")
			done
			read -ra names <<<"${lines[0]}"
			read -ra values <<<"${lines[1]}"
			for i in "${!names[@]}"; do
				count[${names[i]}]=${values[i]}
			done
		done
	else
		prefix=Ip6 headers=72
		mapfile -t lines <"/proc/$server/net/snmp6"
		for i in "${lines[@]}"; do
			count[${i%%[[:space:]]*}]=${i##*[[:space:]]}
		done
	fi
	# Segments are counted by their ECN bits, packets once however many segments they hold.
	local packets=${count[${prefix}InReceives]} octets=${count[${prefix}InOctets]}
	local segments=$((${count[${prefix}InNoECTPkts]} + ${count[${prefix}InECT0Pkts]} + \
		${count[${prefix}InECT1Pkts]} + ${count[${prefix}InCEPkts]}))
	received=$((octets + segments * 14 + (segments - packets) * headers))
}
