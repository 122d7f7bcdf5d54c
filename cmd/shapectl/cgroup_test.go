package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// trafficEnv makes the test binary send to an address, or receive from it, until it is killed.
const trafficEnv = "SHAPECTL_TEST_TRAFFIC"

func traffic(what string) {
	how, to, _ := strings.Cut(what, " ")
	c, err := net.Dial("tcp", to)
	if err == nil {
		pump(c, how == "send")
	}
	os.Exit(1)
}

// pump sends, or receives, until the connection ends. It returns how many bytes.
func pump(c net.Conn, sends bool) (bytes int) {
	for buffer := make([]byte, 1<<16); ; {
		f := c.Read
		if sends {
			f = c.Write
		}
		n, err := f(buffer)
		if bytes += n; err != nil {
			return bytes
		}
	}
}

// slice makes a slice of systemd's, whose cgroups end with the test, and returns its directory and its name.
func slice(t *testing.T) (dir, name string) {
	t.Helper()
	testenv.Root(t)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	testenv.Must(t, err)
	_, mount, _ := strings.Cut(string(mounts), " - cgroup2 ")
	if mount == "" {
		mount = t.TempDir()
		testenv.Must(t, unix.Mount("cgroup2", mount, "cgroup2", 0, ""))
		t.Cleanup(func() { testenv.Unmount(t, mount) })
	} else {
		for line := range strings.Lines(string(mounts)) {
			if strings.Contains(line, " - cgroup2 ") {
				mount = strings.Fields(line)[4]
				break
			}
		}
	}
	dir, err = os.MkdirTemp(mount, "shapectltest*.slice")
	testenv.Must(t, err)
	t.Cleanup(func() {
		var all []string
		filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
			if e.IsDir() {
				all = append([]string{path}, all...)
			}
			return nil
		})
		for _, path := range all {
			testenv.Eventually(t, path+" to end", func() bool { return os.Remove(path) == nil })
		}
	})
	return dir, filepath.Base(dir)
}

// in starts a process in a cgroup that sends to an address, or receives, and returns its ID.
func in(t *testing.T, dir, what string) (pid string) {
	t.Helper()
	self, err := os.Executable()
	testenv.Must(t, err)
	group, err := os.Open(dir)
	testenv.Must(t, err)
	defer group.Close()
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), trafficEnv+"="+what)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	testenv.Must(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return strconv.Itoa(cmd.Process.Pid)
}

// far is a namespace behind va, and two addresses there.
func (r *rig) far() (*testenv.Netns, [2]string) {
	r.t.Helper()
	_, far := testenv.NewNamedNetns(r.t)
	testenv.Must(r.t, netlink.LinkSetNsFd(testenv.Link(r.t, "vb"), far.FD()))
	addressed := func(device, number string) error {
		for _, family := range []string{"10.0.0." + number + "/24", "fd00::" + number + "/64"} {
			testenv.Must(r.t, os.WriteFile("/proc/sys/net/ipv6/conf/"+device+"/disable_ipv6", []byte("0"), 0))
			testenv.Must(r.t, address(device, family))
		}
		return netlink.LinkSetUp(testenv.Link(r.t, device))
	}
	testenv.Must(r.t, addressed("va", "1"))
	testenv.Must(r.t, far.Do(func() error { return addressed("vb", "2") }))
	testenv.WaitUp(r.t, "va")
	return far, [2]string{"10.0.0.2", "fd00::2"}
}

