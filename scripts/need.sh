#!/usr/bin/env bash
# need.sh WHY WANTED=PACKAGE...: makes sure that each WANTED, a command or an absolute path, is there. For root it
# installs the Debian packages of those that are not, unless SHAPECTL_INSTALL=no.
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin # `su` leaves these out, and ip and tc live there
why=$1
shift

# missing: fills `absent` and `packages` with what is not there.
missing() {
	absent=() packages=()
	local pair wanted
	for pair in "$@"; do
		wanted=${pair%%=*}
		if [[ $wanted == /* ]]; then
			[[ -e $wanted ]] && continue
		else
			[[ $(type -P "$wanted") ]] && continue
		fi
		absent+=("$wanted")
		[[ " ${packages[*]} " == *" ${pair#*=} "* ]] || packages+=("${pair#*=}")
	done
	[[ ${#absent[@]} -gt 0 ]]
}

missing "$@" || exit 0

if [[ ! $(type -P apt-get) ]]; then
	echo "$why needs ${absent[*]}: install them with this system's package manager (Debian calls the packages: ${packages[*]})" >&2
	exit 1
fi
command="apt-get install --no-install-recommends ${packages[*]}"
if [[ $EUID -ne 0 ]]; then
	echo "$why needs ${absent[*]}, and only root can install them: run  sudo $command" >&2
	exit 1
fi
if [[ ${SHAPECTL_INSTALL-} == no ]]; then
	echo "$why needs ${absent[*]}, and SHAPECTL_INSTALL=no forbids to install them: run  $command" >&2
	exit 1
fi
exec 9>/run/lock/shapectl-need
flock 9 # another may be installing
missing "$@" || exit 0
echo "$why needs ${absent[*]}; installing with  $command" >&2

# noninteractive: the package iperf3 would ask whether to start a server, and wait for the answer.
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# An old list of packages names versions that are gone; a failed update still leaves one that may do.
{ apt-get update || true; } </dev/null >"$log" 2>&1 9>&-
if ! apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=120 "${packages[@]}" </dev/null >>"$log" 2>&1 9>&- || missing "$@"; then
	cat "$log" >&2
	echo "could not install ${packages[*]}, which $why needs: see above what apt-get said" >&2
	exit 1
fi
