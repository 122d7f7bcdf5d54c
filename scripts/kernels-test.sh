#!/usr/bin/env bash
# kernels-test.sh [KERNEL...]: tests in the kernel, real traffic, and when packets leave that are held back, under
# Debian's kernels in emulated machines. 6.1, 6.12 and the newest must do, 5.10 must be refused clearly; these four if
# none is named. Two guests run at a time.
set -euo pipefail
export LC_ALL=C
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "${here%/*}"

kernels=("$@")
[[ $# -gt 0 ]] || kernels=(newest 6.12 6.1 5.10)
packages=(bpf pkg/maps pkg/fq pkg/loader cmd/shapectl internal/wire)
[[ -x $SHAPECTL ]] || die "$SHAPECTL is not there: build it with make"
"$here/need.sh" "${0##*/}" ip=iproute2 ss=iproute2 iperf3=iperf3

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

# The tree that guests get: what tests look for is where it is here.
tree=$tmp/tree
for package in "${packages[@]}"; do
	mkdir -p "$tree/$package"
	# With those tests that need what is only known to be there in a guest.
	CGO_ENABLED=0 go test -c -tags guest -trimpath -ldflags '-s -w' -o "$tree/$package/package.test" "./$package"
	[[ -d $package/testdata ]] && cp -R "$package/testdata" "$tree/$package/"
done
cp go.mod "$tree/"
mkdir "$tree/bin"
cp "$SHAPECTL" "$tree/bin/shapectl"
mkdir "$tree/scripts"
cp scripts/*.sh "$tree/scripts/"
files=(-f "$tree:/shapectl/repository")
if [[ -d ../shared/vectors ]]; then
	files+=(-f ../shared/vectors:/shapectl/shared/vectors)
elif [[ ${SHAPECTL_NO_SKIP-} == 1 ]]; then
	die "../shared/vectors is not there, and SHAPECTL_NO_SKIP is set"
fi
# What holds packets back, and what else may be in its place.
qdiscs=()
for module in ifb sch_fq sch_fq_codel sch_codel sch_sfq sch_cake sch_htb sch_tbf tun; do
	qdiscs+=(-M "$module")
done
tunnels=(-M vxlan -M geneve -M ip_gre -M ipip)
programs=()
for program in bash ip tc ss iperf3; do
	programs+=(-p "$program")
done

# Where this cat comes first, guest.sh has to wait for what it copies, as on a machine that is busy.
mkdir "$tmp/slow"
cat >"$tmp/slow/cat" <<'END'
#!/bin/sh
[ $# -eq 0 ] || exec /bin/cat "$@"
all=$(/bin/cat; echo .)
sleep 1
printf %s "${all%.}"
END
chmod 755 "$tmp/slow/cat"

# guest KERNEL PARTS OPTION...: to boot takes as long as a short part, so those that need the same machine share one.
guest() {
	local status=0 began=$SECONDS parts out
	read -ra parts <<<"$2"
	out=$tmp/out-$1-${parts[0]}
	[[ $2 != refused ]] || local PATH=$tmp/slow:$PATH
	# shellcheck disable=SC2016 # the guest's bash fills it in
	# Should this script be killed, the guest goes, too.
	setpriv --pdeathsig TERM "$here/guest.sh" "$1" -t 900 -M veth -M cls_bpf -M sch_ingress -M bridge "${files[@]}" "${programs[@]}" "${@:3}" \
		-- bash -ec 'for part; do bash "$0" "$part"; done' /shapectl/repository/scripts/kernels-guest.sh "${parts[@]}" >"$out" 2>&1 || status=$?
	if [[ $2 == refused && $status == 0 ]] && ! grep -q '^ok' "$out"; then
		echo "what the guest said last is lost" >>"$out"
		status=125
	fi
	{
		flock 8 # not in the middle of what another says
		echo "== $1 $2 ($((SECONDS - began)) s)"
		cat "$out"
		((status == 0)) || echo "FAIL $1 $2: exit status $status"
	} 8>"$tmp/lock"
	return "$status"
}

failed=0
# run KERNEL PARTS OPTION...: as soon as there is room for another guest.
run() {
	while [[ $(jobs -pr | wc -l) -ge 2 ]]; do
		wait -n || failed=1
	done
	guest "$@" &
}
# Those that take longest come first, so that none of them is alone at the end.
for kernel in "${kernels[@]}"; do
	[[ $kernel == 5.10 ]] || run "$kernel" 'tests delay' "${qdiscs[@]}" "${tunnels[@]}"
done
for kernel in "${kernels[@]}"; do
	if [[ $kernel == 5.10 ]]; then
		run "$kernel" refused -i
	else
		run "$kernel" 'queue traffic' -i -M sch_fq -M 8021q -M ifb
	fi
done
while [[ $(jobs -p) ]]; do
	wait -n || failed=1
done
((failed == 0)) || die "failed"
echo "${#kernels[@]} kernels passed"