// TCP of a unit keeps the window bound in both directions and families. Local traffic is not limited.
func TestCgroupLimitsTraffic(t *testing.T) {
	r := newRig(t)
	dir, _ := slice(t)
	dir = filepath.Join(dir, filepath.Base(dir)[:len("shapectltest")]+".service")
	unit := "unit:" + filepath.Base(dir)
	testenv.Must(t, os.Mkdir(dir, 0o755))
	const rate, capacity = 20_000_000, 750_000
	says := r.ok("set", unit, "--rate", "20mbit")
	if strings.Count(says, unit) != 4 {
		t.Fatalf("set %s: %s", unit, says)
	}
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	local, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.Must(t, err)
	defer local.Close()
	in(t, dir, "send "+local.Addr().String())
	c, err := local.Accept()
	testenv.Must(t, err)
	if n, err := io.CopyN(io.Discard, c, 1<<25); err != nil {
		t.Fatalf("local traffic: %d bytes, %v", n, err)
	}
	c.Close()

	far, addresses := r.far()
	type end struct {
		of    string // direction and network
		bytes int    // payload that arrived
	}
	ends := make(chan end, 4)
	for i, address := range addresses {
		for direction, how := range map[string]string{"egress": "send", "ingress": "receive"} {
			var l net.Listener
			testenv.Must(t, far.Do(func() (err error) {
				l, err = net.Listen("tcp", net.JoinHostPort(address, "0"))
				return err
			}))
			go func() {
				defer l.Close()
				c, err := l.Accept()
				if err != nil {
					t.Error(err)
				}
				time.AfterFunc(3*time.Second, func() { c.Close() })
				ends <- end{direction + policy.Everything[i].String(), pump(c, how == "receive")}
			}()
			in(t, dir, how+" "+l.Addr().String())
		}
	}
	type sample struct {
		before, after time.Time
		passed        uint64
	}
	samples, payload := map[string][]sample{}, map[string]int{}
	for len(payload) < cap(ends) {
		select {
		case e := <-ends:
			payload[e.of] = e.bytes
		case <-time.After(20 * time.Millisecond):
		}
		s := sample{before: time.Now()}
		rules := r.show(unit)
		s.after = time.Now()
		for _, rule := range rules {
			s.passed = rule.PassedBytes
			samples[rule.Direction+rule.CIDR] = append(samples[rule.Direction+rule.CIDR], s)
		}
	}
	for of, bytes := range payload {
		its := samples[of]
		for i, a := range its {
			for _, b := range its[i:] {
				if most := capacity + rate/8*b.after.Sub(a.before).Seconds(); float64(b.passed-a.passed) > most {
					t.Fatalf("%s: %d bytes passed in %v", of, b.passed-a.passed, b.after.Sub(a.before))
				}
			}
		}
		all := its[len(its)-1].passed
		if all < rate/8 { // of three seconds
			t.Errorf("%s: TCP used only %d bytes", of, all)
		}
		if strings.HasPrefix(of, "egress") && uint64(bytes) > all {
			t.Errorf("%s: %d bytes arrived, and %d are counted", of, bytes, all)
		}
	}
	if rules := r.show(unit); rules[0].SKBs == 0 || rules[0].Hook != "cgroup" {
		t.Errorf("show: %+v", rules[0])
	}
}

