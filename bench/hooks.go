package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite "hooks" limits many devices of one namespace, as a host of guests or
// containers does, by the command: how long users wait, and what the kernel needs.

const (
	hooksTime   = "time of a command, by number of devices"
	hooksMemory = "kernel memory, by number of devices"
	hooksWatch  = "time until %d new devices have rules, by number of limited devices before"
)

// Subjects of this suite, for this build; those of another build have its name behind them.
const (
	hooksFirst   = "shapectl apply, no rules before"
	hooksRates   = "shapectl apply, all rates change"
	hooksAgain   = "shapectl apply, nothing to change"
	hooksSet     = "shapectl set, one rule"
	hooksFlush   = "shapectl flush --all"
	hooksWatched = "shapectl watch"
	hooksShared  = "shapectl, each all"
	hooksHosts   = "shapectl, each host"
)

// A build of shapectl is measured in turn with others.
type build struct {
	binary string
	name   string // "" for that of these sources
}

func (b build) subject(what string) string {
	if b.name != "" {
		return what + ", build " + b.name
	}
	return what
}

// How many devices another build is measured with at the most: one that keeps maps for each
// hook needs 100 ms and, with buckets for each host, 130 MiB for each device.
const (
	mostOtherCommands = 200
	mostOtherMemory   = 20
)

// expedited is how commands tell the kernel to hurry while they attach many hooks.
const expedited = "/sys/kernel/rcu_expedited"

// A hookSize is a number of devices, and how often it is measured.
type hookSize struct{ devices, rounds int }

func hooks(ctx context.Context, o options) (results []Result, err error) {
	commands, memory, fresh := []hookSize{{20, 7}, {200, 5}, {500, 5}}, []hookSize{{20, 5}, {1000, 5}}, 20
	if o.quick {
		commands, memory, fresh = []hookSize{{20, 3}}, []hookSize{{20, 3}}, 4
	}
	dir, err := os.MkdirTemp("", "bench-hooks-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	relaxed := readLine(expedited) == "0"
	defer func() {
		if err != nil && relaxed { // a command that was killed may have left it at 1, and its mark went with the arena
			os.WriteFile(expedited, []byte("0"), 0)
		}
	}()
	binary, err := buildCommand(ctx, dir)
	if err != nil {
		return nil, err
	}
	builds := []build{{binary: binary}}
	if o.other != "" {
		builds = append(builds, build{o.other, strings.TrimPrefix(filepath.Base(o.other), "shapectl-")})
	}
	watchTime := fmt.Sprintf(hooksWatch, fresh)
	tables := []struct {
		title, unit string
		subjects    []string
	}{
		{hooksTime, unitSeconds, []string{hooksFirst, hooksRates, hooksAgain, hooksSet, hooksFlush}},
		{watchTime, unitSeconds, []string{hooksWatched}},
		{hooksMemory, unitMiB, []string{hooksShared, hooksHosts}},
	}
	all := map[int]samples{} // by number of devices
	for _, part := range []struct {
		what      string
		mostOther int
		sizes     []hookSize
		round     func(context.Context, build, manyDevices, samples) error
	}{
		{"commands", mostOtherCommands, commands, commandRound},
		{"watch, memory", mostOtherMemory, append([]hookSize{{0, 7}}, memory...), memoryRound},
	} {
		for _, size := range part.sizes {
			o.say("  %s: %s devices", part.what, count(size.devices))
			if all[size.devices] == nil {
				all[size.devices] = samples{}
			}
			for range o.rounds(size.rounds) {
				for _, b := range builds {
					if b.name != "" && size.devices > part.mostOther {
						continue
					}
					d := manyDevices{dir: dir, devices: size.devices, fresh: fresh, watchTime: watchTime}
					if err := part.round(ctx, b, d, all[size.devices]); err != nil {
						return nil, fmt.Errorf("%s, %d devices: %w", b.subject(part.what), size.devices, err)
					}
				}
			}
		}
	}
	for _, t := range tables {
		for _, devices := range slices.Sorted(maps.Keys(all)) {
			for _, subject := range t.subjects {
				for _, b := range builds {
					if taken := all[devices][t.title][b.subject(subject)]; taken != nil {
						results = append(results, newResult(t.title+": "+count(devices), b.subject(subject), t.unit, taken))
					}
				}
			}
		}
	}
	return results, nil
}

// manyDevices are what a round limits.
type manyDevices struct {
	dir       string // for files
	devices   int    // that there are before a command
	fresh     int    // that appear under `watch`
	watchTime string // the table of that
}

// newArena makes an arena with so many devices.
func (m manyDevices) newArena(ctx context.Context) (*arena, error) {
	a, err := newArena(ctx)
	if err != nil {
		return nil, err
	}
	if err := a.inNear(func() error { return addPairs("dev", m.devices) }); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// addPairs adds veth devices to the namespace of the calling thread, two of which are a pair each.
func addPairs(prefix string, devices int) error {
	for i := 0; i < devices; i += 2 {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = prefix + strconv.Itoa(i)
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: prefix + strconv.Itoa(i+1)}); err != nil {
			return fmt.Errorf("add a veth pair: %w", err)
		}
	}
	return nil
}

