package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite setup loads many rules and changes one of them. It measures the time and the kernel memory.

// A contender is a subject of the suite setup. Peers are set up in one transaction of their tool, from a prepared text.
// Parsing it is a part of their time.
type contender struct {
	subject, note string
	most          int // the largest number of rules to try
	prepare       prepare
}

// prepare gets n rules ready. load creates them, and change prepares a change of the i-th one; do makes it.
type prepare func(a *arena, n int, rate func() policy.Rate) (load func(), change func(i int) (do func()))

var contenders = []contender{
	{subject: name(policy.GCRA), most: 1_000_000, prepare: ourRules(policy.EachAll), note: "a change of the rule that was changed last waits for an RCU grace period"},
	{subject: name(policy.GCRA) + ", each host", most: 1_000_000, prepare: ourRules(policy.EachHost), note: "a table for a million hosts"},
	{subject: "HTB classes, u32 hash tables", most: 65_534, prepare: htbRules,
		note: "addresses of one /16; loaded by `tc -batch`, changed through netlink; at most 65 534 classes"},
	{subject: "nft map of limits", most: 100_000, prepare: nftRules,
		note: "prefixes that do not overlap; each change runs nft; 100 000 already take long"},
}

func setup() {
	for _, n := range unlessQuick([]int{1000, 10_000, 100_000, 1_000_000}, []int{1000}) {
		for range rounds(3) {
			for _, c := range contenders {
				if n <= c.most {
					say("  %s rules: %s", count(n), c.subject)
					c.round(n)
				}
			}
		}
	}
}

// round loads n rules once, and changes random ones: as many as fit into a second.
func (c contender) round(n int) {
	a := newArena()
	defer a.Close()
	in(a.near, func() {
		r, column := newRandom(), ": "+count(n)
		load, change := c.prepare(a, n, func() policy.Rate { return someRate(r) })
		debug.FreeOSMemory()
		before, start := settledMemory(), time.Now()
		load()
		add("Time to load rules"+column, c.subject, "s", c.note, time.Since(start).Seconds())
		memory := kernelMemory() - before
		for i, begin := 0, time.Now(); i == 0 || i < unlessQuick(51, 3) && time.Since(begin) < time.Second; i++ {
			do := change(r.IntN(n))
			start := time.Now()
			do()
			add("Time to change one rule, a random one each time"+column, c.subject, "µs", c.note, float64(time.Since(start))/float64(time.Microsecond))
		}
		add("Kernel memory of rules"+column, c.subject, "MiB", c.note, memory)
	})
}

func someRate(r *rand.Rand) policy.Rate { return policy.Rate(1+r.IntN(1000)) * 1_000_000 }

// ruleOf returns the rule of a policy file that gives only a rate.
func ruleOf(p netip.Prefix, r policy.Rate) policy.Rule {
	return policy.Rule{Prefix: p, Rate: r, Capacity: policy.DefaultCapacity(r)}
}

// mixedRules returns rules for n mixed prefixes, half of each family.
func mixedRules(r *rand.Rand, n int) (rules []policy.Rule) {
	for _, p := range append(mixedPrefixes(r, false, n/2), mixedPrefixes(r, true, n-n/2)...) {
		rules = append(rules, ruleOf(p, someRate(r)))
	}
	return rules
}

// ourRules are mixed rules. Creating them replaces reading them from a file, and is not measured.
func ourRules(each policy.EachKind) prepare {
	return func(a *arena, n int, rate func() policy.Rate) (load func(), change func(i int) func()) {
		size := maps.Size{Rules: uint32(n), Buckets: 1}
		if each != policy.EachAll {
			size.Buckets = 1 << 20
		}
		rules := mixedRules(newRandom(), n)
		for i := range rules {
			rules[i].Capacity, rules[i].Each = 1<<20, policy.Each{Kind: each}
		}
		var set *maps.Set
		return func() { _, set = a.loaded(size, rules) }, func(i int) func() {
			rule := rules[i]
			rule.Rate = rate()
			return func() { must(set.Put(rule)) }
		}
	}
}

