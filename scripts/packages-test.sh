#!/usr/bin/env bash
# packages-test.sh: makes a release and uses its packages. Two must give the same bytes. The .deb is installed,
# upgraded while traffic is limited, removed and purged; the .rpm, too. All of that is in namespaces of its own, with
# an overlay as the root file system, so this machine does not change.
set -euo pipefail
export LC_ALL=C
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

# The versions of the test: one tree, built as a release candidate and as the release after it.
before=v0.1.0-rc.1 after=v0.1.0

passed() {
	echo "ok   $*"
}

# same WHAT EXPECTED GOT
same() {
	[[ $2 == "$3" ]] || die "$1: expected '$2', got '$3'"
}

# build: releases of two clones in different folders, so that bin/ here stays as it is.
build() {
	local tree commit=(env GIT_{AUTHOR,COMMITTER}_DATE='1700000000 +0000' git -c user.name=test -c user.email=test@invalid commit -qm "$after")
	ssh-keygen -q -t ed25519 -N '' -f "$tmp/key"
	for tree in "$tmp/one" "$tmp/another/folder"; do
		mkdir -p "$tree"
		(cd "${here%/*}" && git ls-files -z --cached --others --exclude-standard | tar -c --null -T -) | tar -x -m -C "$tree"
		sed -i "s/^## Unreleased/## ${after#v}/" "$tree/CHANGELOG.md"
		echo "shapectl $(<"$tmp/key.pub")" >>"$tree/packaging/signers"
		(cd "$tree" && git init -q && git add -A && "${commit[@]}" && git tag "$after")
	done
	export SIGN_KEY=$tmp/key
	(cd "$tmp/one" && make -s release OUT="$tmp/after") >"$tmp/one.log" 2>&1 &
	local first=$!
	(
		umask 077
		export TZ=Asia/Tokyo GOMAXPROCS=1
		cd "$tmp/another/folder" &&
			make -s release OUT="$tmp/again" &&
			make -s all VERSION="$before" && packaging/build.sh "$before" "$tmp/before" "$arch"
	) >"$tmp/another.log" 2>&1 || die "the second release: $(<"$tmp/another.log")"
	wait "$first" || die "the first release: $(<"$tmp/one.log")"
	cat "$tmp/one.log"
	diff -r "$tmp/after" "$tmp/again" || die 'two releases differ: see above'
	passed 'two releases in different folders, with another umask, time zone and number of CPUs, are the same bytes'

	(cd "$tmp/after" && ssh-keygen -q -Y verify -f "$tmp/one/packaging/signers" -I shapectl -n shapectl -s SHA256SUMS.sig <SHA256SUMS &&
		sha256sum -c --quiet SHA256SUMS) || die 'the release does not agree with its signature'
	same 'files that SHA256SUMS does not name' SHA256SUMS,SHA256SUMS.sig \
		"$(cd "$tmp/after" && find . -type f -printf '%P\n' | grep -vxFf <(cut -c 67- SHA256SUMS) | sort | paste -sd,)"
	same 'what the image runs' 'linux/amd64 linux/arm64' "$(image_platforms)"
	passed 'the release: signature, checksums, and an image for both architectures'
}

