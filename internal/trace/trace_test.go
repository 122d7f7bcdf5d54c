package trace

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// all reads a trace to its end or to an error.
func all(data []byte) (packets []Packet, err error) {
	r, err := Open(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	for {
		var p Packet
		if err := r.Next(&p); err != nil {
			if err == io.EOF {
				err = nil
			}
			return packets, err
		}
		p.Network = slices.Clone(p.Network)
		packets = append(packets, p)
	}
}

func zipped(t *testing.T, data []byte) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestCSV(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want string // times and sizes
	}{
		"plain":                 {"18446744073709551614,1\n18446744073709551615,16777215\n", "18446744073709551614,1 18446744073709551615,16777215"},
		"header":                {"time_ns,bytes\n5,100\n", "5,100"},
		"other order and more":  {"verdict,bytes,time_ns\npass,100,5\n", "5,100"},
		"comments, empty lines": {"# a trace\n\ntime_ns,bytes\n# half of it\n5,100\n\n7,200", "5,100 7,200"},
		"spaces, CRLF, BOM":     {"\xef\xbb\xbftime_ns, bytes\r\n 5, 100\r\n", "5,100"},
		"back in time":          {"7,1\n5,1\n", "7,1 5,1"},
		"no packets":            {"time_ns,bytes\n", ""},
		"comments only":         {"# nothing\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			for _, data := range [][]byte{[]byte(c.text), zipped(t, []byte(c.text))} {
				packets, err := all(data)
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, p := range packets {
					got = append(got, fmt.Sprintf("%d,%d", p.Time, p.Bytes))
				}
				if s := strings.Join(got, " "); s != c.want {
					t.Errorf("%s, want %s", s, c.want)
				}
			}
		})
	}
}

// A column dscp has names or numbers. Packets stay ECN-capable.
func TestCSVWithDSCPs(t *testing.T) {
	r, err := Open(strings.NewReader("dscp,time_ns,bytes\nAF12,0,1\n63,0,1\n0,0,1\nef,0,1\n"))
	if err != nil || !r.HasDSCPs {
		t.Fatalf("%v, %+v", err, r)
	}
	var p Packet
	for _, dscp := range []byte{12, 63, 0, 46} {
		if err := r.Next(&p); err != nil || p.Network[1] != dscp<<2|2 {
			t.Errorf("DSCP %d: %v, %x", dscp, err, p.Network)
		}
	}
	if r, err := Open(strings.NewReader("time_ns,bytes\n0,1\n")); err != nil || r.HasDSCPs {
		t.Errorf("without the column: %v, %+v", err, r)
	}
}