// write writes a policy with so many rules for each direction of all devices, of a rate
// that is different on each, and returns its path.
func (m manyDevices) write(rules int, rate policy.Rate, each policy.EachKind) (file string, err error) {
	var tables []policy.Table
	for i := range m.devices {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			t := policy.Table{Device: "dev" + strconv.Itoa(i), Direction: d, Match: d.FarSide()}
			for r := range rules {
				rule := ruleOf(netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(10 + r)}), 8), rate+policy.Rate(i)*1000)
				rule.Each = policy.Each{Kind: each}
				t.Rules = append(t.Rules, rule)
			}
			tables = append(tables, t)
		}
	}
	file = filepath.Join(m.dir, fmt.Sprintf("%d-%d-%d-%d.yaml", m.devices, rules, rate, each))
	return file, writePolicy(file, tables...)
}

// commandRound takes the time of each command once, with a rule in each direction.
func commandRound(ctx context.Context, b build, m manyDevices, s samples) error {
	const rate = 10_000_000
	file, err := m.write(1, rate, policy.EachAll)
	if err != nil {
		return err
	}
	changed, err := m.write(1, 2*rate, policy.EachAll)
	if err != nil {
		return err
	}
	a, err := m.newArena(ctx)
	if err != nil {
		return err
	}
	defer a.Close()
	settledMemory() // until the kernel has freed what was there before
	for _, step := range []struct {
		subject string
		args    []string
	}{
		{hooksFirst, []string{"apply", file}},
		{hooksRates, []string{"apply", changed}},
		{hooksAgain, []string{"apply", changed}},
		{hooksSet, []string{"set", "dev0", "egress", "10.0.0.0/8", "--rate", "7777kbit"}},
		{hooksFlush, []string{"flush", "--all"}},
	} {
		took, _, err := a.command(ctx, b.binary, 0, step.args...)
		if err != nil {
			return err
		}
		s.add(hooksTime, b.subject(step.subject), took)
	}
	return nil
}

// memoryRound takes the memory of two rules in each direction once, and how long new
// devices beside them wait for theirs.
func memoryRound(ctx context.Context, b build, m manyDevices, s samples) error {
	for _, way := range []struct {
		subject string
		each    policy.EachKind
	}{{hooksShared, policy.EachAll}, {hooksHosts, policy.EachHost}} {
		if m.devices == 0 && way.each == policy.EachHost {
			continue
		}
		if err := m.memory(ctx, b, way.subject, way.each, s); err != nil {
			return err
		}
	}
	return nil
}

func (m manyDevices) memory(ctx context.Context, b build, subject string, each policy.EachKind, s samples) error {
	a, err := m.newArena(ctx)
	if err != nil {
		return err
	}
	defer a.Close()
	if m.devices > 0 {
		file, err := m.write(2, 10_000_000, each)
		if err != nil {
			return err
		}
		before := settledMemory()
		if _, _, err := a.command(ctx, b.binary, 0, "apply", file); err != nil {
			return err
		}
		s.add(hooksMemory, b.subject(subject), settledMemory()-before)
	}
	if each == policy.EachAll {
		took, err := m.watch(ctx, a, b.binary)
		if err != nil {
			return err
		}
		s.add(m.watchTime, b.subject(hooksWatched), took)
	}
	_, _, err = a.command(ctx, b.binary, 0, "flush", "--all") // the kernel alone would detach each hook slowly
	return err
}

// watchPatience is how long devices may wait for their rules.
const watchPatience = 2 * time.Minute

// watch starts `shapectl watch` and adds new devices. It returns the seconds until all
// have their rules, from before the first of them was there.
func (m manyDevices) watch(ctx context.Context, a *arena, binary string) (took float64, err error) {
	file := filepath.Join(m.dir, "watch.yaml")
	if err := os.WriteFile(file, []byte("devices:\n  new*:\n    egress: {10.0.0.0/8: 5mbit}\n    ingress: {10.0.0.0/8: 5mbit}\n"), 0o600); err != nil {
		return 0, err
	}
	socket := filepath.Join(m.dir, "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return 0, err
	}
	defer os.Remove(socket)
	defer manager.Close()
	ctx, stop := context.WithTimeout(ctx, watchPatience)
	cmd := exec.CommandContext(ctx, binary, "watch", file)
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.Env = append(os.Environ(), "SHAPECTL_BPFFS="+a.bpffs, "NOTIFY_SOCKET="+socket)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = a.inNear(cmd.Start)
	}
	if err != nil {
		stop()
		return 0, err
	}
	defer cmd.Wait()
	defer stop()
	if err := manager.SetReadDeadline(time.Now().Add(watchPatience)); err != nil {
		return 0, err
	}
	if _, err := manager.Read(make([]byte, 100)); err != nil {
		return 0, fmt.Errorf("%s does not get ready: %w", cmd, err)
	}
	start := time.Now()
	if err := a.inNear(func() error { return addPairs("new", m.fresh) }); err != nil {
		return 0, err
	}
	lines := bufio.NewScanner(stdout)
	for told := range 2 * m.fresh { // a line for each direction
		if !lines.Scan() {
			stop()
			cmd.Wait()
			return 0, fmt.Errorf("%s: told of %d directions of devices, not of %d: %.300s", cmd, told, 2*m.fresh, bytes.TrimSpace(stderr.Bytes()))
		}
	}
	return time.Since(start).Seconds(), nil
}
