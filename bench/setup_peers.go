package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
)

// Peers are set up in one transaction of their own tool, from text that was
// made before: reading it is part of what they take.

// loadHTB gives each address of a /16 a class, which two levels of hash tables
// of the u32 classifier find by the last two bytes of the destination.
func loadHTB(ctx context.Context, n, changes int) (out outcome, err error) {
	err = inNamespace(func() error {
		index, err := addVeth()
		if err != nil {
			return err
		}
		batch := htbBatch(n)
		before := settledMemory()
		start := time.Now()
		if out.ProcessMiB, err = runCommand(ctx, batch, io.Discard, "tc", "-batch", "-"); err != nil {
			return err
		}
		out.Seconds = time.Since(start).Seconds()
		out.KernelMiB = kernelMemory() - before
		random := newRandom()
		out.Random, out.Same, err = changeRules(random, n, changes, func(i int) (float64, error) {
			class := netlink.NewHtbClass(
				netlink.ClassAttrs{LinkIndex: index, Parent: netlink.MakeHandle(1, 0), Handle: netlink.MakeHandle(1, htbClass(i))},
				netlink.HtbClassAttrs{Rate: uint64(someRate(random)), Buffer: 1 << 20},
			)
			start := time.Now()
			err := netlink.ClassChange(class)
			return microseconds(time.Since(start)), err
		})
		return err
	})
	return out, err
}

const vethName = "bench0"

// addVeth makes a device that is up, with another at its far end.
func addVeth() (index int, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = vethName
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "bench1"}); err != nil {
		return 0, fmt.Errorf("add a veth pair: %w", err)
	}
	link, err := netlink.LinkByName(vethName)
	if err != nil {
		return 0, err
	}
	return link.Attrs().Index, netlink.LinkSetUp(link)
}

// htbClass is the minor number of the i-th class; 0 is none.
func htbClass(i int) uint16 { return uint16(i + 1) }

func htbBatch(n int) io.Reader {
	var b bytes.Buffer
	random := newRandom()
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	const filter = "filter add dev " + vethName + " parent 1: prio 1 protocol ip "
	line("qdisc add dev %s root handle 1: htb", vethName)
	for i := range n {
		line("class add dev %s parent 1: classid 1:%x htb rate %dbit burst 1mb quantum 1514", vethName, htbClass(i), someRate(random))
	}
	line("%shandle 2: u32 divisor 256", filter)
	line("%su32 ht 800:: match ip dst 10.1.0.0/16 hashkey mask 0x0000ff00 at 16 link 2:", filter)
	for i := range n {
		high, low := i>>8, i&0xff
		table := 0x100 + high
		if low == 0 {
			line("%shandle %x: u32 divisor 256", filter, table)
			line("%su32 ht 2:%x: match ip dst 10.1.%d.0/24 hashkey mask 0x000000ff at 16 link %x:", filter, high, high, table)
		}
		line("%su32 ht %x:%x: match ip dst 10.1.%d.%d/32 flowid 1:%x", filter, table, low, high, low, htbClass(i))
	}
	return &b
}

func nftRate(rate uint64) string {
	return fmt.Sprintf("rate over %d bytes/second burst 1048576 bytes", rate/8)
}

// A change makes a limit of another name, as one that is in use can not be changed.
func loadNftMap(ctx context.Context, n, changes int) (outcome, error) {
	return loadNft(ctx, n, changes, func(random func() uint64) (script string, change func(i, turn int) string) {
		var b strings.Builder
		b.WriteString("table ip bench {\n")
		for i := range n {
			fmt.Fprintf(&b, "limit l%d { %s; }\n", i, nftRate(random()))
		}
		b.WriteString("map rates { type ipv4_addr : limit; flags interval; elements = {\n")
		for i := range n {
			fmt.Fprintf(&b, "%s : \"l%d\",\n", nftPrefix(i), i)
		}
		b.WriteString("} }\nchain out { type filter hook output priority 0; limit name ip daddr map @rates drop\n}\n}\n")
		return b.String(), func(i, turn int) string {
			return fmt.Sprintf("add limit ip bench t%d { %s; }\ndelete element ip bench rates { %s }\nadd element ip bench rates { %s : \"t%d\" }\n",
				turn, nftRate(random()), nftPrefix(i), nftPrefix(i), turn)
		}
	})
}

func loadNftSet(ctx context.Context, n, changes int) (outcome, error) {
	return loadNft(ctx, n, changes, func(random func() uint64) (script string, change func(i, turn int) string) {
		var b strings.Builder
		b.WriteString("table ip bench {\nset rates { type ipv4_addr; flags interval; limit rate over 1 mbytes/second; elements = {\n")
		for i := range n {
			fmt.Fprintf(&b, "%s limit %s,\n", nftPrefix(i), nftRate(random()))
		}
		b.WriteString("} }\nchain out { type filter hook output priority 0; ip daddr @rates drop\n}\n}\n")
		return b.String(), func(i, _ int) string {
			return fmt.Sprintf("delete element ip bench rates { %s }\nadd element ip bench rates { %s limit %s }\n",
				nftPrefix(i), nftPrefix(i), nftRate(random()))
		}
	})
}

// nftPrefix is the i-th of many prefixes that do not overlap.
func nftPrefix(i int) netip.Prefix {
	n := 10<<24 + i*16
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}), 28)
}

func loadNft(ctx context.Context, n, changes int,
	text func(rate func() uint64) (script string, change func(i, turn int) string)) (out outcome, err error) {
	err = inNamespace(func() error {
		random := newRandom()
		script, change := text(func() uint64 { return uint64(someRate(random)) })
		nft := func(script string) (float64, error) {
			return runCommand(ctx, strings.NewReader(script), io.Discard, "nft", "-f", "-")
		}
		before := settledMemory()
		start := time.Now()
		if out.ProcessMiB, err = nft(script); err != nil {
			return err
		}
		out.Seconds = time.Since(start).Seconds()
		out.KernelMiB = kernelMemory() - before
		turn := 0
		out.Random, out.Same, err = changeRules(random, n, changes, func(i int) (float64, error) {
			turn++
			start := time.Now()
			_, err := nft(change(i, turn))
			return microseconds(time.Since(start)), err
		})
		return err
	})
	return out, err
}
