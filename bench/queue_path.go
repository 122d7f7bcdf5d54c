package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// The two devices between a source and the near end of its arena.
const (
	sourceDevice = "source"
	uplinkDevice = "uplink"
)

// Commands of ip for them.
const (
	uplinkSetup = `link set uplink address 02:00:00:00:01:02 up
addr add 198.51.100.2/24 dev uplink
neigh add 198.51.100.1 lladdr 02:00:00:00:01:01 dev uplink
`
	sourceSetup = `link set source address 02:00:00:00:01:01 up
addr add 198.51.100.1/24 dev source
neigh add 198.51.100.2 lladdr 02:00:00:00:01:02 dev source
route add default via 198.51.100.2
`
)

// A path is an arena whose near end is a router. Packets from a source behind it to the far end
// go through the limiter, and only the limiter delays them. Packets on the path back have a
// constant delay, like on a path through a network.
type path struct {
	*arena
	source netns.NsHandle
}

// newPath returns a path with a round trip, and without a limiter.
func newPath(ctx context.Context, roundTrip time.Duration) (_ *path, err error) {
	a, err := newArena(ctx)
	if err != nil {
		return nil, err
	}
	p := &path{arena: a}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	if p.source, err = p.newNamespace(); err != nil {
		return nil, err
	}
	if err := in(p.near, func() error {
		if err := addVeth(uplinkDevice, sourceDevice, netlink.NsFd(p.source)); err != nil {
			return err
		}
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return fmt.Errorf("make a router: %w", err)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	if err := errors.Join(ip(ctx, p.near, uplinkSetup), ip(ctx, p.source, sourceSetup), ip(ctx, p.far, "route add default via 192.0.2.1\n")); err != nil {
		return nil, err
	}
	for _, end := range []netns.NsHandle{p.source, p.near, p.far} {
		if err := in(end, largeWindows); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(waitUp(ctx, p.source, sourceDevice), waitUp(ctx, p.near, uplinkDevice)); err != nil {
		return nil, err
	}
	if roundTrip == 0 {
		return p, nil
	}
	return p, in(p.far, func() error {
		return runCommand(ctx, "", "tc", "qdisc", "add", "dev", farDevice, "root",
			"netem", "delay", fmt.Sprintf("%dus", roundTrip.Microseconds()), "limit", "1000000")
	})
}

// largeWindows makes TCP windows in the thread's namespace so large that no receiver limits TCP.
func largeWindows() error {
	for name, sizes := range map[string]string{"tcp_rmem": "4096 4194304 67108864", "tcp_wmem": "4096 131072 67108864"} {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(sizes), 0); err != nil {
			return fmt.Errorf("give TCP larger windows: %w", err)
		}
	}
	return nil
}

// begin sets the initial window of TCP from a namespace, in segments. The default is 10; a
// larger one shortens slow start.
func (p *path) begin(ctx context.Context, from netns.NsHandle, segments uint64) error {
	via := "198.51.100.2"
	if from == p.near {
		via = "192.0.2.2"
	}
	return ip(ctx, from, fmt.Sprintf("route replace default via %s initcwnd %d\n", via, max(10, segments)))
}

// askForECN makes TCP in a namespace negotiate ECN.
func askForECN(namespace netns.NsHandle) error {
	return in(namespace, func() error { return os.WriteFile("/proc/sys/net/ipv4/tcp_ecn", []byte("1"), 0) })
}
