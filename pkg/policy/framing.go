package policy

import (
	"fmt"
	"maps"
	"slices"
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
	FromIP   bool   // Overhead includes the link header that frames of a device have: see Rule.On
}

// On returns the rule on a device whose frames have l2Bytes of link header (14 or 0). They count anyway, so an overhead
// that includes them is less by so much.
func (r Rule) On(l2Bytes uint8) Rule {
	for _, f := range []*Framing{&r.Framing, &r.Shadow.Framing} {
		if f.FromIP {
			f.Overhead, f.FromIP = f.Overhead-int16(l2Bytes), false
		}
	}
	return r
}

// framings holds the keywords of tc-cake that add a constant overhead. The values with
// FromIP include the link's header. Those for PTM do not include the 64b/65b code, which
// tc-cake(8) recommends to take off the rate.
var framings = map[string]Framing{
	"raw":         {},
	"ether-vlan":  {Overhead: 4},
	"ethernet":    {38, 84, true},
	"docsis":      {18, 64, true},
	"pppoe-ptm":   {30, 0, true},
	"bridged-ptm": {22, 0, true},
}

// FramingNames are the keywords that ParseFraming takes.
var FramingNames = slices.Sorted(maps.Keys(framings))

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
// in tc-cake. With pppoe-ptm and bridged-ptm, set the rate to 64/65 of the line's, for
// the line code.
func ParseFraming(s string) (Framing, error) {
	overhead, mpu, numeric := framingNumbers(s)
	fromIP := false
	if !numeric {
		for word := range strings.SplitSeq(s, ",") {
			f, ok := framings[word]
			if cost, cells := cellFramings[word]; cells {
				return Framing{}, fmt.Errorf("overhead %q counts %s, which is not supported; write the bytes per packet and lower the rate instead", word, cost)
			}
			if s == "cable" {
				return Framing{}, fmt.Errorf("overhead %q is unknown; did you mean docsis?", s)
			}
			if !ok {
				return Framing{}, fmt.Errorf("overhead %.64q is unknown; use a number of bytes such as 38 or 38/84, or one of %s", s, strings.Join(FramingNames, ", "))
			}
			overhead += int(f.Overhead)
			mpu = max(mpu, int(f.MPU))
			fromIP = fromIP || f.FromIP
		}
	}
	if err := checkFraming(overhead, mpu); err != nil {
		return Framing{}, err
	}
	return Framing{int16(overhead), uint16(mpu), fromIP}, nil
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
	_, err := ParseFraming(s)
	if err == nil {
		*o = Overhead(s)
	}
	return err
}

func (o Overhead) String() string { return string(o) }

func (o Overhead) Type() string { return "bytes" }

func resolveOverhead(l *Limit, r *Rule) (err error) {
	if l.Overhead != "" {
		r.Framing, err = ParseFraming(string(l.Overhead))
	}
	return err
}

// resolveMPU keeps the MPU of a keyword if the limit has none.
func resolveMPU(l *Limit, r *Rule) error {
	if l.MPU != 0 {
		r.Framing.MPU = l.MPU
	}
	return nil
}
