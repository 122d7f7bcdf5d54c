package loader

import (
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A tunnel is a kind of device, and the number of bytes before the IP packets that it carries.
type tunnel struct {
	name   string
	header int
	device func(a netlink.LinkAttrs, below int, local, remote net.IP) netlink.Link
}

// The first byte of its VNI is at the offset of a TCP header's length.
var vxlan = tunnel{"VXLAN", 14 + 20 + 8 + 8 + 14, func(a netlink.LinkAttrs, below int, _, remote net.IP) netlink.Link {
	return &netlink.Vxlan{LinkAttrs: a, VxlanId: 0xf00001, VtepDevIndex: below, Group: remote, Port: 4789}
}}

func TestWireBytesThroughVXLAN(t *testing.T) { vxlan.countsAsSent(t) }

// countsAsSent tests that TCP and UDP through a tunnel count the same on egress and on ingress, with and without
// segmentation offload: as many packets as the sockets have sent, each with all headers.
func (k tunnel) countsAsSent(t *testing.T) {
	for _, offload := range []bool{true, false} {
		t.Run(fmt.Sprintf("offload %v", offload), func(t *testing.T) {
			_, sender := testenv.NewNamedNetns(t)
			_, receiver := testenv.NewNamedNetns(t)
			options := Options{BPFFS: testenv.BPFFS(t)}
			in := func(n *testenv.Netns, f func() error) {
				t.Helper()
				testenv.Must(t, n.Do(f))
			}
			in(sender, func() error { return pair("s0", nil, "r0", nil, receiver) })
			counted := map[policy.Direction]func() maps.Counters{}
			for _, end := range []struct {
				netns           *testenv.Netns
				device, address string
				remote, overlay string
				direction       policy.Direction
			}{
				{sender, "s0", "192.0.2.1", "192.0.2.2", "198.51.100.1", policy.Egress},
				{receiver, "r0", "192.0.2.2", "192.0.2.1", "198.51.100.2", policy.Ingress},
			} {
				in(end.netns, func() error {
					attrs := netlink.NewLinkAttrs()
					attrs.Name = "tunnel0"
					if err := up(end.device, end.address); err != nil {
						return err
					}
					below, err := netlink.LinkByName(end.device)
					if err != nil {
						return err
					}
					if err := netlink.LinkAdd(k.device(attrs, below.Attrs().Index, net.ParseIP(end.address), net.ParseIP(end.remote))); err != nil {
						return err
					}
					return errors.Join(up("tunnel0", end.overlay), setOffload(offload, end.device, "tunnel0"))
				})
				everything := rule("0.0.0.0/0")
				everything.Rate, everything.Capacity = policy.Unlimited, 0
				in(end.netns, func() error { return limitOn(options, end.device, end.direction, everything) })
				counted[end.direction] = func() (c maps.Counters) {
					in(end.netns, func() (err error) {
						c, err = countersOn(options, end.device, end.direction, everything)
						return err
					})
					return c
				}
			}
			// A transfer returns what it has sent, in packets and bytes on the wire.
			check := func(transport string, transfer func() (packets, bytes uint64, err error)) {
				t.Helper()
				before := map[policy.Direction]maps.Counters{}
				for d, c := range counted {
					before[d] = c()
				}
				packets, bytes, err := transfer()
				testenv.Must(t, err)
				for d, c := range counted {
					now := c()
					for last := (maps.Counters{}); now != last; now = c() { // until no more packets arrive
						last = now
						time.Sleep(100 * time.Millisecond)
					}
					gotBytes := now.PassedBytes - before[d].PassedBytes
					gotPackets := now.PassedPackets - before[d].PassedPackets
					if !within(gotBytes, bytes) || !within(gotPackets, packets) {
						t.Errorf("%s, %v: counted %d packets and %d bytes, where the socket has sent %d and %d", transport, d, gotPackets, gotBytes, packets, bytes)
					}
					skbs := now.SKBs() - before[d].SKBs()
					if merged := skbs < gotPackets/2; merged != offload {
						t.Errorf("%s, %v: %d packets in %d skbs", transport, d, gotPackets, skbs)
					}
				}
			}
			var listener net.Listener
			in(receiver, func() (err error) {
				listener, err = net.Listen("tcp4", "198.51.100.2:5001")
				return err
			})
			defer listener.Close()
			go func() {
				if c, err := listener.Accept(); err == nil {
					io.Copy(io.Discard, c)
					c.Close()
				}
			}()
			check("TCP", func() (packets, bytes uint64, err error) {
				err = sender.Do(func() error {
					c, err := net.Dial("tcp4", "198.51.100.2:5001")
					if err != nil {
						return err
					}
					defer c.Close()
					if _, err := c.Write(make([]byte, 8<<20)); err != nil {
						return err
					}
					// All data has arrived when the peer has closed, too.
					c.(*net.TCPConn).CloseWrite()
					io.Copy(io.Discard, c)
					raw, err := c.(*net.TCPConn).SyscallConn()
					if err != nil {
						return err
					}
					return raw.Control(func(fd uintptr) {
						info, _ := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
						packets, bytes = uint64(info.Segs_out), info.Bytes_sent+uint64(info.Segs_out)*uint64(k.header+20+20+12)
					})
				})
				return packets, bytes, err
			})
			var sink net.PacketConn
			in(receiver, func() (err error) {
				sink, err = net.ListenPacket("udp4", "198.51.100.2:9")
				return err
			})
			defer sink.Close()
			check("UDP", func() (packets, bytes uint64, err error) {
				const size, segments, count = 100, 60, 500
				err = sender.Do(func() error {
					to, err := net.ResolveUDPAddr("udp4", "198.51.100.2:9")
					if err != nil {
						return err
					}
					c, err := net.DialUDP("udp4", nil, to)
					if err != nil {
						return err
					}
					defer c.Close()
					raw, err := c.SyscallConn()
					if err != nil {
						return err
					}
					raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) })
					for range count {
						if err == nil {
							_, err = c.Write(make([]byte, size*segments))
						}
					}
					return err
				})
				return count * segments, count * segments * uint64(k.header+20+8+size), err
			})
		})
	}
}

// within reports whether two numbers differ by less than a thousandth.
func within(got, want uint64) bool { return got+want/1000 >= want && got <= want+want/1000 }

// setOffload turns segmentation offload on or off: without it, packets are as on the wire.
func setOffload(on bool, devices ...string) error {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return err
	}
	defer e.Close()
	for _, device := range devices {
		features, err := e.Features(device)
		if err != nil {
			return err
		}
		change := map[string]bool{}
		for _, name := range []string{"tx-tcp-segmentation", "tx-tcp6-segmentation", "tx-tcp-ecn-segmentation", "tx-generic-segmentation",
			"tx-udp-segmentation", "tx-udp_tnl-segmentation", "tx-udp_tnl-csum-segmentation"} {
			if is, known := features[name]; known && is != on {
				change[name] = on
			}
		}
		if err := e.Change(device, change); err != nil {
			return fmt.Errorf("change features of %s: %w", device, err)
		}
	}
	return nil
}
