package policy

import (
	"fmt"
	"strconv"
	"strings"
)

const (
	// MinOverhead and MaxOverhead bound Framing.Overhead, as in tc-cake.
	MinOverhead = -64
	MaxOverhead = 256
	// MaxMPU bounds Framing.MPU, as in tc-cake.
	MaxMPU = 256
)

// Framing is what a link adds to each packet. A packet counts its length plus Overhead
// bytes, and at least MPU bytes.
type Framing struct {
	Overhead int16  // bytes, MinOverhead to MaxOverhead
	MPU      uint16 // bytes, 0 to MaxMPU
}

// framings holds the keywords of tc-cake that add a constant overhead. The values with
// fromIP include the link's header. Those for PTM do not include the 64b/65b code, which
// tc-cake(8) recommends to take off the rate.
var framings = map[string]struct {
	Framing
	fromIP bool
}{
	"raw":         {Framing{}, false},
	"ether-vlan":  {Framing{4, 0}, false},
	"ethernet":    {Framing{38, 84}, true},
	"docsis":      {Framing{18, 64}, true},
	"pppoe-ptm":   {Framing{30, 0}, true},
	"bridged-ptm": {Framing{22, 0}, true},
}

// cellFramings holds the keywords of tc-cake whose cost depends on the packet's length.
var cellFramings = map[string]string{
	"atm": "ATM cells", "conservative": "ATM cells",
	"ipoa-vcmux": "ATM cells", "ipoa-llcsnap": "ATM cells",
	"bridged-vcmux": "ATM cells", "bridged-llcsnap": "ATM cells",
	"pppoa-vcmux": "ATM cells", "pppoa-llc": "ATM cells",
	"pppoe-vcmux": "ATM cells", "pppoe-llcsnap": "ATM cells",
	"ptm": "the 64b/65b code of PTM",
}

// ParseFraming parses the bytes of overhead (38), overhead and MPU (38/84), or keywords of
// tc-cake with commas between them (pppoe-ptm,ether-vlan), whose overheads are added. A
// number is added to the layer 2 frame, as in tc. A keyword is added to the IP packet, as
// in tc-cake, so ParseFraming subtracts the l2Bytes (14 or 0) that each frame of the device
// counts anyway. With pppoe-ptm and bridged-ptm, set the rate to 64/65 of the line's, for
// the line code.
func ParseFraming(s string, l2Bytes uint8) (Framing, error) {
	overhead, mpu, numeric := framingNumbers(s)
	if !numeric {
		fromIP := false
		for word := range strings.SplitSeq(s, ",") {
			f, ok := framings[word]
			if cost, cells := cellFramings[word]; cells {
				return Framing{}, fmt.Errorf("overhead %q counts %s, which is not supported; write the bytes per packet and lower the rate instead", word, cost)
			}
			if !ok {
				return Framing{}, fmt.Errorf("overhead %.64q is unknown; use a number of bytes such as 38 or 38/84, or ethernet, docsis, pppoe-ptm, bridged-ptm, ether-vlan or raw", s)
			}
			overhead += int(f.Overhead)
			mpu = max(mpu, int(f.MPU))
			fromIP = fromIP || f.fromIP
		}
		if fromIP {
			overhead -= int(l2Bytes)
		}
	}
	if err := checkFraming(overhead, mpu); err != nil {
		return Framing{}, err
	}
	return Framing{int16(overhead), uint16(mpu)}, nil
}

func framingNumbers(s string) (overhead, mpu int, ok bool) {
	first, second, both := strings.Cut(s, "/")
	overhead, err := strconv.Atoi(first)
	if err == nil && both {
		mpu, err = strconv.Atoi(second)
	}
	if err != nil {
		return 0, 0, false
	}
	return overhead, mpu, true
}

func checkFraming(overhead, mpu int) error {
	if overhead < MinOverhead || overhead > MaxOverhead {
		return fmt.Errorf("overhead of %d bytes is out of range; use %d to %d", overhead, MinOverhead, MaxOverhead)
	}
	if mpu < 0 || mpu > MaxMPU {
		return fmt.Errorf("mpu of %d bytes is out of range; use 0 to %d", mpu, MaxMPU)
	}
	return nil
}

// Overhead is what a link adds to each packet, as ParseFraming parses it; "" for nothing.
type Overhead string

func (o *Overhead) Set(s string) error {
	_, err := ParseFraming(s, 0)
	if err == nil {
		*o = Overhead(s)
	}
	return err
}

func (o Overhead) String() string { return string(o) }

func (o Overhead) Type() string { return "bytes" }

// MPU is the fewest bytes that a packet counts.
type MPU uint16

// Set parses a whole number of bytes up to MaxMPU.
func (m *MPU) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return fmt.Errorf("mpu %.64q is not a whole number of bytes; write one of 0 to %d", s, MaxMPU)
	}
	if n > MaxMPU {
		return fmt.Errorf("mpu of %d bytes is out of range; use 0 to %d", n, MaxMPU)
	}
	*m = MPU(n)
	return nil
}

func (m MPU) String() string { return strconv.Itoa(int(m)) }

func (m MPU) Type() string { return "bytes" }

func resolveOverhead(l *Limit, r *Rule, l2Bytes uint8) (err error) {
	if l.Overhead != "" {
		r.Framing, err = ParseFraming(string(l.Overhead), l2Bytes)
	}
	return err
}

// resolveMPU keeps the MPU of a keyword if the limit has none.
func resolveMPU(l *Limit, r *Rule, _ uint8) error {
	if l.MPU != 0 {
		r.Framing.MPU = uint16(l.MPU)
	}
	return nil
}