// htbRules has a class for each address of a /16. Two levels of u32 hash tables find it: by the third byte of the
// destination, and by the fourth.
func htbRules(_ *arena, n int, rate func() policy.Rate) (load func(), change func(i int) func()) {
	var b batch
	b.line("qdisc add dev near root handle 1: htb")
	b.hash(netip.MustParsePrefix("10.1.0.0/16"), 0xff00)
	for i := range n {
		table := 0x100 + i>>8
		if i%256 == 0 {
			b.line(u32Filter+"handle %x: u32 divisor 256", table)
			b.line(u32Filter+"u32 ht 2:%x: match u32 0 0 hashkey mask 0x000000ff at 16 link %x:", i>>8, table)
		}
		b.line("class add dev near parent 1: classid 1:%x htb rate %dbit burst 1mb quantum 1514", i+1, uint64(rate()))
		b.line(u32Filter+"u32 ht %x:%x: match ip dst 10.1.%d.%d flowid 1:%x", table, i%256, i>>8, i%256, i+1)
	}
	return func() { runCommand(b.String(), "tc", "-batch", "-") }, func(i int) func() {
		class := netlink.NewHtbClass(netlink.ClassAttrs{
			LinkIndex: must(netlink.LinkByName(nearDevice)).Attrs().Index,
			Parent:    netlink.MakeHandle(1, 0), Handle: netlink.MakeHandle(1, uint16(i+1)),
		}, netlink.HtbClassAttrs{Rate: uint64(rate()), Buffer: 1 << 20})
		return func() { check(netlink.ClassChange(class)) }
	}
}

// nftRules maps prefixes to limits. Each change adds a new limit, because a limit in use cannot be changed.
func nftRules(_ *arena, n int, rate func() policy.Rate) (load func(), change func(i int) func()) {
	prefix := func(i int) string { // prefixes do not overlap
		return fmt.Sprintf("10.%d.%d.%d/28", i>>12, i>>4&0xff, i<<4&0xff)
	}
	declare := func(name string) string {
		return fmt.Sprintf("limit %s { rate over %d bytes/second burst 1048576 bytes; }\n", name, rate()/8)
	}
	var limits, elements strings.Builder
	for i := range n {
		limits.WriteString(declare(fmt.Sprint("l", i)))
		fmt.Fprintf(&elements, "%s : \"l%d\",\n", prefix(i), i)
	}
	turn := 0
	return runNft("table ip bench {\n" + limits.String() + "map rates { type ipv4_addr : limit; flags interval; elements = {\n" +
			elements.String() + "} }\nchain out { type filter hook output priority 0; limit name ip daddr map @rates drop\n}\n}\n"),
		func(i int) func() {
			turn++
			name := fmt.Sprint("t", turn)
			return runNft(strings.Replace(declare(name), "limit ", "add limit ip bench ", 1) +
				fmt.Sprintf("delete element ip bench rates { %[1]s }\nadd element ip bench rates { %[1]s : %[2]q }\n", prefix(i), name))
		}
}

func runNft(script string) func() { return func() { runCommand(script, "nft", "-f", "-") } }

// kernelMemory returns the memory of the kernel in MiB: slab objects, vmalloc areas and
// per-CPU data. It includes other activity, so differences below about 1 MiB mean nothing.
func kernelMemory() (mib float64) {
	for _, part := range []string{"SUnreclaim", "VmallocUsed", "Percpu"} {
		mib += readMiB("/proc/meminfo", part)
	}
	return mib
}

// settledMemory returns kernelMemory when it has stopped changing, because the kernel frees
// deleted objects with a delay.
func settledMemory() float64 {
	now := kernelMemory()
	for begin := time.Now(); time.Since(begin) < 5*time.Second; {
		sleep(200 * time.Millisecond)
		before := now
		if now = kernelMemory(); now > before-0.5 && now < before+0.5 {
			break
		}
	}
	return now
}

// The suite policy applies whole policies with the command, like a user. The suite hooks limits many devices of one
// namespace, like a host of virtual machines or containers. Both measure the time of commands.

// A bench has the command, built like a release, and a folder for files.
type bench struct{ dir, binary string }

func withCommand(f func(bench)) {
	dir := must(os.MkdirTemp("", "bench-"))
	defer os.RemoveAll(dir)
	b := bench{dir, filepath.Join(dir, "shapectl")}
	runCommand("", "go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", b.binary, "github.com/shapectl/shapectl/cmd/shapectl")
	f(b)
}