# image_platforms: the platforms of the image, whose every blob has the digest that it is named by.
image_platforms() {
	mkdir "$tmp/image"
	tar -C "$tmp/image" -xf "$tmp/after/"*-image.tar
	(cd "$tmp/image/blobs/sha256" && sha256sum ./* | while read -r digest file; do [[ ./$digest == "$file" ]] || die "the blob $file has the digest $digest"; done)
	local index
	index=$(jq -r '.manifests[0].digest' "$tmp/image/index.json")
	jq -r '[.manifests[].platform | "\(.os)/\(.architecture)"] | join(" ")' "$tmp/image/blobs/${index/://}"
}

# check_versions: each of these is later than the one before it, to dpkg and to rpm.
check_versions() {
	local described version previous=''
	for described in v0.0.9 v0.1.0-rc.1 v0.1.0-rc.1-3-gabcdef0 v0.1.0-rc.2 v0.1.0 v0.1.0-dirty v0.1.0-5-gabcdef0 \
		v0.1.0-5-gabcdef0-dirty v0.1.0-10-gabcdef0 v0.1.1; do
		version=$("${here%/*}/packaging/version.sh" "$described")
		if [[ $previous ]]; then
			dpkg --compare-versions "$previous" lt "$version" || die "dpkg sorts $previous after $version"
			same "rpm's order of $previous and $version" -1 "$(rpm --eval "%{lua: print(rpm.vercmp('$previous', '$version'))}")"
		fi
		previous=$version
	done
	dpkg --compare-versions '0~572.gabcdef0' lt '0.0.1~rc.1' || die 'dpkg sorts a build without a tag after a release'
	passed 'versions sort alike for dpkg and rpm'
}

# boot: makes the root file system that the rest sees, and goes there.
boot() {
	mount -t tmpfs tmpfs "$tmp/layer"
	mkdir "$tmp"/layer/{upper,work,root}
	mount -t overlay -o "lowerdir=/,upperdir=$tmp/layer/upper,workdir=$tmp/layer/work" overlay "$tmp/layer/root"
	local root=$tmp/layer/root
	mount --rbind /dev "$root/dev"
	mount -t proc proc "$root/proc"
	mount -t sysfs sysfs "$root/sys"
	mount -t bpf -o mode=0700 bpf "$root/sys/fs/bpf"
	mount -t tmpfs tmpfs "$root/run"
	mount -t tmpfs tmpfs "$root/tmp"
	# systemctl only writes down what it is asked.
	mount -t tmpfs -o mode=755 tmpfs "$root/usr/local"
	mkdir -p "$root"/usr/local/sbin "$root/run/systemd/system" "$root/run/packages" "$root/run/upper" "$root/run/repository"
	printf '#!/bin/sh\necho "$*" >>/run/systemctl\n' >"$root/usr/local/sbin/systemctl"
	chmod +x "$root/usr/local/sbin/systemctl"
	mount --bind "$tmp" "$root/run/packages"
	mount --bind "$tmp/layer/upper" "$root/run/upper"
	mount --bind "${here%/*}" "$root/run/repository"
	ip link set lo up
	exec env PATH="/usr/local/sbin:$PATH" chroot "$root" bash "/run/repository/scripts/${0##*/}" use "$arch"
}

# asked WHAT EXPECTED: what systemctl was asked for since the last call.
asked() {
	local lines
	lines=$(paste -sd';' /run/systemctl 2>/dev/null) || true
	rm -f /run/systemctl
	same "$1 asks of systemctl" "$2" "$lines"
}

# left: what the packages have left in the root file system, but for the records of the package managers and man.
left() {
	(cd /run/upper && find . \( ! -type d ! -type c -o -name '*shapectl*' -type d \) \
		! -path './var/lib/dpkg/*' ! -path './var/lib/rpm/*' ! -path './var/log/*' ! -path './var/cache/*')
}

