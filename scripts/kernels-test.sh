#!/usr/bin/env bash
# kernels-test.sh [KERNEL...]: runs kernel tests, real traffic, and tests of departure times under Debian's kernels, in
# emulated machines. 6.1, 6.12 and the newest must pass; 5.10 must be refused clearly. Without arguments it tests these
# four. $GUESTS guests run at a time, 2 by default.
# kernels-test.sh --update-costs: only writes what packets and loading cost now.
set -euo pipefail
export LC_ALL=C
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "${here%/*}"

kernels=("$@")
[[ $# -gt 0 ]] || kernels=(newest 6.12 6.1 5.10)
packages=(bpf internal/program pkg/fq pkg/loader cmd/shapectl internal/wire)
costs=internal/program/testdata/costs.tsv update=
if [[ ${1-} == --update-costs ]]; then
	update=1 kernels=() packages=(internal/program)
fi
[[ -x $SHAPECTL ]] || die "$SHAPECTL is not there: build it with make"
"$here/need.sh" "${0##*/}" ip=iproute2 ss=iproute2 iperf3=iperf3 nft=nftables

tmp=$(mktemp -d)
# shellcheck disable=SC2317 # it is called by a trap
finish() {
	local status=$?
	trap '' HUP INT PIPE TERM
	set +e
	# shellcheck disable=SC2046 # one word a process
	kill $(jobs -p) 2>/dev/null
	wait
	rm -rf "$tmp"
	exit "$status"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE
trap 'exit 143' TERM

# The tree in the guests, with the files that tests look for at the same paths.
tree=$tmp/tree
for package in "${packages[@]}"; do
	mkdir -p "$tree/$package"
	# The tag adds tests that need features which only the guests are known to have.
	CGO_ENABLED=0 go test -c -tags guest -trimpath -ldflags '-s -w' -o "$tree/$package/package.test" "./$package"
	[[ -d $package/testdata ]] && cp -R "$package/testdata" "$tree/$package/"
done
cp go.mod "$tree/"
mkdir "$tree/bin"
cp "$SHAPECTL" "$tree/bin/shapectl"
mkdir "$tree/scripts"
cp scripts/*.sh "$tree/scripts/"
files=(-f "$tree:/shapectl/repository")
# The qdiscs that queue packets, and others that a device may have instead.
qdiscs=()
for module in ifb sch_fq sch_fq_codel sch_codel sch_sfq sch_cake sch_htb sch_tbf tun; do
	qdiscs+=(-M "$module")
done
tunnels=(-M vxlan -M geneve -M ip_gre -M ipip)
for module in nf_conntrack nft_masq nft_nat nft_chain_nat; do
	qdiscs+=(-M "$module")
done
programs=()
for program in bash ip tc ss iperf3 nft; do
	programs+=(-p "$program")
done

# With this cat first in PATH, guest.sh must wait for the copied output, as on a busy machine.
mkdir "$tmp/slow"
cat >"$tmp/slow/cat" <<'END'
#!/bin/sh
[ $# -eq 0 ] || exec /bin/cat "$@"
all=$(/bin/cat; echo .)
sleep 1
printf %s "${all%.}"
END
chmod 755 "$tmp/slow/cat"

# guest KERNEL PARTS OPTION...: runs parts in one guest. Booting takes as long as a short part, so parts share guests.
guest() {
	local status=0 began=$SECONDS parts out
	read -ra parts <<<"$2"
	out=$tmp/out-$1-${parts[0]}
	[[ $2 != refused ]] || local PATH=$tmp/slow:$PATH
	# shellcheck disable=SC2016 # the guest's bash fills it in
	# The guest ends if this script is killed.
	setpriv --pdeathsig TERM "$here/guest.sh" "$1" -t 2400 -M veth -M cls_bpf -M sch_ingress -M bridge "${files[@]}" "${programs[@]}" "${@:3}" \
		-- bash -ec 'for part; do bash "$0" "$part"; done' /shapectl/repository/scripts/kernels-guest.sh "${parts[@]}" >"$out" 2>&1 || status=$?
	if [[ $2 == refused && $status == 0 ]] && ! grep -q '^ok' "$out"; then
		echo "the last output of the guest is lost" >>"$out"
		status=125
	fi
	{
		flock 8 # so that the output of two guests does not mix
		echo "== $1 $2 ($((SECONDS - began)) s)"
		cat "$out"
		((status == 0)) || echo "FAIL $1 $2: exit status $status"
	} 8>"$tmp/lock"
	return "$status"
}

failed=0
# run KERNEL PARTS OPTION...: starts a guest as soon as fewer than $GUESTS run.
run() {
	while [[ $(jobs -pr | wc -l) -ge ${GUESTS:-2} ]]; do
		wait -n || failed=1
	done
	guest "$@" &
}
[[ ! $update ]] || for kernel in 6.1 6.12 newest; do
	run "$kernel" costs -i -M nf_conntrack
done
# The longest parts come first, so that two guests run until the end.
for kernel in "${kernels[@]}"; do
	case $kernel in
	5.10) ;;
	6.12) run "$kernel" 'kinds life queues' "${qdiscs[@]}" "${tunnels[@]}" ;;
	newest) run "$kernel" kinds "${qdiscs[@]}" "${tunnels[@]}" ;;
	*) run "$kernel" 'kinds life' "${qdiscs[@]}" "${tunnels[@]}" ;;
	esac
done
for kernel in "${kernels[@]}"; do
	case $kernel in
	5.10) run "$kernel" refused -i ;;
	newest) run "$kernel" 'costs pace traffic' -i -M nf_conntrack -M sch_fq -M 8021q -M ifb -M sch_netem ;;
	*) run "$kernel" 'costs pace queue traffic' -i -M nf_conntrack -M sch_fq -M 8021q -M ifb -M sch_netem ;;
	esac
done
while [[ $(jobs -p) ]]; do
	wait -n || failed=1
done
# compare AWK-OPTION...: compares the figures of all guests with the committed ones.
compare() {
	local out
	for out in "$tmp"/out-*-costs; do
		grep -P '^[\d.]+\S*\t\d+\t' "$out" || die "a guest measured no costs: $out"
	done >"$tmp/costs"
	awk "$@" -f "$here/costs.awk" "$tmp/costs" "$costs"
}
if [[ $update ]]; then
	compare -v update=1 >"$tmp/new"
	((failed == 0)) || die "failed"
	mv "$tmp/new" "$costs"
	exit
elif [[ ${kernels[*]} != 5.10 ]] && ! compare; then
	echo "If the change is worth this, commit what scripts/${0##*/} --update-costs writes, and say why in the commit."
	failed=1
fi
((failed == 0)) || die "failed"
echo "${#kernels[@]} kernels passed"
