package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// The hosts behind NAT, and the one on the Internet.
var (
	insides  = map[string][2]string{"4": {"192.168.1.11", "192.168.1.12"}, "6": {"fd00:1::11", "fd00:1::12"}}
	internet = map[string]string{"4": "203.0.113.2", "6": "2001:db8::2"}
	echoes   = map[string][]byte{"4": append([]byte{8, 0, 0xf7, 0xff}, make([]byte, 900)...), "6": append([]byte{128}, make([]byte, 903)...)}
	outside  = map[string]string{"4": "203.0.113.1", "6": "2001:db8::1"} // of all, on the line
)

// A natRig is a gateway with masquerade: va is its line, and lan its inner device. All hosts are in two other namespaces.
type natRig struct {
	*rig
	home, internet *testenv.Netns
}

func newNATRig(rig *rig) *natRig {
	t, r := rig.t, &natRig{rig: rig}
	t.Helper()
	r.sh("echo 1 >/proc/sys/net/ipv4/ip_forward; echo 0 >/proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding")
	testenv.Veth(t, "lan", "home")
	for device, there := range map[string]**testenv.Netns{"vb": &r.internet, "home": &r.home} {
		_, *there = testenv.NewNamedNetns(t)
		testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, device), (*there).FD()))
	}
	r.sh(`ip address add 203.0.113.1/24 dev va; ip address add 2001:db8::1/64 dev va nodad
		ip route add default via 203.0.113.2; ip route add default via 2001:db8::2
		ip address add 192.168.1.1/24 dev lan; ip address add fd00:1::1/64 dev lan nodad
		for family in ip ip6; do
			nft "table $family nat { chain out { type nat hook postrouting priority srcnat; oifname va masquerade; }; chain in { type nat hook prerouting priority dstnat; }; }"
		done
		nft 'add rule ip nat in iifname va udp dport 80 dnat to 192.168.1.12:8080; add rule ip6 nat in iifname va udp dport 80 dnat to [fd00:1::12]:8080'`)
	testenv.Must(t, r.internet.Do(func() error {
		r.sh("echo 0 >/proc/sys/net/ipv6/conf/all/disable_ipv6; ip link set vb up; ip address add 203.0.113.2/24 dev vb; ip address add 2001:db8::2/64 dev vb nodad")
		return nil
	}))
	testenv.Must(t, r.home.Do(func() error {
		r.sh("echo 0 >/proc/sys/net/ipv6/conf/all/disable_ipv6; ip link set home up")
		for _, pair := range insides {
			for _, a := range pair {
				r.sh("ip address add " + a + map[bool]string{true: "/64 nodad", false: "/24"}[strings.Contains(a, ":")] + " dev home")
			}
		}
		r.sh("ip route add default via 192.168.1.1; ip route add default via fd00:1::1")
		return nil
	}))
	testenv.WaitUp(t, "va")
	testenv.WaitUp(t, "lan")
	return r
}

// udp opens a socket in a namespace that is closed with the test. With to, it is connected.
func (r *natRig) udp(in *testenv.Netns, from, to string) (c *net.UDPConn) {
	r.t.Helper()
	testenv.Must(r.t, in.Do(func() (err error) {
		local := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from))
		if to == "" {
			c, err = net.ListenUDP("udp", local)
		} else {
			c, err = net.DialUDP("udp", local, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
		}
		return err
	}))
	r.t.Cleanup(func() { c.Close() })
	return c
}

func at(address string, port int) string { return net.JoinHostPort(address, fmt.Sprint(port)) }

// keys are the hosts whose buckets are full in a direction.
func (r *natRig) keys(direction string) string {
	r.t.Helper()
	var keys []string
	for _, rule := range r.show("va", direction, "--buckets") {
		for _, b := range rule.Buckets {
			if b.Bytes > 2000 {
				keys = append(keys, b.Name)
			}
		}
	}
	slices.Sort(keys)
	return strings.Join(keys, " ")
}