# rule: sets the array `rule` to the numbers of the only rule, as a build outside of all packages shows them.
rule() {
	local json
	json=$("$tarball/bin/shapectl" -n "$near" show -j)
	rule=()
	for key in attached passed_packets passed_bytes dropped_packets; do
		[[ $json =~ \"$key\":\ *([a-z0-9]+) ]] || die "no rule is in force: $json"
		rule+=("${BASH_REMATCH[1]}")
	done
}

# check_installed: checks a fresh root file system after `dpkg -i`.
check_installed() {
	same 'shapectl version' "shapectl $before" "$(shapectl version | cut -d' ' -f1,2)"
	same 'dpkg --verify' '' "$(dpkg --verify shapectl)"
	[[ ! -e /etc/shapectl/policy.yaml ]] || die 'the package brings a policy'
	same 'units that are enabled' '' "$(find /etc/systemd -name 'shapectl*')"
	grep -q '^ExecStart=/usr/bin/shapectl ' /usr/lib/systemd/system/shapectl.service || die 'the unit has another path'

	local page lint
	for page in "${here%/*}"/docs/man/*.1; do
		[[ -e $page ]] || continue # a tree without man pages
		lint=$(zcat "/usr/share/man/man1/${page##*/}.gz" | mandoc -Tlint -Wwarning) || die "${page##*/}: $lint"
	done

	# Every link of the docs that is a path.
	local link
	find /usr/share/doc/shapectl -name '*.md' | while IFS= read -r page; do
		{ grep -oP '\]\(\K[^)#:\s]+(?=[)#])' "$page" || true; } | while IFS= read -r link; do
			[[ -e ${page%/*}/$link ]] || die "$page links to $link, which is not installed"
		done || exit
	done

	# As bash does when somebody types `shapectl ex` and the tab key.
	local words
	words=$(bash -c '
		. /usr/share/bash-completion/bash_completion
		_completion_loader shapectl
		COMP_WORDS=(shapectl ex) COMP_CWORD=1 COMP_LINE="shapectl ex" COMP_POINT=11 COMP_TYPE=63
		__start_shapectl
		echo "${COMPREPLY[@]%% *}"' 2>/dev/null)
	same 'completion of "shapectl ex" by bash' 'explain export' "$words"
	for shell in zsh fish; do
		[[ ! $(type -P "$shell") ]] || "$shell" -n "$(find /usr/share/{zsh,fish} -name '*shapectl*' -path "*$shell*")"
	done
	passed 'the .deb: installed, no unit enabled, man pages, links of docs, completion'
}

# check_upgrade: 100 Mbit/s of UDP meet a limit of 8 Mbit/s while dpkg upgrades shapectl.
check_upgrade() {
	local ms begin received_before packets
	ip -n "$near" neighbour add "${far_address[4]}" lladdr 02:00:00:00:00:02 dev eth0
	ip -n "$far" neighbour add "${near_address[4]}" lladdr 02:00:00:00:00:01 dev eth0
	serve "$far"
	received 4
	received_before=$received
	now_us
	begin=$now
	shapectl -n "$near" set eth0 egress "${network[4]}" --rate 8mbit --capacity 64kb >/dev/null
	send "$near" "${far_address[4]}" -u -b 100M -l 1400 -t 60
	until ((received > received_before + 200000)); do
		kill -0 "$client" 2>/dev/null || die "iperf3: $(<"$tmp/client")"
		pause 0.05
		received 4
	done
	rule
	packets=${rule[1]}
	same 'attached before the upgrade' true "${rule[0]}"

	nsenter --net="/run/netns/$near" dpkg -i "/run/packages/after/shapectl_"*"_$arch.deb" >/dev/null
	rule
	same 'attached after the upgrade' true "${rule[0]}"
	((rule[1] > packets)) || die "the upgrade reset the counters: from $packets to ${rule[1]}"
	same 'shapectl version' "shapectl $after" "$(shapectl version | cut -d' ' -f1,2)"
	# The first command that changes a rule replaces the old build's programs with the new ones.
	shapectl -n "$near" set eth0 egress 198.51.100.0/24 --rate 8mbit >/dev/null
	shapectl -n "$near" delete eth0 egress 198.51.100.0/24 >/dev/null
	pause 1
	kill -KILL "$client"
	wait "$client" 2>/dev/null || true
	for _ in {1..10}; do # the connections need a moment to end
		now_us
		received 4
		rule
		((rule[2] != received - received_before)) || break
		pause 0.2
	done
	stop
	ms=$(((now - begin) / 1000))
	same 'bytes that arrived are those that the limit passed' "${rule[2]}" "$((received - received_before))"
	((received - received_before <= 65536 + ms * 1000)) || die "$((received - received_before)) bytes arrived in $ms ms"
	((rule[3] > 0)) || die 'nothing was dropped, so this shows nothing'
	passed "an upgrade under traffic: $((received - received_before)) bytes arrived in $ms ms, all counted; ${rule[3]} packets were dropped"
}

# check_scripts: an upgrade to a build that cannot read the limits keeps the rules that the old build saved.
check_scripts() {
	local said pins saved=/var/lib/shapectl/before-upgrade.yaml
	dpkg -e "/run/packages/after/shapectl_"*"_$arch.deb" "$tmp/control"
	[[ ! -e $saved ]] || die "the upgrade left $saved"
	local run=(nsenter --net="/run/netns/$near")
	"${run[@]}" "$tmp/control/preinst" upgrade 0.1
	grep -q 8mbit "$saved" || die "the old build's rules were not saved"
	# shapectl refuses pins that others may write to, as it refuses those of another layout.
	pins=/sys/fs/bpf/shapectl
	chmod 777 "$pins"
	said=$("${run[@]}" "$tmp/control/postinst" configure 0.1 2>&1)
	"${run[@]}" "$tmp/control/preinst" upgrade 0.2
	chmod 700 "$pins"
	grep -q 8mbit "$saved" || die "a second upgrade lost the saved rules"
	[[ $said == *"shapectl flush --all && shapectl apply $saved"* && -e $saved ]] || die "postinst, of limits that it cannot read, says '$said'"
	same 'postinst, of limits that it can read, says' '' "$("${run[@]}" "$tmp/control/postinst" configure 0.1 2>&1)"
	[[ ! -e $saved ]] || die "postinst left $saved"
	rm -f /run/systemctl
	passed 'an upgrade to a build with another layout says where the rules were saved'
}

# kept WHAT: the limit is in force.
kept() {
	rule
	same "attached $1" true "${rule[0]}"
}

use() {
	local said
	tar -C /tmp -xzf /run/packages/after/shapectl-*-linux-"$arch".tar.gz
	tarball=$(echo /tmp/shapectl-*-linux-"$arch")
	same 'the tarball: shapectl version' "shapectl $after" "$("$tarball/bin/shapectl" version | cut -d' ' -f1,2)"

	dpkg -i "/run/packages/before/shapectl_"*"_$arch.deb" >/dev/null
	asked 'dpkg -i' 'daemon-reload'
	check_installed

	SHAPECTL=/usr/bin/shapectl
	make_pair packages-test
	check_upgrade
	asked 'an upgrade by dpkg' 'daemon-reload;try-restart shapectl-serve.service'
	check_scripts

	# Files that an administrator adds.
	echo 'devices: {}' >/etc/shapectl/policy.yaml
	mkdir -p /var/lib/shapectl /etc/systemd/system/multi-user.target.wants
	touch /var/lib/shapectl/policy.yaml
	ln -s /usr/lib/systemd/system/shapectl.service /etc/systemd/system/multi-user.target.wants/
	mkdir -p /etc/cni/net.d
	echo '{"plugins": [{"type": "shapectl-cni"}]}' >/etc/cni/net.d/10-pods.conflist

	said=$(nsenter --net="/run/netns/$near" dpkg -r shapectl 2>&1)
	[[ $said == *'shapectl flush --all'* ]] || die "dpkg -r does not say how to lift the limits: $said"
	[[ $said == *'take shapectl-cni out of:'*/etc/cni/net.d/10-pods.conflist* ]] || die "dpkg -r does not say that pods need the plugin: $said"
	rm /etc/cni/net.d/10-pods.conflist
	asked 'dpkg -r' 'stop shapectl-serve.service shapectl.service;daemon-reload'
	kept 'after dpkg -r'
	[[ -e /etc/shapectl/policy.yaml && -e /var/lib/shapectl/policy.yaml ]] || die 'dpkg -r removes the policy'
	[[ ! -e /usr/bin/shapectl && ! -e /usr/share/doc/shapectl ]] || die 'dpkg -r leaves files of the package'
	dpkg -P shapectl >/dev/null
	asked 'dpkg -P' 'daemon-reload'
	kept 'after dpkg -P'
	same 'left after dpkg -P' '' "$(left)"
	passed 'the .deb: removed and purged, nothing is left but the limits'

	local rpm=(nsenter --net="/run/netns/$near" rpm --dbpath /run/rpm --force-debian --nodeps
		--define "_install_script_path $PATH")
	rpm --dbpath /run/rpm -K /run/packages/after/*.rpm >/dev/null
	"${rpm[@]}" -i /run/packages/before/*."$(rpm --eval '%{_arch}')".rpm
	asked 'rpm -i' 'daemon-reload'
	same 'rpm -V' '' "$("${rpm[@]}" -V shapectl)"
	"${rpm[@]}" -U /run/packages/after/*."$(rpm --eval '%{_arch}')".rpm
	asked 'rpm -U' 'daemon-reload;try-restart shapectl-serve.service'
	same 'rpm: shapectl version' "shapectl $after" "$(shapectl version | cut -d' ' -f1,2)"
	echo 'devices: {}' >/etc/shapectl/policy.yaml
	said=$("${rpm[@]}" -e shapectl 2>&1)
	[[ $said == *'shapectl flush --all'* ]] || die "rpm -e does not say how to lift the limits: $said"
	asked 'rpm -e' '--no-reload disable shapectl-serve.service shapectl.service;stop shapectl-serve.service shapectl.service;daemon-reload'
	kept 'after rpm -e'
	[[ -e /etc/shapectl/policy.yaml ]] || die 'rpm -e removes the policy'
	rm -r /etc/shapectl /var/lib/shapectl
	same 'left after rpm -e' '' "$(left)"
	passed 'the .rpm: installed, upgraded and erased, nothing is left but the policy and the limits'
	SHAPECTL=$tarball/bin/shapectl
}

arch=$(dpkg --print-architecture)
# The script calls itself in the namespaces.
case ${1-} in
boot)
	tmp=$2
	boot
	exit
	;;
use)
	use
	exit
	;;
esac

[[ $EUID -eq 0 ]] || die 'making namespaces needs root: run it with sudo'
"$here/need.sh" "${0##*/}" dpkg=dpkg rpm=rpm mandoc=mandoc iperf3=iperf3 ip=iproute2 unshare=util-linux jq=jq ssh-keygen=openssh-client \
	/usr/share/bash-completion/bash_completion=bash-completion
tmp=$(mktemp -d)
inside=''
trap '[[ ! $inside ]] || kill -KILL "$inside" 2>/dev/null || true; rm -rf "$tmp"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE
trap 'exit 143' TERM
mkdir "$tmp/layer"
check_versions
build
unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc --propagation private bash "$0" boot "$tmp" &
inside=$!
wait "$inside"
inside=''
echo "passed in $SECONDS s"
