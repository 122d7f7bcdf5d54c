#!/usr/bin/env bash
# units-test.sh: checks the systemd units that `make install` installs: their syntax and their exposure. Then it starts
# them under a systemd of its own, in namespaces of its own: shapectl works in their sandbox, and limits stay in force.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH=/usr/local/bin:$PATH:/usr/sbin:/sbin # the tested program comes first; `su` leaves out the last two, and ip lives there
manager=/lib/systemd/systemd

# The highest exposure allowed, in tenths of systemd's points of 0 to 10.
exposure=19
online=24 # of units that talk to other hosts: to a store, or by pings
group='' # of processes, to end them all
readers=64999 # the number of the group that may ask serve

die() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# check: has systemd check the units in their final place.
check() {
	mount --bind "$tmp/usr/local" /usr/local
	export SYSTEMD_UNIT_PATH=/usr/local/lib/systemd/system:/lib/systemd/system # without what this machine has in /etc
	local units=(/usr/local/lib/systemd/system/*.service)
	systemd-analyze verify "${units[@]}" || die 'systemd-analyze verify: see above'
	local unit most
	for unit in "${units[@]}"; do
		most=$exposure
		[[ $unit == */shapectl.service ]] || most=$online
		systemd-analyze security --offline=true --threshold="$most" --no-pager "$unit" >"$tmp/security" ||
			die "systemd-analyze security: expected at most $((most / 10)).$((most % 10)): $(<"$tmp/security")"
		grep -o 'Overall exposure level.*: [0-9.]*' "$tmp/security"
	done
	systemctl --root="$tmp" --quiet enable shapectl
	for unit in "${units[@]}"; do
		[[ -L $tmp/etc/systemd/system/multi-user.target.wants/${unit##*/} ]] || die "${unit##*/} is not enabled by 'systemctl enable shapectl'"
	done
}

# boot: the first process of new namespaces. It sets up mounts and becomes systemd. Nothing outside changes.
boot() {
	umount -l /sys
	mount -t sysfs sysfs /sys
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
	mount -t bpf -o mode=0700,nosuid,nodev,noexec bpf /sys/fs/bpf # as systemd does where it is not told that it is contained
	mount -o bind,ro /proc/sys /proc/sys
	mount --bind "$tmp/usr/local" /usr/local
	mount -t tmpfs -o mode=755 tmpfs /run
	mount -t tmpfs -o mode=755 tmpfs /var/lib
	mkdir /run/own
	mount --bind "$tmp" /run/own
	mount -t tmpfs tmpfs /tmp
	mount -t tmpfs tmpfs /dev/shm # with podman's locks
	mkdir -p "$tmp"
	mount --move /run/own "$tmp"
	mkdir /run/changed /run/work
	mount -t overlay -o lowerdir=/etc,upperdir=/run/changed,workdir=/run/work overlay /etc
	rm -rf /etc/shapectl # of a package that is installed
	mkdir /etc/shapectl
	sed -i /^shapectl:/d /etc/group
	echo "shapectl:x:$readers:" >>/etc/group

	# The units that they come after are missing here. That does not stop them. What sysinit.target wants would set up the
	# devices and directories of this machine.
	mkdir -p /run/units
	ln -s /dev/null /run/units/sysinit.target
	mkdir -p /run/units/{shapectl,shapectl-serve,dbus}.service.d /run/units/dbus.socket.d
	printf '[Unit]\nDefaultDependencies=no\n' | tee /run/units/dbus.{service,socket}.d/test.conf >/dev/null
	cat >/run/units/test.target <<-'END'
		[Unit]
		DefaultDependencies=no
		Wants=network-pre.target shapectl.service shapectl-serve.service
		After=network-pre.target
	END
	tee /run/units/shapectl{,-serve}.service.d/test.conf >/dev/null <<-'END'
		[Service]
		RestartSec=0
		StandardOutput=append:/run/said
		StandardError=append:/run/said
	END
	policy 10mbit
	ip link add tap0 type veth peer name p0
	export container=units-test SYSTEMD_UNIT_PATH=/run/units:/usr/local/lib/systemd/system:/lib/systemd/system
	exec "$manager" --system --unit=test.target --log-target=null --show-status=no
}

# policy RATE: writes the policy. Its table of buckets needs more memory than a process may lock by default.
policy() {
	cat >/etc/shapectl/policy.yaml <<-END
		devices:
		  tap*:
		    egress:
		      10.0.0.0/24: {rate: $1, each: host, algorithm: leaky}
	END
}

# eventually WHAT COMMAND...: waits until COMMAND succeeds.
eventually() {
	local what=$1
	shift
	for _ in {1..200}; do
		"$@" && return
		sleep 0.05
	done
	die "timed out: $what; rules: $(shapectl show 2>&1); output: $(cat /run/said 2>&1)"
}

not() {
	! "$@"
}

# limited DEVICE RATE: succeeds if the rule is in force.
limited() {
	[[ $(shapectl show --sentences "$1" 2>/dev/null) == "$1 egress: each host in 10.0.0.0/24 gets $2 "* ]]
}

# counted DEVICE: succeeds if its rules are in force and have counted packets.
counted() {
	[[ $(shapectl show "$1" -j 2>/dev/null) == *'"attached": true'*'"passed_packets": '[1-9]* ]]
}

# gone DEVICE: succeeds if it has rules, and is gone.
gone() {
	[[ $(shapectl show "$1" -j 2>/dev/null) == *'"device is gone"'* ]]
}

# leased POOL: succeeds if the pool has a lease.
leased() {
	[[ $(shapectl show --pools "$1" -j 2>/dev/null) == *'"leased": true'* ]]
}

# ended PID: succeeds if systemd knows that this process of the server ended.
ended() {
	[[ $(systemctl show --property=MainPID --value shapectl-serve) != "$1" ]]
}

# request PATH: prints what the server answers.
request() {
	exec 3<>/dev/tcp/127.0.0.1/9824
	printf 'GET %s HTTP/1.0\r\nHost: localhost\r\n\r\n' "$1" >&3
	cat <&3
	exec 3>&-
}

# use: uses the units as an administrator would, once systemd has started them.
use() {
	eventually 'systemd is there' test -S /run/systemd/private
	eventually 'the system is up' systemctl --quiet is-active test.target
	limited tap0 10mbit || die "when the network may begin, no rule is in force: $(</run/said)"
	ip link add tap1 type veth peer name p1
	eventually 'a device that appears is limited' limited tap1 10mbit

	systemctl stop shapectl
	limited tap0 10mbit || die 'stopping the unit lifts the limit'
	systemctl start shapectl

	policy 20mbit
	systemctl reload shapectl
	limited tap0 20mbit || die "after a reload, the policy is not in force: $(</run/said)"
	ip link add tap2 type veth peer name p2
	eventually 'the server uses the new policy' limited tap2 20mbit

	policy faster
	[[ $(shapectl doctor 2>&1) == *'cannot apply this policy at boot'* ]] || die "of an invalid policy, doctor says $(shapectl doctor 2>&1)"
	! systemctl restart shapectl 2>/dev/null || die 'a restart with an invalid policy succeeds'
	limited tap0 20mbit || die "the last good policy is not in force: $(</run/said)"
	systemctl kill --kill-whom=main --signal=KILL shapectl-serve
	ip link add tap3 type veth peer name p3
	eventually 'the server restarts with the last good policy' limited tap3 20mbit

	systemctl stop shapectl-serve
	[[ $(systemctl show --property=Result --value shapectl-serve) == success ]] || die "the server does not end well: $(</run/said)"
	limited tap3 20mbit || die 'stopping the server lifts the limit'

	# The network comes up even without a good policy.
	rm /var/lib/shapectl/policy.yaml
	systemctl stop network-pre.target shapectl
	systemctl start test.target
	systemctl --quiet is-active network-pre.target || die 'without a good policy, the network stays down'

	# Limits do not come back after their file was removed.
	systemctl stop shapectl-serve
	systemctl reset-failed
	policy 20mbit
	systemctl start shapectl shapectl-serve
	limited tap0 20mbit || die "a valid policy is not in force: $(</run/said)"
	systemctl stop shapectl shapectl-serve
	shapectl flush --all >/dev/null
	[[ $(shapectl doctor) == *' policy: '*missing* ]] || die "without the rules of the policy, doctor says $(shapectl doctor)"
	rm /etc/shapectl/policy.yaml
	systemctl start shapectl shapectl-serve
	[[ -f /var/lib/shapectl/policy.yaml ]] || die 'there is no copy of the policy'
	[[ $(shapectl show) == 'no rules' ]] || die "without a policy, the units set rules: $(shapectl show 2>&1)"

	# The server answers, also without root, and keeps a history.
	policy 20mbit
	systemctl reload shapectl-serve
	ip link add tap4 type veth peer name p4
	eventually 'the server limits a device that appears' limited tap4 20mbit
	[[ $(request /api/v1/show?device=tap4) == *'"rate_bits_per_second": 20000000'* ]] || die "the server answers $(request /api/v1/show?device=tap4)"
	[[ $(stat -c '%a %g' /run/shapectl/serve.sock) == "660 $readers" ]] || die "the socket: $(stat /run/shapectl/serve.sock)"
	local member=(setpriv --reuid=65534 --regid="$readers" --clear-groups --inh-caps=-all)
	[[ $("${member[@]}" shapectl show --sentences 2>&1) == "$(shapectl show --sentences)" ]] ||
		die "a member of the group cannot read the rules: $("${member[@]}" shapectl show 2>&1)"
	systemctl reload shapectl-serve
	[[ -d /var/lib/shapectl/history ]] || die "the server keeps no history: $(</run/said)"

	# It limits a unit whenever that runs.
	printf '  unit:backup.service:\n    egress: {any: 1mbit}\n' >>/etc/shapectl/policy.yaml
	systemctl reload shapectl-serve
	ip address add 10.0.0.1/24 dev tap4
	ip link set tap4 up
	local sends='while sleep 0.1; do echo >/dev/udp/10.0.0.9/9; done'
	for _ in 1 2; do
		systemd-run --quiet --unit=backup --property=DefaultDependencies=no bash -c "$sends"
		eventually 'a unit that starts is limited' counted unit:backup.service
		systemctl stop backup
		eventually 'the device of a unit that was stopped is gone' gone unit:backup.service
	done

	# It limits a container whenever that runs. Without limits of its own, podman needs no controllers here.
	systemctl start dbus
	mkdir /run/rootfs
	cp "$(type -P busybox)" /run/rootfs/
	printf '  container:web:\n    egress: {any: 1mbit}\n' >>/etc/shapectl/policy.yaml
	systemctl reload shapectl-serve
	for _ in 1 2; do
		podman run --detach --name web --network host --privileged --pids-limit -1 --ulimit nofile=99 --ulimit nproc=99 --rootfs /run/rootfs /busybox ping 10.0.0.9 >/dev/null
		eventually 'a container that starts is limited' counted container:web
		podman rm --force --time 0 web >/dev/null
		eventually 'the device of a container that was removed is gone' gone container:web
	done

	# It renews leases.
	redis-server --bind 127.0.0.1 --save '' --dir /run --daemonize yes >/dev/null
	shapectl set up --new --rate 100mbit --cluster customer >/dev/null
	echo 'SHAPECTL_STORE=redis://127.0.0.1' >/etc/shapectl/cluster.env
	chmod 600 /etc/shapectl/cluster.env
	systemctl restart shapectl-serve || die "with a store, the server does not start: $(</run/said)"
	eventually 'the pool gets a lease' leased up
	local server
	server=$(systemctl show --property=MainPID --value shapectl-serve)
	systemctl kill --kill-whom=main --signal=KILL shapectl-serve
	eventually 'systemd notes that the server ended' ended "$server"
	eventually 'the server restarts' systemctl --quiet is-active shapectl-serve
	eventually 'the server that was restarted gets a lease' leased up
	systemctl stop shapectl-serve
	[[ $(systemctl show --property=Result --value shapectl-serve) == success ]] || die "with leases, the server does not end well: $(</run/said)"
	eventually 'the lease ends when the server is stopped' not leased up
	limited tap4 20mbit || die 'stopping the server lifts the limit'
	shapectl flush --all >/dev/null
	echo 'ok   the units work and keep limits in force'
}

stop() {
	local status=$?
	trap '' HUP INT PIPE TERM
	set +e
	{
		echo 1 >"$group/cgroup.kill"
		wait
		for _ in {1..100}; do
			[[ -d $group ]] || break
			sleep 0.02 # until the last process is gone
			find "$group" -depth -type d -exec rmdir {} +
		done
		umount "$tmp/cgroup"
		rm -rf --one-file-system "$tmp"
	} >/dev/null 2>&1
	exit "$status"
}

# The script calls itself in the namespaces.
case ${1-} in
check | boot | use)
	tmp=$2
	"$1"
	exit
	;;
esac

[[ $EUID -eq 0 ]] || die 'making namespaces needs root: run it with sudo'
"$here/need.sh" "${0##*/}" systemd-analyze=systemd "$manager=systemd" unshare=util-linux ip=iproute2 redis-server=redis-server \
	podman=podman busybox=busybox-static dbus-daemon=dbus
tmp=$(mktemp -d)
trap stop EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE
trap 'exit 143' TERM
make -s -C "${here%/*}" install DESTDIR="$tmp" PREFIX=/usr/local
self=$tmp/${0##*/}
cp "$0" "$self"

unshare --mount bash "$self" check "$tmp"

# However the system mounts its control groups, this shows the one cgroup2 hierarchy.
mkdir "$tmp/cgroup"
mount -t cgroup2 cgroup2 "$tmp/cgroup"
group=$tmp/cgroup/units-test-$$
mkdir "$group"
(
	echo $BASHPID >"$group/cgroup.procs"
	exec unshare --mount --uts --ipc --net --cgroup --pid --fork --mount-proc bash "$self" boot "$tmp"
) &
eventually 'systemd begins' grep -qs . "$group/init.scope/cgroup.procs"
read -r first <"$group/init.scope/cgroup.procs"
nsenter --target "$first" --all bash "$self" use "$tmp" &
wait $!
