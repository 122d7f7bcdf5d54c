#!/usr/bin/env bash
# guest.sh KERNEL [OPTION]... -- COMMAND...: runs COMMAND as root under another kernel, in an emulated machine. QEMU
# needs neither root nor KVM for that. Stdout has the command's stdout and stderr. The exit status is the command's,
# or 124 after a timeout, or 125 if the guest could not start or died. kernel.sh lists the values of KERNEL. The guest
# has no disk, and no network but `lo`; its root file system is in memory.
#   -c CPUS               number of CPUs (default 2)
#   -m MIB                memory (default 1024)
#   -i                    count instructions as time: one CPU, 1 ns for each instruction
#   -t SECONDS            timeout in the host's time (default 600)
#   -M MODULE             load this kernel module first, with its dependencies
#   -f HOSTPATH:GUESTPATH copy a file or folder into the guest
#   -p PROGRAM            copy a program of the host into the guest, with its libraries; busybox provides the usual ones
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH=$PATH:/usr/sbin:/sbin # `su` leaves these out, and ip and tc live there

# die MESSAGE: 125 means that there is no exit status of the command.
die() {
	echo "${0##*/}: $*" >&2
	exit 125
}
usage() {
	die "${1:+$1; }usage: ${0##*/} 5.10|6.1|6.12|newest [-c CPUS] [-m MIB] [-i] [-t SECONDS] [-M MODULE]..." \
		"[-f HOSTPATH:GUESTPATH]... [-p PROGRAM]... -- COMMAND..."
}

[[ $# -gt 0 && $1 != -* ]] || usage
kernel=$1
shift
cpus=2 mib=1024 seconds=600 modules=() files=() accel=()
programs=(busybox sh) # busybox's shell would prefer its own commands to programs of the same name
while getopts :c:m:it:M:f:p: option; do
	case $option in
	c) cpus=$OPTARG ;;
	m) mib=$OPTARG ;;
	i) accel=(-icount 'shift=0,sleep=off') ;;
	t) seconds=$OPTARG ;;
	M) modules+=("$OPTARG") ;;
	f) files+=("$OPTARG") ;;
	p) programs+=("$OPTARG") ;;
	:) usage "-$OPTARG needs a value" ;;
	*) usage "there is no -$OPTARG" ;;
	esac
done
[[ ${*:OPTIND-1:1} == -- ]] || usage
shift $((OPTIND - 1))
[[ $# -gt 0 ]] || usage "no COMMAND"
[[ $cpus$mib$seconds =~ ^[0-9]+$ ]] || usage "-c, -m and -t need whole numbers"
[[ ${accel[*]} ]] && cpus=1

"$here/need.sh" "${0##*/}" qemu-system-x86_64=qemu-system-x86 busybox=busybox-static cpio=cpio xz=xz-utils >&2 || exit 125
image=$("$here/kernel.sh" "$kernel") || exit 125

tmp=$(mktemp -d)
qemu='' answered=''
# shellcheck disable=SC2317 # it is called by a trap
finish() {
	local status=$?
	[[ $answered || $status == 0 || $status -ge 124 ]] || status=125
	trap '' HUP INT PIPE TERM
	set +e
	if [[ $qemu ]]; then
		kill "$qemu"
		wait "$qemu"
	fi 2>/dev/null
	rm -rf "$tmp"
	exit "$status"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE
trap 'exit 143' TERM

root=$tmp/root
mkdir -p "$root"/{dev,etc,proc,root,run,sys,tmp,var,modules} "$root"/usr/{bin,sbin,lib,lib64,lib/busybox}
for folder in bin sbin lib lib64; do
	ln -s "usr/$folder" "$root/$folder"
done
ln -s ../run "$root/var/run"
ln -s ../tmp "$root/var/tmp"
ln -s /proc/self/mounts "$root/etc/mtab"
echo root:x:0:0:root:/root:/bin/sh >"$root/etc/passwd"
echo root:x:0: >"$root/etc/group"
echo 127.0.0.1 localhost >"$root/etc/hosts"

# add_file HOSTPATH GUESTPATH
add_file() {
	mkdir -p "$root/${2%/*}"
	if [[ -d $1 ]]; then
		mkdir -p "$root/$2"
		cp -RH "$1/." "$root/$2/"
	else
		cp -L "$1" "$root/$2"
	fi
}

# add_libraries FILE: adds the libraries that the file needs, and the loader.
add_libraries() {
	local library
	# For a static file, ldd fails.
	while read -r library; do
		[[ -e $root/$library ]] || add_file "$library" "$library"
	done < <(ldd "$1" 2>/dev/null | grep -oE '/[^ ]+')
}

# add_program NAME: adds it at the same path as on the host.
add_program() {
	local path plugins folder plugin
	path=$(type -P "$1") || die "-p $1: there is no such program on this machine"
	path=$(cd "${path%/*}" && pwd)/${path##*/}
	add_file "$path" "$path"
	add_libraries "$path"
	case ${path##*/} in
	iptables* | ip6tables* | xtables*) plugins=(/usr/lib/*/xtables) ;;
	ip | tc) plugins=(/usr/lib/tc /usr/lib/*/tc /usr/share/iproute2 /etc/iproute2) ;;
	*) plugins=() ;;
	esac
	for folder in "${plugins[@]}"; do
		[[ -d $folder && ! -e $root/$folder ]] || continue
		add_file "$folder" "$folder"
		for plugin in "$folder"/*.so; do
			add_libraries "$plugin"
		done
	done
}

for program in "${programs[@]}"; do
	add_program "$program"
done
[[ -e $root/bin/busybox ]] || add_file "$(type -P busybox)" /bin/busybox
for pair in "${files[@]}"; do
	from=${pair%:*} to=${pair##*:}
	[[ $pair == *:/* ]] || die "-f $pair: it is HOSTPATH:GUESTPATH, and the last begins with /"
	[[ -e $from ]] || die "-f $pair: there is no $from"
	add_file "$from" "$to"
done

# modules.dep names each module's dependencies after it; modules.builtin lists built-in modules.
library=$(echo "$image"/lib/modules/*)
for module in "${modules[@]}"; do
	pattern="/${module//[-_]/[-_]}\\.ko"
	if line=$(grep -m 1 -E "${pattern}[^:]*:" "$library/modules.dep"); then
		for file in $(tac -s ' ' <<<"${line/:/}"); do
			echo "$file"
		done
	elif ! grep -q -E "$pattern" "$library/modules.builtin"; then
		die "-M $module: Linux ${library##*/} has no such module"
	fi
done >"$tmp/load"
: >"$root/modules/list"
while read -r file; do
	name=${file##*/} name=${name%%.ko*}
	[[ -e $root/modules/$name.ko ]] && continue
	case $file in
	*.xz) xz -dc "$library/$file" ;;
	*.zst) zstd -dc "$library/$file" ;;
	*.gz) gzip -dc "$library/$file" ;;
	*) cat "$library/$file" ;;
	esac >"$root/modules/$name.ko"
	echo "$name" >>"$root/modules/list"
