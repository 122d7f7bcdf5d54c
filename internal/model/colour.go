package model

import "github.com/shapectl/shapectl/pkg/policy"

// Coloured decides the colours of a rule's packets by one of three meters: srtcm (RFC 2697), trtcm (RFC 2698) or rfc4115 (RFC
// 4115). Unlike other limits, a packet larger than a burst size never conforms to it.
//
// Both buckets are TATs. First is that of C, on the clock of the CIR. Second is that of P (trtcm) or E (rfc4115), on the clock
// of its own rate. With srtcm it has the debts of C and E together, on the clock of the CIR: whichever of them gets a token,
// their sum falls at the CIR. So E gets what C has no room for, and no word has to count that.
type Coloured struct {
	Kind          policy.Algorithm
	Aware         bool  // the colours of arriving packets count; else all arrive green
	First, Second Meter // CIR and CBS; the other rate and burst size: with srtcm CIR, and CBS and EBS together
}

// NewColoured returns the meter of a valid rule with colours.
func NewColoured(r policy.Rule) *Coloured {
	second, _ := r.Second()
	return &Coloured{Kind: r.Algorithm, Aware: r.Colours.Aware, First: NewLimit(r).Meter, Second: NewLimit(second).Meter}
}

// Levels are the levels of both buckets at a time, in units.
type Levels struct {
	First  uint64 // of C
	Second uint64 // of P (trtcm) or E (rfc4115); with srtcm of C and E together
}

// Levels returns the levels at now (ns). At an earlier time, as CPUs' clocks differ, they are higher.
func (l *Coloured) Levels(p Pair, now uint64) Levels {
	return Levels{First: l.First.Level(p.First, now), Second: l.Second.Level(p.Second, now)}
}

// E returns the level of the second bucket in units: of E, or with trtcm of P.
func (l *Coloured) E(s Levels) uint64 {
	if l.Kind == policy.SRTCM {
		return s.Second - min(s.First, l.First.Capacity, s.Second)
	}
	return s.Second
}

// Burst returns the size of the second bucket in units: EBS, or with trtcm PBS.
func (l *Coloured) Burst() uint64 {
	if l.Kind == policy.SRTCM {
		return l.Second.Capacity - l.First.Capacity
	}
	return l.Second.Capacity
}

// Decide returns the colour of a packet (bytes below 2^PacketBits) that arrives with a colour at these levels, and the levels
// after it.
func (l *Coloured) Decide(s Levels, bytes uint64, in policy.Colour) (policy.Colour, Levels) {
	if !l.Aware {
		in = policy.Green
	}
	if l.Kind == policy.SRTCM { // by marks or a penalty before an edit
		s.Second = max(s.First, s.Second)
	}
	cost := bytes << UnitBits
	first, second := s.First+cost <= l.First.Capacity, l.E(s)+cost <= l.Burst()
	switch {
	case in == policy.Green && first && (second || l.Kind != policy.TRTCM):
		s.First += cost
		if l.Kind != policy.RFC4115 {
			s.Second += cost
		}
		return policy.Green, s
	case in != policy.Red && second:
		s.Second += cost
		return policy.Yellow, s
	}
	return policy.Red, s
}

// A Pair is the state of both buckets. The zero Pair was never charged.
type Pair struct{ First, Second Bucket }

// Offer decides the colour of a packet at now (ns), and charges the buckets.
func (l *Coloured) Offer(p *Pair, now, bytes uint64, in policy.Colour) policy.Colour {
	colour, after := l.Decide(l.Levels(*p, now), bytes, in)
	if colour == policy.Green {
		l.First.Raise(&p.First, after.First, now)
	}
	if colour == policy.Yellow || colour == policy.Green && l.Kind != policy.RFC4115 {
		l.Second.Raise(&p.Second, after.Second, now)
	}
	return colour
}
