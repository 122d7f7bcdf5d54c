package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite hooks limits many devices of one namespace, like a host of virtual machines
// or containers, with the command. It measures the time of commands and the kernel memory.

const (
	hooksTime   = "Time of a command, by number of devices"
	hooksMemory = "Kernel memory, by number of devices"
	hooksWatch  = "Time until %d new devices have rules, by number of limited devices"
)

// Subjects of this suite.
const (
	hooksFirst   = "shapectl apply, no rules before"
	hooksRates   = "shapectl apply, all rates change"
	hooksAgain   = "shapectl apply, nothing to change"
	hooksSet     = "shapectl set, one rule"
	hooksFlush   = "shapectl flush --all"
	hooksWatched = "shapectl serve"
	hooksShared  = "shapectl, each all"
	hooksHosts   = "shapectl, each host"
)

// expedited is the file in which commands request expedited grace periods while they attach many hooks.
const expedited = "/sys/kernel/rcu_expedited"

// A hookSize is a number of devices, and the number of rounds for it.
type hookSize struct{ devices, rounds int }

func hooks(ctx context.Context, o options) (err error) {
	commands, memory, fresh := []hookSize{{20, 7}, {200, 5}, {500, 5}}, []hookSize{{0, 7}, {20, 5}, {1000, 5}}, 20
	if o.quick {
		commands, memory, fresh = commands[:1], memory[:2], 4
	}
	relaxed := readLine(expedited) == "0"
	defer func() {
		if err != nil && relaxed { // a killed command may not have reset it
			os.WriteFile(expedited, []byte("0"), 0)
		}
	}()
	return withCommand(ctx, func(dir, binary string) error {
		m := manyDevices{options: o, binary: binary, dir: dir, fresh: fresh}
		for _, part := range []struct {
			what  string
			sizes []hookSize
			round func(manyDevices, context.Context) error
		}{
			{"commands", commands, manyDevices.commands},
			{"watch, memory", memory, manyDevices.watchAndMemory},
		} {
			for _, size := range part.sizes {
				o.say("  %s: %s devices", part.what, count(size.devices))
				m.devices = size.devices
				for range o.rounds(size.rounds) {
					if err := part.round(m, ctx); err != nil {
						return fmt.Errorf("%s, %d devices: %w", part.what, m.devices, err)
					}
				}
			}
		}
		return nil
	})
}

// manyDevices are the devices of a round.
type manyDevices struct {
	options
	binary  string
	dir     string // for files
	devices int    // before a command
	fresh   int    // that appear while `serve` runs
}

func (m manyDevices) add(table, subject, unit string, sample float64) {
	m.options.add(table+": "+count(m.devices), subject, unit, "", sample)
}

// newArena returns an arena with the devices.
func (m manyDevices) newArena(ctx context.Context) (*arena, error) {
	a, err := newArena(ctx)
	if err != nil {
		return nil, err
	}
	if err := in(a.near, func() error { return addPairs("dev", m.devices) }); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// addPairs adds veth pairs with so many devices to the namespace of the calling thread.
func addPairs(prefix string, devices int) error {
	for i := 0; i < devices; i += 2 {
		if err := addVeth(prefix+strconv.Itoa(i), prefix+strconv.Itoa(i+1), nil); err != nil {
			return err
		}
	}
	return nil
}

// write writes a policy with so many rules for each direction of all devices, with a different
// rate for each device. It returns the path.
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

// commands measures the time of each command once, with a rule in each direction.
func (m manyDevices) commands(ctx context.Context) error {
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
	settledMemory() // wait until the kernel has freed the previous arena
	return a.steps(ctx, m.binary, []step{
		{hooksFirst, 0, []string{"apply", file}},
		{hooksRates, 0, []string{"apply", changed}},
		{hooksAgain, 0, []string{"apply", changed}},
		{hooksSet, 0, []string{"set", "dev0", "egress", "10.0.0.0/8", "--rate", "7777kbit"}},
		{hooksFlush, 0, []string{"flush", "--all"}},
	}, func(subject string, took, _ float64) { m.add(hooksTime, subject, unitSeconds, took) })
}

// watchAndMemory measures the memory of two rules in each direction once, and the time until
// new devices beside them have their rules.
func (m manyDevices) watchAndMemory(ctx context.Context) error {
	if err := m.memory(ctx, hooksShared, policy.EachAll); err != nil || m.devices == 0 {
		return err
	}
	return m.memory(ctx, hooksHosts, policy.EachHost)
}

func (m manyDevices) memory(ctx context.Context, subject string, each policy.EachKind) error {
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
		if _, _, err := a.command(ctx, m.binary, 0, "apply", file); err != nil {
			return err
		}
		m.add(hooksMemory, subject, unitMiB, settledMemory()-before)
	}
	if each == policy.EachAll {
		if err := m.watch(ctx, a); err != nil {
			return err
		}
	}
	_, _, err = a.command(ctx, m.binary, 0, "flush", "--all") // detaching is slow when the kernel does it with the namespace
	return err
}

// watchPatience is the longest time until devices have their rules.
const watchPatience = 2 * time.Minute

// watch starts `shapectl serve` and adds new devices. It measures the time from before the
// first of them until all have their rules.
func (m manyDevices) watch(ctx context.Context, a *arena) error {
	file := filepath.Join(m.dir, "watch.yaml")
	text := "devices:\n  new*:\n    egress: {10.0.0.0/8: 5mbit}\n    ingress: {10.0.0.0/8: 5mbit}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	socket := filepath.Join(m.dir, "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer os.Remove(socket)
	defer manager.Close()
	ctx, stop := context.WithTimeout(ctx, watchPatience)
	defer stop()
	cmd := a.shapectlCommand(ctx, m.binary, "serve", "--listen", "none", "--socket", "none", file)
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+socket)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := in(a.near, cmd.Start); err != nil {
		return err
	}
	end := func() {
		stop()
		cmd.Wait()
	}
	defer end()
	if err := manager.SetReadDeadline(time.Now().Add(watchPatience)); err != nil {
		return err
	}
	if _, err := manager.Read(make([]byte, 100)); err != nil {
		return fmt.Errorf("%s is not ready: %w", cmd, err)
	}
	start := time.Now()
	if err := in(a.near, func() error { return addPairs("new", m.fresh) }); err != nil {
		return err
	}
	lines := bufio.NewScanner(stdout)
	for reported := range 2 * m.fresh { // a line for each direction
		if !lines.Scan() {
			end() // stderr is complete after this
			return fmt.Errorf("%s: reported %d directions of devices instead of %d: %.300s",
				cmd, reported, 2*m.fresh, bytes.TrimSpace(stderr.Bytes()))
		}
	}
	m.add(fmt.Sprintf(hooksWatch, m.fresh), hooksWatched, unitSeconds, time.Since(start).Seconds())
	return nil
}