func TestBadTraces(t *testing.T) {
	valid := pcap(t, layers.LinkTypeEthernet, packet{1, ethernet(8), 22})
	for name, c := range map[string]struct{ data, says string }{
		"empty":                  {"", "it is empty"},
		"negative time":          {"0,1\n-1,1\n", `line 2: time_ns "-1" is not a whole number`},
		"time too large":         {"18446744073709551616,1\n", `line 1: time_ns "18446744073709551616" is out of range`},
		"fraction":               {"0,1\n\n# x\n1.5,1\n", `line 4: time_ns "1.5" is not a whole number`},
		"no bytes":               {"0,0\n", "line 1: a packet of 0 bytes"},
		"negative bytes":         {"0,-4\n", `line 1: bytes "-4"`},
		"too many bytes":         {"time_ns,bytes\n0,16777216\n", "line 2: a packet of 16777216 bytes"},
		"bytes out of range":     {"0,99999999999999999999\n", "out of range"},
		"one column":             {"0\n", "line 1: 1 columns instead of 2"},
		"three columns":          {"0,1\n0,1,2\n", "line 2: 3 columns"},
		"a header in the middle": {"0,1\ntime_ns,bytes\n", "line 2: time_ns"},
		"another header":         {"time,size\n0,1\n", "line 1: the columns are"},
		"a DSCP of 7 bits":       {"time_ns,bytes,dscp\n0,1,0\n0,1,64\n", `line 3: dscp "64" is unknown`},
		"no DSCP":                {"time_ns,bytes,dscp\n0,1,\n", `line 2: dscp "" is unknown`},
		"a quote":                {"0,1\n0,\"1\n", "line 2: "},
		"prose":                  {"Hello, world\n", "line 1: the columns are"},
		"binary":                 {"\x7fELF\x02\x01", "begins with 7f 45 4c 46"},
		"one byte":               {"\x00", "begins with 00"},
		"snoop":                  {"snoop\x00\x00\x00\x00\x00\x00\x02", "editcap"},
		"zstd":                   {"\x28\xb5\x2f\xfd\x00", "zstd -dc"},
		"a line without end":     {"0,1\n0," + strings.Repeat("1", 1<<20), "longer than"},
		"gzip of nothing":        {string(zipped(t, nil)), "it is empty"},
		"gzip cut off":           {"\x1f\x8b\x08", "begins like a gzip"},
		"gzip in gzip":           {string(zipped(t, zipped(t, []byte("0,1\n")))), "begins with 1f 8b"},
		"pcap cut off":           {string(valid[:20]), "ends within its header"},
		"pcap of version 3":      {string(patch(valid, 4, 3)), "begins like a pcap"},
		"first packet cut off":   {string(valid[:24+16+10]), "ends within packet 1"},
		"packet without data":    {string(valid[:24+16]), "ends within packet 1"},
		"packet header cut off":  {string(valid[:24+7]), "ends within packet 1"},
		"a giant":                {string(patch(valid, 24+15, 1)), "the maximum is"},
		"unsupported link":       {string(patch(valid, 20, 127)), "link type 127 (see pcap-linktype(7))"},
		"pcapng":                 {"\x0a\x0d\x0d\x0a\x1c\x00\x00\x00", "editcap -F pcap"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := all([]byte(c.data))
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
}

func patch(data []byte, at int, b byte) []byte {
	data = slices.Clone(data)
	data[at] = b
	return data
}

// A packet of a capture, with its captured bytes and its length on the wire.
type packet struct {
	ns   int64
	data []byte
	wire int
}

func pcap(t *testing.T, link layers.LinkType, packets ...packet) []byte {
	t.Helper()
	var b bytes.Buffer
	w := pcapgo.NewWriterNanos(&b)
	if err := w.WriteFileHeader(65536, link); err != nil {
		t.Fatal(err)
	}
	for _, p := range packets {
		if err := w.WritePacket(p.info(0), p.data); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func (p packet) info(device int) gopacket.CaptureInfo {
	return gopacket.CaptureInfo{Timestamp: time.Unix(0, p.ns), CaptureLength: len(p.data), Length: p.wire, InterfaceIndex: device}
}

// ethernet is an IPv4 frame with n bytes after the Ethernet header.
func ethernet(n int) []byte {
	return append([]byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0}, bytes.Repeat([]byte{0x45}, n)...)
}

// The length, EtherType and network header of a packet, by link type.
func TestLinks(t *testing.T) {
	ip4, ip6 := []byte{0x45, 0, 0, 4}, []byte{0x60, 0, 0, 6}
	sll := func(device, kind uint16) []byte {
		b := make([]byte, 16)
		binary.BigEndian.PutUint16(b[2:], device)
		binary.BigEndian.PutUint16(b[4:], 6)
		binary.BigEndian.PutUint16(b[14:], kind)
		return b
	}
	sll2 := func(device, kind uint16) []byte {
		b := make([]byte, 20)
		binary.BigEndian.PutUint16(b, kind)
		binary.BigEndian.PutUint16(b[8:], device)
		b[11] = 6
		return b
	}
	join := func(parts ...[]byte) []byte { return slices.Concat(parts...) }
	for name, c := range map[string]struct {
		link  layers.LinkType
		data  []byte
		wire  int
		bytes uint64
		kind  uint16
		rest  []byte
		l2    uint8
	}{
		"Ethernet":           {1, join(ethernet(0), ip4), 1514, 1514, 0x0800, ip4, 14},
		"Ethernet, short":    {1, ethernet(0)[:13], 13, 13, 0, nil, 14},
		"raw IPv4":           {101, ip4, 1500, 1500, 0x0800, ip4, 0},
		"raw IPv6":           {101, ip6, 1500, 1500, 0x86dd, ip6, 0},
		"raw IPv6 of BSD":    {12, ip6, 1500, 1500, 0x86dd, ip6, 0},
		"raw, nothing":       {101, nil, 20, 20, 0, nil, 0},
		"IPv4":               {228, ip4, 1500, 1500, 0x0800, ip4, 0},
		"IPv6":               {229, ip6, 1500, 1500, 0x86dd, ip6, 0},
		"cooked":             {113, join(sll(1, 0x0800), ip4), 116, 114, 0x0800, ip4, 14},
		"cooked, loopback":   {113, join(sll(772, 0x86dd), ip6), 116, 114, 0x86dd, ip6, 14},
		"cooked, tagged":     {113, join(sll(1, 0x8100), []byte{0, 1, 8, 0}, ip4), 120, 118, 0x8100, join([]byte{0, 1, 8, 0}, ip4), 14},
		"cooked, a tunnel":   {113, join(sll(0xfffe, 0x0800), ip4), 116, 100, 0x0800, ip4, 0},
		"cooked, cut off":    {113, sll(1, 0x0800)[:15], 116, 116, 0, nil, 14},
		"cooked 2":           {276, join(sll2(1, 0x0800), ip4), 120, 114, 0x0800, ip4, 14},
		"cooked 2, a tunnel": {276, join(sll2(65534, 0x86dd), ip6), 120, 100, 0x86dd, ip6, 0},
		"BSD loopback":       {0, join([]byte{2, 0, 0, 0}, ip4), 104, 100, 0x0800, ip4, 0},
		"BSD loopback, IPv6": {0, join([]byte{30, 0, 0, 0}, ip6), 104, 100, 0x86dd, ip6, 0},
		"OpenBSD loopback":   {108, join([]byte{0, 0, 0, 24}, ip6), 104, 100, 0x86dd, ip6, 0},
		"loopback, ISO":      {0, join([]byte{7, 0, 0, 0}, ip4), 104, 100, 0, ip4, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := Open(bytes.NewReader(pcap(t, c.link, packet{7, c.data, c.wire})))
			if err != nil {
				t.Fatal(err)
			}
			var p Packet
			if err := r.Next(&p); err != nil {
				t.Fatal(err)
			}
			if p.Time != 7 || p.Bytes != c.bytes || p.EtherType != c.kind || !bytes.Equal(p.Network, c.rest) || r.L2Bytes != c.l2 {
				t.Errorf("%+v on a link of %d bytes", p, r.L2Bytes)
			}
			if !r.Addressed {
				t.Error("not addressed")
			}
			if err := r.Next(&p); err != io.EOF {
				t.Errorf("%v, want the end", err)
			}
		})
	}
}

// If a record is longer than its packet claims to be, the record's length counts, and the next packet is
// read, whatever the snap length is.
func TestRecordsLongerThanTheirPackets(t *testing.T) {
	packets := []packet{{1, ethernet(20), 34}, {2, ethernet(40), 54}, {3, ethernet(60), 1514}}
	old := pcap(t, layers.LinkTypeEthernet, packets...)
	binary.LittleEndian.PutUint32(old[16:], 30)                   // the snap length
	lengths := bytes.Index(old, []byte{54, 0, 0, 0, 54, 0, 0, 0}) // of the record, of the packet
	read, err := all(patch(old, lengths+4, 10))
	if err != nil {
		t.Fatal(err)
	}
	var got []uint64
	for _, p := range read {
		got = append(got, p.Bytes)
	}
	if want := []uint64{34, 54, 1514}; !slices.Equal(got, want) {
		t.Errorf("packets of %d bytes, want %d", got, want)
	}
}

// Of a long packet, only the first bytes are kept.
func TestLongPackets(t *testing.T) {
	packets, err := all(pcap(t, layers.LinkTypeEthernet, packet{1, ethernet(60000), 65000}))
	if err != nil || len(packets) != 1 || packets[0].Bytes != 65000 || len(packets[0].Network) != MaxHeaders {
		t.Errorf("%d packets, %v", len(packets), err)
	}
}

// The packets before the end of a truncated capture are valid.
func TestCutOff(t *testing.T) {
	whole := pcap(t, layers.LinkTypeEthernet, packet{1, ethernet(8), 22}, packet{2, ethernet(8), 22}, packet{3, ethernet(8), 22})
	record := (len(whole) - 24) / 3
	for cut := 1; cut < record; cut++ {
		for _, data := range [][]byte{whole[:len(whole)-cut], zipped(t, whole[:len(whole)-cut])} {
			packets, err := all(data)
			if len(packets) != 2 || !errors.As(err, new(DamagedError)) || !strings.Contains(err.Error(), "within packet 3") {
				t.Errorf("without the last %d bytes: %d packets, %v", cut, len(packets), err)
			}
		}
	}
	packed := zipped(t, bytes.Repeat([]byte("123456,789\n"), 100000))
	packets, err := all(packed[:len(packed)/2])
	if len(packets) == 0 || !errors.As(err, new(DamagedError)) {
		t.Errorf("half a gzip: %d packets, %v", len(packets), err)
	}
}

// Times are exact to the nanosecond in every unit.
func TestTimes(t *testing.T) {
	micro := func() []byte {
		var b bytes.Buffer
		w := pcapgo.NewWriter(&b)
		w.WriteFileHeader(65536, layers.LinkTypeEthernet)
		w.WritePacket(packet{1_700_000_000_123_456_000, ethernet(8), 22}.info(0), ethernet(8))
		return b.Bytes()
	}
	for name, c := range map[string]struct {
		data []byte
		want uint64
	}{
		"pcap, microseconds": {micro(), 1_700_000_000_123_456_000},
		"pcap, nanoseconds":  {pcap(t, 1, packet{1_700_000_000_123_456_789, ethernet(8), 22}), 1_700_000_000_123_456_789},
	} {
		packets, err := all(c.data)
		if err != nil || len(packets) != 1 || packets[0].Time != c.want {
			t.Errorf("%s: %+v, %v, want %d", name, packets, err, c.want)
		}
	}
}

// Times that the data path could not tell apart end a trace.
func TestSpan(t *testing.T) {
	const year, second = 365 * 24 * uint64(time.Hour), uint64(time.Second)
	for _, c := range []struct {
		first, second, third uint64
		says                 string
	}{
		{0, 9 * year, 17 * year, ""},
		{0, 9 * year, 19 * year, "more than 18 years apart"},
		{5 * second, 8 * second, 7 * second, ""},
		{5 * second, 8 * second, 4 * second, "steps back by 4s; sort"},
	} {
		packets, err := all(fmt.Appendf(nil, "%d,1\n%d,1\n%d,1\n", c.first, c.second, c.third))
		if c.says == "" && (err != nil || len(packets) != 3) || c.says != "" && (!errors.As(err, new(DamagedError)) || !strings.Contains(err.Error(), c.says) || len(packets) != 2) {
			t.Errorf("%d, %d, %d: %d packets, %v; want %q", c.first, c.second, c.third, len(packets), err, c.says)
		}
	}
}

// The reader accepts any input: it returns packets within the limits, or an error.
func FuzzOpen(f *testing.F) {
	f.Add([]byte("time_ns,bytes\n0,1\n"))
	f.Add([]byte("\xd4\xc3\xb2\xa1\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x01\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		packets, err := all(data)
		for _, p := range packets {
			if p.Bytes > MaxBytes || len(p.Network) > MaxHeaders {
				t.Errorf("%+v", p)
			}
		}
		_ = err
	})
}
