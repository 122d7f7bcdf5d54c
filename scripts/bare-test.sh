#!/usr/bin/env bash
# bare-test.sh [TARGET...]: makes a Debian that has git, make, ca-certificates and Go alone, clones this checkout there, and
# makes each target: demo, if none is named. The mirror is that of this machine, and Go's caches are, to save time.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# bare: the first process of new namespaces. It enters the new system.
bare() {
	local root=$1 cache
	shift
	mount --bind "$root" "$root"
	cd "$root"
	mount -t proc proc proc
	mount -t sysfs sysfs sys
	mount -t bpf -o mode=0700 bpf sys/fs/bpf
	mount --rbind /dev dev
	for cache in "GOROOT usr/local/go" "GOMODCACHE root/go/pkg/mod" "GOCACHE root/.cache/go-build"; do
		mkdir -p "${cache#* }"
		mount --bind "$(go env "${cache% *}")" "${cache#* }"
	done
	cp /etc/resolv.conf etc/resolv.conf
	apt-config dump | grep ^Acquire:: >etc/apt/apt.conf.d/99host
	mkdir host
	pivot_root . host
	umount -l /host
	# shellcheck disable=SC2016 # the new system's bash fills it in
	exec env -i HOME=/root PATH=/usr/local/go/bin:/usr/sbin:/usr/bin:/sbin:/bin GOPROXY="$GOPROXY" GOSUMDB="$GOSUMDB" \
		bash -ec 'cd /srv/shapectl; for target; do make "$target"; done' bare "$@" </dev/null
}

if [[ ${1-} == bare ]]; then
	"$@"
	exit
fi
"$here/need.sh" "${0##*/}" debootstrap=debootstrap unshare=util-linux pivot_root=util-linux
[[ $# -gt 0 ]] || set -- demo
# shellcheck disable=SC2016 # apt-get fills it in
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' | head -1)
[[ $mirror ]] || { echo "${0##*/}: apt knows no Debian mirror: run apt-get update" >&2; exit 1; }
tmp=$(mktemp -d)
trap 'rm -rf --one-file-system "$tmp"' EXIT
system=$tmp/debian
debootstrap --variant=minbase --include=git,make,ca-certificates bookworm "$system" "$mirror" >"$tmp/log" || { cat "$tmp/log" >&2; exit 1; }
git clone -q "${here%/*}" "$system/srv/shapectl"
GOPROXY=$(go env GOPROXY) GOSUMDB=$(go env GOSUMDB) unshare --mount --pid --fork --kill-child bash "$0" bare "$system" "$@"
