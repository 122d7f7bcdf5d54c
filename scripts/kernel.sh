#!/usr/bin/env bash
# kernel.sh KERNEL: downloads a Debian kernel for virtual machines and prints its folder, which has `vmlinuz` and
# `lib/modules/RELEASE`. KERNEL is 5.10, 6.1, 6.12 or `newest`, the newest that Debian packages, backports included.
# Kernels come from the host's package mirror. They stay in ~/.cache/shapectl or $SHAPECTL_CACHE, and the script looks
# for a newer one once a day. Apt runs with a configuration of its own, so nothing changes on the host.
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH=$PATH:/usr/sbin:/sbin # depmod is there

die() {
	echo "${0##*/}: $*" >&2
	exit 1
}

kernel=${1-}
case $kernel in
5.10) suites=bullseye ;;
6.1) suites=bookworm ;;
6.12) suites=trixie ;;
newest) suites='sid trixie-backports' ;;
*) die "there is no kernel '$kernel': it is one of 5.10, 6.1, 6.12, newest" ;;
esac

if [[ ! $(type -P apt-get) ]]; then
	die "kernels come from Debian's package mirrors, through apt-get, which is not there"
fi
[[ $(dpkg --print-architecture) == amd64 ]] || die "the guests are amd64, and this machine is not"
"$here/need.sh" "${0##*/}" depmod=kmod

home=~ # also where HOME is not set
cache=${SHAPECTL_CACHE:-${XDG_CACHE_HOME:-$home/.cache}/shapectl}/kernels/$kernel
mkdir -p "$cache" || die "there is no place to keep kernels in: set SHAPECTL_CACHE to a folder that can be written to"
cache=$(cd "$cache" && pwd)

# Only the holder of the lock writes. It removes what an interrupted run left.
exec 9>>"$cache/lock"
flock 9
new=$cache/new
rm -rf "$new"
trap 'rm -rf "$new"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# intact FOLDER: succeeds if the checksums match.
intact() {
	(cd "$1" 2>/dev/null && sha256sum --check --status sums 2>/dev/null)
}

# apt COMMAND ARGUMENT...: runs apt-COMMAND with the private configuration.
apt() {
	"apt-$1" -c="$new/apt.conf" "${@:2}" </dev/null 2>>"$new/log"
}

# configure_apt URI: writes that configuration.
configure_apt() {
	mkdir -p "$new"/{lists,cache,trusted}
	# The host's keys for Debian's suites and for the mirror.
	local file keys
	eval "$(apt-config shell trusted Dir::Etc::trustedparts/d)"
	mapfile -t keys < <(grep -ihE '^Signed-By:|signed-by=' "${entries[@]}" | grep -oE '/[^], ]+')
	for file in "${trusted:-/etc/apt/trusted.gpg.d}"/*.{gpg,asc} /usr/share/keyrings/debian-archive-keyring.* "${keys[@]}"; do
		[[ -e $file ]] && ln -sf "$file" "$new/trusted/"
	done
	cat >"$new/sources.sources" <<-END
		Types: deb
		URIs: $1
		Suites: $suites
		Components: main
	END
	# Backports and the like have a lower priority of their own.
	cat >"$new/preferences" <<-END
		Package: *
		Pin: release c=main
		Pin-Priority: 500
	END
	cat >"$new/apt.conf" <<-END
		#clear APT::Update::Pre-Invoke;
		#clear APT::Update::Post-Invoke;
		#clear APT::Update::Post-Invoke-Success;
		#clear Acquire::IndexTargets::deb;
		Acquire::IndexTargets::deb::Packages {
			MetaKey "\$(COMPONENT)/binary-\$(ARCHITECTURE)/Packages";
			flatMetaKey "Packages";
			ShortDescription "Packages";
			Description "\$(RELEASE)/\$(COMPONENT) \$(ARCHITECTURE) Packages";
		};
		Acquire::AllowInsecureRepositories "false";
		Acquire::AllowWeakRepositories "false";
		APT::Get::AllowUnauthenticated "false";
		Acquire::Retries "2";
		Acquire::http::Timeout "30";
		Acquire::Languages "none";
		APT::Architecture "amd64";
		APT::Architectures { "amd64"; };
		APT::Default-Release "";
		APT::Sandbox::User ""; // that user could not write to the cache
		Dir::Etc::sourcelist "$new/sources.sources";
		Dir::Etc::sourceparts "/dev/null";
		Dir::Etc::preferences "$new/preferences";
		Dir::Etc::preferencesparts "/dev/null";
		Dir::Etc::trusted "/dev/null";
		Dir::Etc::trustedparts "$new/trusted";
		Dir::State "$new";
		Dir::State::lists "$new/lists";
		Dir::State::status "/dev/null";
		Dir::Cache "$new/cache";
	END
}

# find_packages: sets `packages` to the kernel's packages, as NAME=VERSION, and sets `version`.
find_packages() {
	local wanted=(linux-image-cloud-amd64) i name lines
	packages=() version=
	for ((i = 0; i < ${#wanted[@]}; i++)); do
		lines=$(apt cache show --no-all-versions "${wanted[i]}") || return 1
		if [[ ${wanted[i]} == *-[0-9]* ]]; then # other packages only depend on the current one
			version=$(sed -n 's/^Version: //p' <<<"$lines")
			packages+=("${wanted[i]}=$version")
		fi
		while read -r name; do
			[[ " ${wanted[*]} " == *" $name "* ]] || wanted+=("$name")
		done < <(sed -n 's/^Depends: //p' <<<"$lines" | grep -oE 'linux-(image|base|binary|modules)-[0-9][^ ,]*-cloud-amd64')
	done
	[[ $version ]]
}

# download FOLDER: the kernel of `packages`, unpacked.
download() {
	local debs files
	echo "downloading Linux $version for the guest" >&2
	mkdir "$new/debs" "$1"
	(cd "$new/debs" && apt get --quiet=2 download "${packages[@]}" >>"$new/log") || return 1
	debs=("$new/debs"/*.deb)
	for file in "${debs[@]}"; do
		dpkg-deb -x "$file" "$new/unpacked" 2>>"$new/log" || return 1
	done
	# /lib may be a link to /usr/lib, or a folder.
	mkdir "$1/lib"
	files=("$new"/unpacked/{,usr/}lib/modules/*/kernel)
	mv "${files[0]%/*/kernel}" "$1/lib/modules"
	files=("$new"/unpacked/boot/vmlinuz-* "$1"/lib/modules/*/vmlinuz)
	mv "${files[0]}" "$1/vmlinuz"
	files=("$1"/lib/modules/*)
	depmod -b "$1" "${files[0]##*/}" || return 1
	(cd "$1" && find vmlinuz lib -type f -print0 | xargs -0 sha256sum >sums) || return 1
	sync -f "$1"
}

