# Sourced by docs_test.go before the commands of a documentation page, in mount, network and process namespaces of
# their own.
exec </dev/null 2>&1

mount --make-rprivate /
mount -t tmpfs none /run
mkdir -p bin /run/netns
mount -t bpf -o mode=0700 bpf /sys/fs/bpf
# Otherwise shapectl takes the one that init sees.
export SHAPECTL_BPFFS=/sys/fs/bpf PATH=$PWD/bin:$PATH:/usr/sbin:/sbin
printf '#!/bin/sh\nSHAPECTL_TEST_MAIN=1 exec "%s" "$@"\n' "$SHAPECTL_TEST" >bin/shapectl
chmod +x bin/shapectl

# Without addresses of IPv6 the kernel sends nothing by itself.
quiet() {
	echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
	echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
}
quiet
ip link set lo up
ip netns add far
nsenter --net=/run/netns/far bash -c "$(declare -f quiet); quiet"

# until_ok COMMAND: waits until it succeeds.
until_ok() {
	for ((i = 0; i < 500; i++)); do
		"$@" >/dev/null 2>&1 && return
		sleep 0.02
	done
	return 1
}

is_up() {
	[[ $(ip link show "$1") == *"state UP"* ]]
}

# device NAME [NETWORK...]: a device that reaches the networks. Its other end is in the namespace far.
device() {
	ip link add "$1" type veth peer name "$1" netns far
	ip link set "$1" arp off up
	ip -n far link set "$1" arp off up
	local network
	for network in "${@:2}"; do
		ip address add "${network%.*}.1/${network#*/}" dev "$1"
	done
	until_ok is_up "$1"
}

# send ADDRESS PACKETS [BYTES]: UDP packets of so many bytes on the wire, 1000 if not given.
send() {
	local payload
	printf -v payload '%*s' $((${3:-1000} - 42)) ''
	for ((i = 0; i < $2; i++)); do
		printf %s "$payload" >&3
	done 3>"/dev/udp/$1/53"
}

# from_far DEVICE FROM TO PACKETS [BYTES]: the same, to an address of this namespace.
from_far() {
	ip -n far address add "$2/32" dev "$1" 2>/dev/null
	ip -n far route replace "$3/32" dev "$1" src "$2"
	nsenter --net=/run/netns/far bash -c "$(declare -f send); send $3 $4 ${5-}"
}

# load ADDRESS...: sends to each of them until unload.
load() {
	local address
	for address; do
		send "$address" 10000000 1514 &
	done
	sleep 0.2
}

unload() {
	# shellcheck disable=SC2046 # one word a process
	kill $(jobs -p)
	wait || true
}

# streams FILE: a capture of two UDP streams to 10.0.0.7 for 2 s, each of 20 Mbit/s: packets of 1514 bytes and of 65226.
streams() {
	local due=(0 0) bytes=(1514 65226) gap=(605600 26090400) i record
	{
		printf '\x4d\x3c\xb2\xa1\x02\0\x04\0\0\0\0\0\0\0\0\0\xff\xff\0\0\x01\0\0\0'
		while ((i = due[1] < due[0], due[i] < 2000000000)); do
			printf -v record '\\x%02x' \
				$((due[i] / 1000000000)) 0 0 0 \
				$((due[i] % 1000000000 & 255)) $((due[i] % 1000000000 >> 8 & 255)) $((due[i] % 1000000000 >> 16 & 255)) $((due[i] % 1000000000 >> 24)) \
				42 0 0 0 $((bytes[i] & 255)) $((bytes[i] >> 8)) 0 0 \
				2 0 0 0 0 1 2 0 0 0 0 2 8 0 \
				0x45 0 $((bytes[i] - 14 >> 8)) $((bytes[i] - 14 & 255)) 0 0 0 0 64 17 0 0 192 0 2 1 10 0 0 7 \
				0 $((i + 1)) 0 53 $((bytes[i] - 34 >> 8)) $((bytes[i] - 34 & 255)) 0 0
			# shellcheck disable=SC2059 # its escapes are the bytes
			printf "$record"
			((due[i] += gap[i]))
		done
	} >"$1"
}
