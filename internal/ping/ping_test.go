package ping

import (
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

func now() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return uint64(t.Nano())
}

// Pings of both families come back, with raw sockets and with those that the kernel has for pings.
func TestPing(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	set := func(name, value string) {
		t.Helper()
		testenv.Must(t, os.WriteFile("/proc/sys/"+name, []byte(value), 0))
	}
	set("net/ipv6/conf/lo/disable_ipv6", "0")
	for _, group := range []string{"1 0", "0 0"} {
		set("net/ipv4/ping_group_range", group)
		p := New(now)
		for _, to := range []string{"127.0.0.1", "::1", "127.0.0.7"} {
			before := now()
			testenv.Must(t, p.Send(netip.MustParseAddr(to)))
			var answers []Answer
			testenv.Eventually(t, "an answer", func() bool {
				answers = append(answers, p.Heard()...)
				return len(answers) > 0
			})
			if a := answers[0]; a.From.String() != to || a.Sent < before || a.At < a.Sent || a.At > now() {
				t.Errorf("ping_group_range %s, %s: %+v", group, to, a)
			}
		}
		if raw := !isPing(p.sockets[true]); raw != (group == "1 0") {
			t.Errorf("ping_group_range %s: raw is %v", group, raw)
		}
		p.Close()
	}
}

// Only the answer to a ping counts, and once.
func TestForgedAnswers(t *testing.T) {
	to := netip.MustParseAddr("192.0.2.1")
	sent := ping{to: to, sent: 5, payload: [payload]byte{1, 2, 3}}
	forge := func(edit func(*icmp.Message, *icmp.Echo, *message)) (got bool) {
		p := New(nil)
		p.waiting[7] = sent
		echo := &icmp.Echo{ID: int(p.id), Seq: 7, Data: append([]byte(nil), sent.payload[:]...)}
		m, from := &icmp.Message{Type: ipv4.ICMPTypeEchoReply, Body: echo}, message{from: to, at: 9, v4: true, raw: true}
		edit(m, echo, &from)
		packet, err := m.Marshal(nil)
		testenv.Must(t, err)
		from.icmp = packet
		a, ok := p.answer(from)
		if again, twice := p.answer(from); twice {
			t.Errorf("an answer counts again: %+v", again)
		}
		return ok && a == Answer{to, 5, 9}
	}
	if !forge(func(*icmp.Message, *icmp.Echo, *message) {}) {
		t.Error("the answer is refused")
	}
	for what, edit := range map[string]func(*icmp.Message, *icmp.Echo, *message){
		"of another host":       func(_ *icmp.Message, _ *icmp.Echo, m *message) { m.from = to.Next() },
		"of another identifier": func(_ *icmp.Message, e *icmp.Echo, _ *message) { e.ID ^= 1 },
		"of another sequence":   func(_ *icmp.Message, e *icmp.Echo, _ *message) { e.Seq++ },
		"with another payload":  func(_ *icmp.Message, e *icmp.Echo, _ *message) { e.Data[20] ^= 1 },
		"with a short payload":  func(_ *icmp.Message, e *icmp.Echo, _ *message) { e.Data = e.Data[:5] },
		"that is a request":     func(m *icmp.Message, _ *icmp.Echo, _ *message) { m.Type = ipv4.ICMPTypeEcho },
		"of the other family":   func(m *icmp.Message, _ *icmp.Echo, f *message) { m.Type, f.v4 = ipv6.ICMPTypeEchoRequest, false },
	} {
		if forge(edit) {
			t.Errorf("an answer %s counts", what)
		}
	}
}