// Hosts have buckets by their addresses behind NAT: in both directions, by both families, and with connections from outside. What
// conntrack does not know has the address that the line sees.
func TestNATKeys(t *testing.T) {
	r := newNATRig(newRig(t))
	// Of three packets, the second fills the bucket for a minute.
	exchange := func(from, to *net.UDPConn) {
		t.Helper()
		testenv.Must(t, to.SetReadDeadline(time.Now().Add(testenv.Patience)))
		for range 3 {
			from.Write(make([]byte, 900))
		}
		_, back, err := to.ReadFromUDPAddrPort(make([]byte, 1000))
		testenv.Must(t, err)
		for range 3 {
			_, err = to.WriteToUDPAddrPort(make([]byte, 900), back)
			testenv.Must(t, err)
		}
	}
	for family, address := range internet {
		a, b, line := insides[family][0], insides[family][1], outside[family]
		for _, direction := range []string{"egress", "ingress"} {
			r.ok("set", "va", direction, "any", "--rate", "8kbit", "--capacity", "1600", "--algorithm", "leaky", "--penalty", "60s", "--each", "host", "--nat")
		}
		are := func(what, egress, ingress string) {
			t.Helper()
			if out, in := r.keys("egress"), r.keys("ingress"); out != egress || in != ingress {
				t.Errorf("%s: buckets on egress %s, on ingress %s; want %s, %s", what, out, in, egress, ingress)
			}
		}
		exchange(r.udp(r.home, at(a, 5000), at(address, 53)), r.udp(r.internet, at(address, 53), ""))
		are("from inside", a, a)
		exchange(r.udp(r.internet, at(address, 5001), at(line, 80)), r.udp(r.home, at(b, 8080), ""))
		are("port forward", a+" "+b, a+" "+b)
		testenv.Must(t, r.home.Do(func() error {
			c, err := net.DialIP(map[string]string{"4": "ip4:1", "6": "ip6:58"}[family], &net.IPAddr{IP: net.ParseIP(a)}, &net.IPAddr{IP: net.ParseIP(address)})
			for range 3 {
				if err == nil {
					_, err = c.Write(echoes[family])
				}
			}
			c.Close()
			return err
		}))
		if out := r.keys("egress"); !strings.Contains(out, line) {
			t.Errorf("pings: no bucket of %s: %s", line, out)
		}
		r.ok("flush", "va")
	}
}

// A host with eight flows and one with a single flow get the same, in each direction and by each family.
func TestNATShares(t *testing.T) {
	r := newNATRig(newRig(t))
	if got := r.in("line va --down 500kbit --up 500kbit --no-queue"); !strings.Contains(got, "in equal parts for all hosts behind NAT") {
		t.Errorf("it says %s", got)
	}
	listens := r.events()
	var received [2][4]atomic.Int64 // bytes of uploads and of downloads, by host and family
	// flood sends 800 kbit/s until the socket is closed, and counts what comes back.
	flood := func(c *net.UDPConn, write func([]byte) (int, error), back *atomic.Int64) {
		go func() {
			for b := make([]byte, 2000); ; {
				n, err := c.Read(b)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				back.Add(int64(n))
			}
		}()
		for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C {
			if _, err := write(make([]byte, 1000)); errors.Is(err, net.ErrClosed) {
				tick.Stop()
				return
			}
		}
	}
	port, floods := 5000, []func(){}
	for f, family := range []string{"4", "6"} {
		for host, flows := range []int{8, 1} {
			for range flows {
				port++
				i := 2*f + host
				here := r.udp(r.home, at(insides[family][host], port), at(internet[family], port))
				there := r.udp(r.internet, at(internet[family], port), "")
				here.Write([]byte{0})
				testenv.Must(t, there.SetReadDeadline(time.Now().Add(testenv.Patience)))
				_, back, err := there.ReadFromUDPAddrPort(make([]byte, 10))
				testenv.Must(t, err)
				floods = append(floods, func() { flood(here, here.Write, &received[1][i]) },
					func() {
						flood(there, func(b []byte) (int, error) { return there.WriteToUDPAddrPort(b, back) }, &received[0][i])
					})
			}
		}
	}
	for _, flood := range floods {
		go flood()
	}
	// measure is what each got in three seconds, of its part.
	measure := func() (parts [2][4]float64, fair bool) {
		var before [2][4]int64
		for d := range received {
			for i := range received[d] {
				before[d][i] = received[d][i].Load()
			}
		}
		time.Sleep(3 * time.Second)
		fair = true
		for d := range received {
			sum := 0.0
			for i := range received[d] {
				parts[d][i] = float64(received[d][i].Load() - before[d][i])
				sum += parts[d][i] / 4
			}
			for i := range parts[d] {
				parts[d][i] /= sum
				fair = fair && parts[d][i] > 0.85 && parts[d][i] < 1.15
			}
		}
		return parts, fair
	}
	// Where the machine is so busy that a sender stands still, the others get its part.
	parts, fair := measure()
	for attempt := 0; !fair && attempt < 3; attempt++ {
		parts, fair = measure()
	}
	if !fair {
		t.Fatalf("parts of a and b by IPv4, a and b by IPv6: uploads %.2f, downloads %.2f", parts[0], parts[1])
	}
	a := insides["4"][0]
	listens.tells(0, "an event of "+a, func(e report.Event) bool { return e.Address == a })
	if !testenv.OlderThan(t, 6, 6) {
		if out := r.ok(fields("top va egress any --by host --once --interval 200ms")...); !strings.Contains(out, a+" ") {
			t.Errorf("top does not name %s: %s", a, out)
		}
		if out := r.ok(fields("top " + a + " egress --by flow --once --interval 200ms")...); !strings.Contains(out, "udp,"+a+":") || strings.Contains(out, insides["4"][1]) {
			t.Errorf("top has other flows than those of %s: %s", a, out)
		}
	}
	if out := r.ok(fields("explain va egress " + internet["4"])...); !strings.Contains(out, "shared by the hosts behind NAT of va egress") {
		t.Errorf("explain: %s", out)
	}
}