// run runs commands in the near namespace, with their pins in the arena, and records their times. A command is what it is
// called, and its words.
func (b bench) run(a *arena, name string, commands ...[2]string) {
	for _, c := range commands {
		args := strings.Fields(c[1])
		cmd := exec.CommandContext(ctx, b.binary, args...)
		cmd.Env = append(os.Environ(), "SHAPECTL_BPFFS="+a.bpffs)
		in(a.near, func() {
			start := time.Now()
			err := runWell(cmd)
			// diff has found differences.
			if failed := new(exec.ExitError); args[0] != "diff" || !errors.As(err, &failed) || failed.ExitCode() != 3 {
				check(err)
			}
			add(name, "shapectl "+c[0], "s", "", time.Since(start).Seconds())
		})
	}
}

// write writes a policy, and returns its path.
func (b bench) write(name string, rules []policy.Rule) (file string) {
	file = filepath.Join(b.dir, name+".yaml")
	f := must(os.Create(file))
	check(errors.Join(policyfile.Write(f, []policy.Table{rulesOf(rules...)}), f.Close()))
	return file
}

func policies() {
	withCommand(func(b bench) {
		for _, n := range unlessQuick([]int{1000, 100_000, 1_000_000}, []int{1000}) {
			say("  policies of %s prefixes", count(n))
			random := newRandom()
			rules := mixedRules(random, n)
			policy.SortRules(rules)
			one, file := rules[n/2].Prefix.String(), b.write("policy", rules)
			for _, i := range random.Perm(n)[:n/100] {
				rules[i] = ruleOf(rules[i].Prefix, 2*rules[i].Rate)
			}
			changed := b.write("changed", rules)
			for range rounds(3) {
				b.policy(count(n), file, changed, one)
			}
		}
	})
}

// policy measures each figure of a policy once, on a new device. In the policy changed, 1 % of the rules differ.
func (b bench) policy(size, file, changed, one string) {
	a := newArena()
	defer a.Close()
	settledMemory() // wait until the kernel has freed the previous arena
	b.run(a, "Time of a command: "+size,
		[2]string{"apply, no rules before", "apply " + file},
		[2]string{"apply, nothing to change", "apply " + file},
		[2]string{"apply, 1 % changes", "apply " + changed},
		[2]string{"diff, no difference", "diff " + changed},
		[2]string{"diff, 1 % differs", "diff " + file},
		[2]string{"export", "export"},
		[2]string{"set, one of the rules", "set near egress " + one + " --rate 7777kbit"})
}

func hooks() {
	// Commands request expedited grace periods while they attach many hooks. One that is killed may not have reset it.
	const expedited = "/sys/kernel/rcu_expedited"
	if readLine(expedited) == "0" {
		defer os.WriteFile(expedited, []byte("0"), 0)
	}
	withCommand(func(b bench) {
		for _, devices := range unlessQuick([]int{20, 200, 500}, []int{20}) {
			say("  commands: %s devices", count(devices))
			for range rounds(5) {
				b.commands(devices)
			}
		}
	})
}

// forDevices writes a policy with a rule for each direction of devices, which has a rate in kbit/s: another one for each
// device.
func (b bench) forDevices(name string, devices int, rate int) (file string) {
	text := "devices:\n"
	for i := range devices {
		rule := fmt.Sprintf("{10.0.0.0/8: %dkbit}", rate+i)
		text += fmt.Sprintf("  dev%d: {egress: %s, ingress: %s}\n", i, rule, rule)
	}
	file = filepath.Join(b.dir, name+".yaml")
	check(os.WriteFile(file, []byte(text), 0o600))
	return file
}

// commands measures the time of each command once, with a rule in each direction.
func (b bench) commands(devices int) {
	file, changed := b.forDevices("devices", devices, 10_000), b.forDevices("changed", devices, 20_000)
	a := newArena()
	defer a.Close()
	in(a.near, func() {
		for i := 0; i < devices; i += 2 {
			addVeth("dev"+strconv.Itoa(i), "dev"+strconv.Itoa(i+1), nil)
		}
	})
	settledMemory() // wait until the kernel has freed the previous arena
	b.run(a, "Time of a command, by number of devices: "+count(devices),
		[2]string{"apply, no rules before", "apply " + file},
		[2]string{"apply, all rates change", "apply " + changed},
		[2]string{"apply, nothing to change", "apply " + changed},
		[2]string{"set, one rule", "set dev0 egress 10.0.0.0/8 --rate 7777kbit"},
		[2]string{"flush --all", "flush --all"})
}
