package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Direction is the direction of a packet as the device sees it.
type Direction uint8

const (
	Ingress Direction = iota // enters the device
	Egress                   // leaves the device
)

// Match is the address of a packet that a rule's prefix is compared with.
type Match uint8

const (
	MatchDst Match = iota // destination
	MatchSrc              // source
)

// Algorithm is the meter of a rule.
type Algorithm uint8

const (
	GCRA    Algorithm = iota // one theoretical arrival time per bucket
	Leaky                    // the leaky bucket, which also has penalties
	SRTCM                    // single rate three color marker (RFC 2697)
	TRTCM                    // two rate three color marker (RFC 2698)
	RFC4115                  // two independent rates, three colours (RFC 4115)
)

// Excess is what happens to excess packets.
type Excess uint8

const (
	Drop  Excess = iota // dropped
	ECN                 // marked CE if the packet allows it, dropped otherwise
	Pass                // counted and passed unchanged, to try a rule out
	Delay               // queued, and dropped if the queue is full
)

// Order is the order of a queue.
type Order uint8

const (
	FIFO        Order = iota // as packets come
	SparseFirst              // flows that send little and have no queued packet go first
)

// Fail is the verdict when a bucket cannot be updated because of contention.
type Fail uint8

const (
	Open   Fail = iota // the packet passes
	Closed             // the packet is dropped
)

var (
	directionNames = []string{"ingress", "egress"}
	matchNames     = []string{"dst", "src"}
	algorithmNames = []string{"gcra", "leaky", "srtcm", "trtcm", "rfc4115"}
	excessNames    = []string{"drop", "ecn", "pass", "delay"}
	orderNames     = []string{"fifo", "sparse-first"}
	failNames      = []string{"open", "closed"}
)

// ParseDirection parses "ingress" or "egress".
func ParseDirection(s string) (d Direction, err error) {
	err = d.Set(s)
	return d, err
}

// FarSide returns which address of a packet lies beyond the device: the destination on
// egress, the source on ingress.
func (d Direction) FarSide() Match {
	if d == Egress {
		return MatchDst
	}
	return MatchSrc
}

func (d Direction) String() string { return nameOf(d, directionNames) }
func (m Match) String() string     { return nameOf(m, matchNames) }
func (a Algorithm) String() string { return nameOf(a, algorithmNames) }
func (e Excess) String() string    { return nameOf(e, excessNames) }
func (o Order) String() string     { return nameOf(o, orderNames) }
func (f Fail) String() string      { return nameOf(f, failNames) }

// Set parses one of the names.
func (d *Direction) Set(s string) error { return setName(d, "direction", s, directionNames) }
func (m *Match) Set(s string) error     { return setName(m, "match", s, matchNames) }
func (e *Excess) Set(s string) error    { return setName(e, "excess", s, excessNames) }
func (o *Order) Set(s string) error     { return setName(o, "order", s, orderNames) }
func (f *Fail) Set(s string) error      { return setName(f, "fail", s, failNames) }

// Set parses one of the names in any case, as RFCs write srTCM, or the number of its RFC.
func (a *Algorithm) Set(s string) error {
	switch s = strings.ToLower(s); s {
	case "rfc2697":
		s = SRTCM.String()
	case "rfc2698":
		s = TRTCM.String()
	}
	return setName(a, "algorithm", s, algorithmNames)
}

// Type lists the names.
func (d Direction) Type() string { return strings.Join(directionNames, "|") }
func (m Match) Type() string     { return strings.Join(matchNames, "|") }
func (a Algorithm) Type() string { return strings.Join(algorithmNames, "|") }
func (e Excess) Type() string    { return strings.Join(excessNames, "|") }
func (o Order) Type() string     { return strings.Join(orderNames, "|") }
func (f Fail) Type() string      { return strings.Join(failNames, "|") }

func nameOf[T ~uint8](v T, names []string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("unknown(%d)", uint8(v))
}

func setName[T ~uint8](v *T, what, s string, names []string) error {
	i := slices.Index(names, s)
	if i < 0 {
		return fmt.Errorf("%s %.64q is unknown; use %s", what, s, oneOf(names))
	}
	*v = T(i)
	return nil
}

func checkName[T ~uint8](v T, what string, names []string) error {
	if int(v) >= len(names) {
		return fmt.Errorf("%s has the unknown value %d; use %s", what, uint8(v), oneOf(names))
	}
	return nil
}

// oneOf lists names in a sentence: "drop, ecn or pass".
func oneOf(names []string) string {
	last := len(names) - 1
	if last == 0 {
		return names[0]
	}
	return strings.Join(names[:last], ", ") + " or " + names[last]
}