done <"$tmp/load"

# quoted ARGUMENT...: prints the arguments quoted for the guest's shell.
quoted() {
	local argument
	for argument; do
		printf " '%s'" "${argument//\'/\'\\\'\'}"
	done
}
quoted "$@" >"$root/command"

# The serial ports: ttyS0 is the console, ttyS1 has the command's output, ttyS2 its exit status.
cat >"$root/init" <<'END'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
$b mkdir -p /dev/pts /dev/shm
$b mount -t devpts devpts /dev/pts
$b mount -t tmpfs shm /dev/shm
$b mount -t tmpfs tmp /tmp
$b mount -t tmpfs run /run
$b mount -t bpf bpf /sys/fs/bpf
$b ln -s /proc/self/fd /dev/fd
$b ln -s fd/0 /dev/stdin
$b ln -s fd/1 /dev/stdout
$b ln -s fd/2 /dev/stderr
$b --install -s /usr/lib/busybox
[ -e /usr/bin/env ] || $b ln -s busybox /usr/bin/env
export PATH=/usr/sbin:/usr/bin:/usr/lib/busybox HOME=/root
exec 3>/dev/ttyS1 4>/dev/ttyS2
stty raw -echo <&3
stty raw -echo <&4
status=0
while read -r module; do
	insmod "/modules/$module.ko" >&3 2>&3 || status=125
done </modules/list
ip link set lo up
cd /root
if [ $status = 0 ]; then
	/bin/sh -c "exec $(cat /command)" </dev/null >&3 2>&3 3>&- 4>&-
	status=$?
fi
kill -9 -1
stty sane <&3 # waits until all output is sent
echo "status $status" >&4
stty sane <&4
poweroff -f
END
chmod 755 "$root/init"

(cd "$root" && find . | cpio --quiet -o -H newc -R 0:0) >"$tmp/initrd" || die "could not make the guest's files: is the disk full?"
# An open file without a name goes away when this script ends, however that happens. So does the machine.
exec 7<"$tmp/initrd"
rm -rf "$root" "$tmp/initrd"

# A process of its own copies the command's output, so that the script can wait for it.
exec 8> >(cat)
copying=$!
# One thread runs all CPUs. With a thread for each, QEMU before 8.1 may run code that another CPU is patching. Linux
# patches code whenever it toggles a static key, and then dies of "Oops: int3" (QEMU commit deba78709ae8; twice in 20 s
# of toggling kernel.sched_schedstats under 7.2). Without no_timer_check, Linux panics at boot with "IO-APIC + timer
# doesn't work" if the host is too busy to deliver the first ticks in time.
# Nobody attacks the guest, and it needs a third less time without kernel page-table isolation. mitigations=off is too
# much: the verifier would accept more programs. Expedited grace periods end at once, and each device waits for several.
# Without erms, Linux copies words instead of bytes, and QEMU emulates one at a time; with init_on_alloc, Linux clears all
# memory that it hands out. These two save another third.
setpriv --pdeathsig TERM timeout -k 5 "$seconds" qemu-system-x86_64 -accel tcg,thread=single \
	"${accel[@]}" -cpu Haswell-noTSX,-erms,-pcid,-invpcid,-x2apic,-tsc-deadline,-cx16 -smp "$cpus" -m "$mib" \
	-display none -monitor none -nic none -no-reboot -kernel "$image/vmlinuz" -initrd /dev/fd/7 \
	-append 'console=ttyS0 quiet panic=-1 oops=panic no_timer_check pti=off spectre_v2=off rcupdate.rcu_expedited=1 init_on_alloc=0' \
	-serial "file:$tmp/console" -serial stdio -serial "file:$tmp/status" </dev/null >&8 2>"$tmp/qemu" 8>&- &
qemu=$!
exec 8>&-
ended=0
wait "$qemu" || ended=$?
qemu=
wait "$copying" || true # the reader may have closed the pipe
read -r _ status <"$tmp/status" 2>/dev/null || status=
if [[ $status ]]; then
	answered=yes
	exit "$status"
fi
tail -n 60 "$tmp/console" "$tmp/qemu" >&2
((ended == 124)) && echo "${0##*/}: Linux ${library##*/} did not end in $seconds s" >&2 && exit 124
die "Linux ${library##*/} died; its output is above"