// serve limits a cgroup whenever it appears, by the policy, and a command that changes something removes other rules of one that is gone.
func TestCgroupsComeAndGo(t *testing.T) {
	r := newRig(t)
	dir, name := slice(t)
	unit := "unit:" + name + ".service"
	paths := map[string]string{
		unit:                       filepath.Join(dir, name+".service"),
		"cgroup:/" + name + "/b/c": filepath.Join(dir, "b", "c"),
	}
	r.refused(exitInput, "there is no cgroup of "+unit+" now", "set", unit, "--rate", "1mbit")
	text := ""
	for of := range paths {
		text += fmt.Sprintf("  %s: {egress: {pool: 10mbit, any: {}}, ingress: {any: 20mbit}}\n", of)
	}
	states := func(of string) (all string) {
		for _, rule := range r.show() {
			if rule.Device == of && rule.Kind == "rule" {
				all += rule.State + " "
			}
		}
		return all
	}
	for _, file := range [][]string{{r.policy("devices:\n" + text)}, nil} { // then by the policy in force
		w := r.watch(file...)
		for of, path := range paths {
			testenv.Must(t, os.MkdirAll(path, 0o755))
			testenv.Eventually(t, of+" to be limited", func() bool { return states(of) == "attached attached attached attached " })
		}
		for of, path := range paths {
			testenv.Must(t, os.Remove(path))
			testenv.Eventually(t, of+" to be gone", func() bool { return states(of) == "device is gone device is gone device is gone device is gone " })
		}
		if said := w.err.String(); strings.Contains(said, "attached again") {
			t.Errorf("serve says %s", said)
		}
		w.cmd.Process.Kill()
		w.cmd.Wait()
	}
	testenv.Must(t, os.Mkdir(paths[unit], 0o755))
	r.run("flush", "--all")
	r.ok("set", unit, "ingress", "any", "--rate", "1mbit")
	for _, says := range []string{r.ok("show", unit), r.ok("explain", unit, "ingress", "10.0.0.7"), r.ok("export")} {
		if !strings.Contains(says, unit) {
			t.Errorf("%s is not in %s", unit, says)
		}
	}
	r.ok("doctor", unit)
	r.refused(exitInput, unit+" is a cgroup", "top", unit, "ingress", "--by", "host", "--once", "-j")
	file := r.policy(r.ok("export"))
	r.ok("diff", file)
	r.ok("delete", unit, "ingress", "::/0")
	r.ok("apply", file)
	r.refused(exitInput, "packets can only pass, be marked (ECN) or be dropped", "set", unit, "--rate", "1mbit", "--excess", "delay")
	if got := r.run("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit", "--each", "host", "--nat"); got.code != exitDone { // beside it, other programs know it
		t.Fatal(got.err)
	}
	r.refused(exitInput, "packets can only pass, be marked (ECN) or be dropped", "set", unit, "--rate", "1mbit", "--algorithm", "srtcm", "--ebs", "10kb", "--green", "dscp:af11")
	r.ok("set", "pool", "--new", "--rate", "5mbit")
	r.ok("set", unit, "ingress", "any", "--within", "pool")
	r.refused(exitInput, "packets can only pass, be marked (ECN) or be dropped", "set", "pool", "--excess", "delay")
	r.refused(exitInput, "no hosts are behind NAT", "set", unit, "--rate", "1mbit", "--each", "host", "--nat")
	r.refused(exitInput, "a line is a device", "line", unit, "--up", "1mbit", "--down", "1mbit")
	r.refused(exitInput, "write the whole name of a unit", "set", "unit:backup", "--rate", "1mbit")
	r.refused(exitInput, "a cgroup has no pattern", "apply", r.policy("devices: {'unit:*': {egress: {any: 1mbit}}}"))
	blind := func(args ...string) string { // where nobody sees a cgroup
		cmd := r.command(args...)
		cmd.Args = append([]string{"unshare", "-m", "sh", "-c", `mount -t tmpfs x "$0"; exec "$@"`, filepath.Dir(dir)}, cmd.Args...)
		cmd.Path, _ = exec.LookPath("unshare")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%v: %v, %s", args, err, out)
		}
		return string(out)
	}
	if says := blind("set", "va", "egress", "any", "--rate", "2mbit"); strings.Contains(says, unit) {
		t.Error(says)
	}
	blind("apply", file)
	if is := blind("show", unit); strings.Contains(is, "gone") || states(unit) != "attached attached " {
		t.Errorf("what cannot be seen is gone: %s", is)
	}
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.Must(t, err)
	defer l.Close()
	pid := in(t, paths[unit], "receive "+l.Addr().String())
	socket, err := l.Accept() // whose other end keeps the removed cgroup
	testenv.Must(t, err)
	defer socket.Close()
	testenv.Must(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(pid), 0))
	testenv.Must(t, os.Remove(paths[unit]))
	if is := states(unit); is != "attached attached " {
		t.Errorf("with a socket, the rules of a removed cgroup are %s", is)
	}
	testenv.Must(t, os.Mkdir(paths[unit], 0o755))
	if is, diff := states(unit), r.run("diff", file); is != "device is gone device is gone " || diff.code != exitDiffers {
		t.Errorf("with a socket of the last one, a cgroup has rules %s, and diff says %s", is, diff.out)
	}
	if got := r.run("apply", file); got.code != exitDone || !strings.Contains(got.err, "removed the rules of deleted devices: "+unit) {
		t.Errorf("exit %d, %s", got.code, got.err)
	}
	r.ok("diff", file)
	if is := states(unit); is != "attached attached " {
		t.Errorf("after apply, its rules are %s", is)
	}
	r.makeOtherLayout()
	r.refused(exitKernel, "rules of a cgroup ingress: made by another version", "show", unit)
	r.prints("deleted: "+unit+" ingress: all rules, which this shapectl could not read\n", "flush", unit)
	r.ok("set", unit, "ingress", "any", "--rate", "1mbit")
	listens := r.events()
	is := func(kind string) func(report.Event) bool {
		return func(e report.Event) bool { return e.Kind == kind && e.Device == unit }
	}
	testenv.Must(t, os.Remove(paths[unit]))
	n := listens.tells(0, "a cgroup that is gone", is(report.DeviceGone))
	testenv.Eventually(t, "the kernel to release the cgroup", func() bool { return states(unit) == "device is gone device is gone " })
	testenv.Must(t, os.Mkdir(paths[unit], 0o755))
	if got := r.run("set", unit, "ingress", "any", "--rate", "1mbit"); got.code != exitDone || !strings.Contains(got.err, "removed the rules of deleted devices: "+unit) {
		t.Errorf("exit %d, %s", got.code, got.err)
	}
	listens.tells(n, "a cgroup that is there again", is(report.DeviceAppeared))
	testenv.Must(t, os.Remove(paths[unit]))
	testenv.Eventually(t, "a removed cgroup to be gone", func() bool { return !strings.Contains(states(unit), "attached") })
	if got := r.run("set", "va", "egress", "any", "--rate", "1mbit"); got.code != exitDone {
		t.Errorf("exit %d, %s", got.code, got.err)
	}
	r.prints("no rules on "+unit+"\n", "flush", unit)
	r.ok("delete", unit, "ingress", "any")
	r.refused(exitInput, "write the whole name of a unit", "flush", "unit:backup")
	r.refused(exitInput, "there is no device "+unit, "show", unit)
}

