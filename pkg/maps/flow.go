package maps

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Now is the data path's time: CLOCK_MONOTONIC, in ns.
func Now() uint64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // fails only for a clock that does not exist
	return uint64(ts.Nano())
}

// Clocks are the time of the wall clock and that of Now, at the same instant.
func Clocks() (wall time.Time, now uint64) {
	for { // again if this process was made to wait in between
		before := Now()
		wall, now = time.Now(), Now()
		if now-before < uint64(time.Millisecond) {
			return wall, now
		}
	}
}

// A Flow is a packet's 5-tuple; ports are 0 where a protocol has none.
type Flow struct {
	Src, Dst         netip.Addr
	Proto            uint8
	SrcPort, DstPort uint16
}

// protocols are those that people know by name; all have ports but ICMP.
var protocols = map[uint8]string{1: "icmp", 6: "tcp", 17: "udp", 33: "dccp", 58: "icmp6", 132: "sctp", 136: "udplite"}

// ParseFlow reads a flow as String writes it: a protocol by name or number, source and
// destination, with ports if the protocol has them ("udp,192.0.2.1:5000,10.0.0.7:53").
func ParseFlow(s string) (f Flow, err error) {
	parts := strings.Split(s, ",")
	if len(parts) != 3 {
		return f, fmt.Errorf("flow %.100q: write protocol, source and destination, such as udp,192.0.2.1:5000,10.0.0.7:53", s)
	}
	number, err := strconv.ParseUint(parts[0], 10, 8)
	f.Proto = uint8(number)
	if err != nil {
		f.Proto = 0
		for n, name := range protocols {
			if name == strings.ToLower(parts[0]) {
				f.Proto = n
			}
		}
		if f.Proto == 0 {
			return f, fmt.Errorf("flow %.100q: protocol %q is unknown; use tcp, udp, sctp, dccp, udplite, icmp, icmp6 or a number", s, parts[0])
		}
	}
	var ends [2]netip.AddrPort
	for i, text := range parts[1:] {
		if addr, err := netip.ParseAddr(text); err == nil {
			ends[i] = netip.AddrPortFrom(addr, 0)
		} else if ends[i], err = netip.ParseAddrPort(text); err != nil {
			return f, fmt.Errorf("flow %.100q: %q is neither an address nor an address and a port (10.0.0.7:53, [2001:db8::7]:53)", s, text)
		}
	}
	f.Src, f.SrcPort, f.Dst, f.DstPort = ends[0].Addr(), ends[0].Port(), ends[1].Addr(), ends[1].Port()
	if f.Src.Is4() != f.Dst.Is4() || f.Src.Zone() != "" || f.Dst.Zone() != "" || f.Src.Is4In6() || f.Dst.Is4In6() {
		return f, fmt.Errorf("flow %.100q: write two IPv4 addresses or two IPv6 addresses, without zones", s)
	}
	return f, nil
}

// Far is the address on the side that rules match.
func (f Flow) Far(match policy.Match) netip.Addr {
	if match == policy.MatchSrc {
		return f.Src
	}
	return f.Dst
}

func (f Flow) String() string {
	proto, ok := protocols[f.Proto]
	if !ok {
		proto = strconv.Itoa(int(f.Proto))
	}
	if f.SrcPort == 0 && f.DstPort == 0 {
		return proto + "," + f.Src.String() + "," + f.Dst.String()
	}
	return proto + "," + netip.AddrPortFrom(f.Src, f.SrcPort).String() + "," + netip.AddrPortFrom(f.Dst, f.DstPort).String()
}

// KeyName is the bucket key of a packet of flow, as people read it.
func KeyName(e Entry, match policy.Match, flow Flow) string {
	far := flow.Far(match)
	switch e.Each.Kind {
	case policy.EachHost:
		return far.String()
	case policy.EachSubnet:
		return netip.PrefixFrom(far, eachBits(e.Each, far)).Masked().String()
	case policy.EachFlow:
		return flow.String()
	}
	return policy.CIDR(e.Prefix)
}

// SharerName is the sharer of a packet of flow in a rule or pool with fair shares, as people read it. member is what
// is directly within the pool.
func SharerName(e, member Entry, match policy.Match, flow Flow) string {
	switch {
	case e.Share.Kind != policy.ShareMember:
		e.Each = sharersOf(e.Share, flow.Far(match))
		return KeyName(e, match, flow)
	case member.Pool:
		return member.Label.Name
	}
	return policy.CIDR(member.Prefix)
}