# update: looks for a newer kernel; on failure `complaint` says why.
update() {
	local uri uris entries
	# shellcheck disable=SC2016 # $(...) is for apt-get to fill in
	mapfile -t uris < <(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT) $(SOURCESENTRY)' \
		'Created-By: Packages' | awk '$3 == "main" && $2 !~ /security|\// { print $1 }' | sort -u)
	# shellcheck disable=SC2016
	mapfile -t entries < <(apt-get indextargets --format '$(SOURCESENTRY)' 'Created-By: Packages' | sed 's/:[0-9]*$//' | sort -u)
	complaint="apt knows no mirror: /etc/apt/sources.list names none"
	# For lists, packages and their unpacked files at the same time.
	if (($(df -k --output=avail "$cache" | tail -n 1) < 300000)); then
		complaint="a kernel needs 300 MB of disk to unpack, and $cache has less"
		return 1
	fi
	for uri in "${uris[@]}"; do
		rm -rf "$new"
		configure_apt "$uri" || exit 1
		apt get --quiet=2 update >>"$new/log" || true # find_packages sees the result
		complaint="the mirror has no kernel in the suites $suites: $(grep -m 1 '^[EW]:' "$new/log" || true)"
		find_packages || continue
		grep '^W: GPG error' "$new/log" >&2 || true # of one of two suites
		if [[ $kernel != newest && $version != "$kernel".* ]]; then
			complaint="Linux $kernel is not in $suites any more, but $version is"
			continue
		fi
		[[ $version == "$(readlink "$cache/current")" ]] && intact "$cache/current" && return
		if ! download "$new/tree"; then
			complaint="could not download and unpack Linux $version: $(tail -n 1 "$new/log")"
			return 1
		fi
		rm -rf "${cache:?}/$version"
		[[ -L $cache/current ]] || rm -rf "$cache/current"
		mv "$new/tree" "$cache/$version"
		ln -s "$version" "$new/current"
		mv -T "$new/current" "$cache/current"
		return
	done
	return 1
}

shopt -s nullglob
if ! intact "$cache/current"; then
	[[ -e $cache/current ]] && echo "the kernel in $cache is damaged" >&2
	update || die "$complaint"
elif [[ ! $(find "$cache/checked" -mmin -1440 2>/dev/null) ]]; then
	update || echo "could not look for a kernel newer than $(readlink "$cache/current"): $complaint" >&2
fi
touch "$cache/checked"
# The previous kernel stays: another guest may be reading it.
realpath "$cache/current"