// Rules of a cgroup apply below it, too. So do programs of others, unless they were attached so that they do not.
func TestNestedCgroups(t *testing.T) {
	r := newRig(t)
	dir, name := slice(t)
	attach := func(path string, flags uint32) {
		testenv.Must(t, os.MkdirAll(filepath.Join(dir, path), 0o755))
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.CGroupSKB, AttachType: ebpf.AttachCGroupInetEgress, License: "GPL", Name: "other",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
		})
		testenv.Must(t, err)
		defer p.Close()
		f, err := os.Open(filepath.Join(dir, path))
		testenv.Must(t, err)
		defer f.Close()
		testenv.Must(t, link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(f.Fd()), Program: p, Attach: ebpf.AttachCGroupInetEgress, Flags: flags}))
	}
	attach("alone", 0)
	r.refused(exitKernel, "without BPF_F_ALLOW_MULTI", "set", "cgroup:/"+name+"/alone", "egress", "any", "--rate", "1mbit")
	attach("a", 1) // BPF_F_ALLOW_OVERRIDE
	parent, child := "unit:"+name, "cgroup:/"+name+`/a/b\x2dc`
	testenv.Must(t, os.Mkdir(filepath.Join(dir, "a", `b\x2dc`), 0o755))
	if got := r.run("set", child, "egress", "any", "--rate", "1mbit"); got.code != exitDone || !strings.Contains(got.err, "no longer pass program") || !strings.Contains(got.err, "(other)") {
		t.Errorf("beside a program that it keeps from packets: exit %d, %s", got.code, got.err)
	}
	if says := r.ok("set", parent, "egress", "any", "--rate", "2mbit"); !strings.Contains(says, parent+" also counts the packets that "+child+" drops") {
		t.Error(says)
	}
	r.ok("set", "up", "--new", "--rate", "8mbit")
	r.ok("set", child, "egress", "any", "--within", "up")
	if says := r.ok("set", parent, "egress", "any", "--within", "up"); !strings.Contains(says, "packets of "+child+" draw from pool up twice, as "+parent+" is within it, too") {
		t.Error(says)
	}
	if says := bare(r.run("doctor").out); !strings.Contains(says, `charged to pool "up" twice: `+child+" egress 0.0.0.0/0 and "+parent+" egress 0.0.0.0/0") {
		t.Error(says)
	}
	if policy := r.ok("export"); !strings.Contains(policy, "/a/b") || !strings.Contains(r.ok("diff", r.policy(policy)), "nothing to change") {
		t.Errorf("export: %s", policy)
	}
	r.refused(exitInput, "packets have no VLAN tags there", "set", child, "egress", "vlan:12", "--rate", "1mbit")
	r.refused(exitInput, "is not a directory", "set", "cgroup:/"+name+"/cgroup.procs", "--rate", "1mbit")
	// Only a command that names a container asks for it.
	bin, id := t.TempDir(), fmt.Sprintf("%064x", os.Getpid())
	docker := filepath.Join(bin, "docker")
	testenv.Must(t, os.WriteFile(docker, []byte("#!/bin/sh\necho >>"+docker+".ran\necho "+id+" web-"+id+"\n"), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	testenv.Must(t, os.Mkdir(filepath.Join(dir, "docker-"+id+".scope"), 0o755))
	r.ok("set", "container:web-"+id, "egress", "any", "--rate", "1mbit")
	ran, err := os.ReadFile(docker + ".ran")
	testenv.Must(t, err)
	for _, args := range [][]string{{"set", "va", "egress", "any", "--rate", "1mbit"}, {"show"}} {
		out, err := r.command(args...).CombinedOutput()
		if now, _ := os.ReadFile(docker + ".ran"); err != nil || strings.Contains(string(out), "gone") || len(now) != len(ran) {
			t.Errorf("%v: %v, docker ran %d times, %s", args, err, len(now), out)
		}
	}
	r.ok("flush", child)
	if says := bare(r.ok("explain", child, "egress", "10.0.0.7")); !strings.Contains(says, "by "+parent+" egress: ") {
		t.Error(says)
	}
}

// Hundreds of units that start at one moment cost little.
func TestManyCgroups(t *testing.T) {
	r := newRig(t)
	dir, name := slice(t)
	text, units := "devices:\n", make([]string, 300)
	for i := range units {
		units[i] = fmt.Sprintf("%s%d.service", name, i)
		text += fmt.Sprintf("  unit:%s: {egress: {any: 20mbit}}\n", units[i])
	}
	w := r.watch(r.policy(text))
	for _, unit := range units {
		testenv.Must(t, os.Mkdir(filepath.Join(dir, unit), 0o755))
		time.Sleep(4 * time.Millisecond)
	}
	testenv.Eventually(t, "the last of many units to be limited", func() bool {
		rules := r.show("unit:" + units[299])
		return len(rules) > 0 && rules[0].State == "attached"
	})
	w.cmd.Process.Kill()
	w.cmd.Wait()
	if took := w.cmd.ProcessState.UserTime() + w.cmd.ProcessState.SystemTime(); took > 4*time.Second {
		t.Errorf("300 units took %v of CPU time", took)
	}
}
