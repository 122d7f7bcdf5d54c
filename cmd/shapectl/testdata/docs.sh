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

# pod NAME DEVICE [RATE]: a pod of the namespace shop, which the plugin in 10-pods.conflist limits. RATE is that of an annotation.
pod() {
	[[ -x bin/shapectl-cni ]] || (cd "$TESTDATA/../../shapectl-cni" && go build -buildvcs=false -o "$OLDPWD/bin/" .)
	ip netns add "$1"
	ip link add "$2" up type veth peer name eth0 netns "$1"
	local plugin
	plugin=$(sed -n '/"type": "shapectl-cni"/,/^    }/p' 10-pods.conflist)
	CNI_COMMAND=ADD CNI_CONTAINERID=$1 CNI_NETNS=/run/netns/$1 CNI_IFNAME=eth0 CNI_PATH=bin \
		CNI_ARGS="K8S_POD_NAMESPACE=shop;K8S_POD_NAME=$1" bin/shapectl-cni >pod.json <<<"{
		\"cniVersion\": \"1.0.0\", \"name\": \"pods\", ${plugin%\}},
		\"runtimeConfig\": {\"bandwidth\": {\"ingressRate\": ${3:-0}, \"ingressBurst\": $((${3:+4294967295} + 0))}},
		\"prevResult\": {\"cniVersion\": \"1.0.0\", \"interfaces\": [{\"name\": \"$2\"}]}}" || cat pod.json
}
