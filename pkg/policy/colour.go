package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Colours is what a rule has beside its rate and capacity if its algorithm gives packets colours. The rate is the CIR and the
// capacity the CBS. For other algorithms and unlimited rules it is zero.
type Colours struct {
	PIR   Rate      // with TRTCM: the peak information rate, at least the CIR; else 0
	PBS   uint64    // with TRTCM: the peak burst size in bytes, MinCapacity to MaxCapacity; else 0
	EIR   Rate      // with RFC4115: the excess information rate; else 0
	EBS   uint64    // with SRTCM and RFC4115: the excess burst size in bytes, 0 or MinCapacity to MaxCapacity; else 0
	Aware bool      // packets come in with the colour of their DSCP; else all come in green
	In    ColourMap // with Aware: these colours; else zero

	Green, Yellow, Red Action
}

// ColourOptions is Colours as people write them.
type ColourOptions struct {
	PIR   Rate     // 0 for none
	PBS   Capacity // zero for the default, which depends on PIR
	EIR   Rate     // 0 for none
	EBS   Capacity // zero for the default, which depends on EIR, or on the rate
	Aware Switch
	In    ColourMap // zero for the default

	Green, Yellow, Red Action // 0 for the default
}

// HasColours reports whether the algorithm gives packets colours.
func (a Algorithm) HasColours() bool { return a == SRTCM || a == TRTCM || a == RFC4115 }

func (a Algorithm) hasEBS() bool { return a == SRTCM || a == RFC4115 }

// resolveAlgorithm leaves out an algorithm with colours where there is no rate, such as in an exception from the defaults.
func resolveAlgorithm(l *Limit, r *Rule) error {
	if r.Algorithm = l.Algorithm; r.Rate == Unlimited && r.Algorithm.HasColours() {
		r.Algorithm = GCRA
	}
	return nil
}

// Second returns the limit that r has beside CIR and CBS: with TRTCM that of PIR and PBS, with RFC4115 that of EIR and EBS.
// With SRTCM it is the limit of what CBS and EBS hold together, at the CIR. It is false for rules without colours.
func (r Rule) Second() (second Rule, ok bool) {
	if !r.Algorithm.HasColours() {
		return Rule{}, false
	}
	second = Rule{
		Prefix: r.Prefix, Rate: cmp.Or(r.Colours.PIR, r.Colours.EIR, r.Rate), Capacity: r.Colours.Burst(),
		Each: r.Each, NAT: r.NAT, Colours: r.Colours,
	}
	// Only rules without a second limit have no colours at all.
	second.Colours.Green, second.Colours.Yellow, second.Colours.Red = ActionPass, ActionPass, ActionPass
	if r.Algorithm == SRTCM {
		second.Capacity += r.Capacity
	}
	return second, true
}

// Action is what happens to packets of a colour.
func (c *Colours) Action(of Colour) Action { return [...]Action{c.Green, c.Yellow, c.Red}[of] }

// Burst is the size of the second bucket in bytes: PBS or EBS.
func (c *Colours) Burst() uint64 { return cmp.Or(c.PBS, c.EBS) }

// Colour is a colour of a packet.
type Colour uint8

const (
	Green  Colour = iota // within the CIR
	Yellow               // beyond it, but within what the second limit allows
	Red                  // beyond both
)

var colourNames = []string{"green", "yellow", "red"}

func (c Colour) String() string { return nameOf(c, colourNames) }

// Set parses one of the names.
func (c *Colour) Set(s string) error { return setName(c, "colour", s, colourNames) }

// dscpNames are those of the IANA registry of DSCPs.
var dscpNames = [64]string{
	0: "CS0", 8: "CS1", 16: "CS2", 24: "CS3", 32: "CS4", 40: "CS5", 48: "CS6", 56: "CS7",
	10: "AF11", 12: "AF12", 14: "AF13", 18: "AF21", 20: "AF22", 22: "AF23",
	26: "AF31", 28: "AF32", 30: "AF33", 34: "AF41", 36: "AF42", 38: "AF43",
	1: "LE", 44: "VA", 46: "EF",
}

// ParseDSCP parses the name of a DSCP in any case, such as AF12, or its number, 0 to 63.
func ParseDSCP(s string) (uint8, error) {
	name := strings.ToUpper(s)
	if name == "DF" || name == "BE" {
		name = dscpNames[0]
	}
	if i := slices.Index(dscpNames[:], name); i >= 0 && name != "" {
		return uint8(i), nil
	}
	n, err := strconv.ParseUint(s, 10, 8)
	if err != nil || n >= uint64(len(dscpNames)) {
		return 0, fmt.Errorf("dscp %.64q is unknown; use CS0 to CS7, AF11 to AF43, EF, VA, LE, DF, or a number from 0 to 63", s)
	}
	return uint8(n), nil
}

// DSCPName is the name of a DSCP from 0 to 63, or its number.
func DSCPName(dscp uint8) string { return cmp.Or(dscpNames[dscp&63], strconv.Itoa(int(dscp))) }

// ColourMap is the colours that packets come in with. Bit n is DSCP n; DSCPs that are neither yellow nor red are green.
type ColourMap struct{ Yellow, Red uint64 }

// DefaultColours has the drop precedences of assured forwarding (RFC 2597): AFx2 is yellow, AFx3 red.
var DefaultColours = ColourMap{
	Yellow: 1<<12 | 1<<20 | 1<<28 | 1<<36,
	Red:    1<<14 | 1<<22 | 1<<30 | 1<<38,
}

// Of returns the colour of a DSCP from 0 to 63.
func (m ColourMap) Of(dscp uint8) Colour {
	switch bit := uint64(1) << dscp; {
	case m.Red&bit != 0:
		return Red
	case m.Yellow&bit != 0:
		return Yellow
	}
	return Green
}

// Add gives a DSCP from 0 to 63 a colour.
func (m *ColourMap) Add(dscp uint8, c Colour) {
	bit := uint64(1) << dscp
	m.Yellow &^= bit
	m.Red &^= bit
	switch c {
	case Yellow:
		m.Yellow |= bit
	case Red:
		m.Red |= bit
	}
}

// Set parses DSCPs with their colours, such as AF12=yellow,AF13=red. At least one must be yellow or red.
func (m *ColourMap) Set(s string) error {
	if s == "" {
		return errAllGreen
	}
	var all ColourMap
	given := uint64(0)
	for part := range strings.SplitSeq(s, ",") {
		name, colour, found := strings.Cut(part, "=")
		if !found {
			return fmt.Errorf("colours %.64q: write them like AF12=yellow,AF13=red", s)
		}
		dscp, err := ParseDSCP(name)
		var c Colour
		if err = cmp.Or(err, c.Set(colour)); err != nil {
			return fmt.Errorf("colours: %w", err)
		}
		if given&(1<<dscp) != 0 {
			return fmt.Errorf("colours %.64q: %s is given twice; remove one of them", s, DSCPName(dscp))
		}
		given |= 1 << dscp
		all.Add(dscp, c)
	}
	if all == (ColourMap{}) {
		return errAllGreen
	}
	*m = all
	return nil
}

var errAllGreen = errors.New("colours has neither yellow nor red, so it has no use; add some such as AF12=yellow, or leave it out")

// String is as Set parses it; empty for a map without yellow and red.
func (m ColourMap) String() string {
	var parts []string
	for dscp := range uint8(len(dscpNames)) {
		if c := m.Of(dscp); c != Green {
			parts = append(parts, DSCPName(dscp)+"="+c.String())
		}
	}
	return strings.Join(parts, ",")
}

func (m ColourMap) Type() string { return "dscp=colour,..." }

// Action is what happens to packets of a colour; 0 for none. From 1 to 64 it is SetDSCP.
type Action uint8

const (
	ActionPass Action = 65 + iota // they pass unchanged
	ActionDrop                    // they are dropped
	ActionECN                     // they are marked CE if they allow it, else dropped
)

// SetDSCP is the action by which packets get a DSCP from 0 to 63.
func SetDSCP(dscp uint8) Action { return Action(dscp) + 1 }

var actionNames = []string{"pass", "drop", "ecn"}

const dscpAction = "dscp:"

// String is as Set parses it; empty for none.
func (a Action) String() string {
	switch {
	case a == 0:
		return ""
	case a < ActionPass:
		return dscpAction + DSCPName(uint8(a-SetDSCP(0)))
	}
	return nameOf(a-ActionPass, actionNames)
}

// Set parses pass, drop, ecn, or dscp: and what ParseDSCP parses.
func (a *Action) Set(s string) error {
	if name, ok := strings.CutPrefix(s, dscpAction); ok {
		dscp, err := ParseDSCP(name)
		if err == nil {
			*a = SetDSCP(dscp)
		}
		return err
	}
	i := slices.Index(actionNames, s)
	if i < 0 {
		return fmt.Errorf("action %.64q is unknown; use pass, drop, ecn, or a DSCP such as dscp:AF12", s)
	}
	*a = ActionPass + Action(i)
	return nil
}

func (a Action) Type() string { return strings.Join(actionNames, "|") + "|" + dscpAction + "NAME" }

// says completes the sentence about packets.
func (a Action) says() string {
	switch a {
	case ActionPass:
		return "pass"
	case ActionDrop:
		return "are dropped"
	case ActionECN:
		return "are marked by ECN if they allow it, else dropped"
	}
	return "get " + strings.TrimPrefix(a.String(), dscpAction)
}

// Switch is an option that is on or off.
type Switch bool

// Set parses true or false.
func (s *Switch) Set(text string) error {
	if text != "true" && text != "false" {
		return fmt.Errorf("value %.64q is neither true nor false; write one of them", text)
	}
	*s = text == "true"
	return nil
}

func (s Switch) String() string { return strconv.FormatBool(bool(s)) }
func (s Switch) Type() string   { return "bool" }

func checkPIR(r *Rule) error {
	switch pir := r.Colours.PIR; {
	case pir == 0 && r.Colours.EIR != 0:
		return errors.New("pir is missing; trtcm has a peak rate (pir) for all packets; for a committed and an excess rate (eir) use rfc4115")
	case pir == 0:
		return fmt.Errorf("pir is missing; say the peak rate, from the rate %v up", r.Rate)
	case pir < r.Rate:
		return fmt.Errorf("pir %v is below the rate %v; raise it, or lower the rate", pir, r.Rate)
	}
	return checkRate("pir", r.Colours.PIR.String, r.Colours.PIR)
}

func checkEIR(r *Rule) error {
	if r.Colours.EIR == 0 {
		return errors.New("eir is missing; say the rate of yellow packets, such as 5mbit, or for none use srtcm with ebs 0")
	}
	return checkRate("eir", r.Colours.EIR.String, r.Colours.EIR)
}

func resolvePBS(l *Limit, r *Rule) (err error) {
	r.Colours.PBS, err = l.Colours.PBS.resolve("pbs", r.Colours.PIR, DefaultCapacity, r.Algorithm == TRTCM)
	return err
}

func resolveEBS(l *Limit, r *Rule) (err error) {
	rate := r.Colours.EIR
	if r.Algorithm == SRTCM {
		rate = r.Rate
	}
	r.Colours.EBS, err = l.Colours.EBS.resolve("ebs", rate, DefaultCapacity, r.Algorithm.hasEBS())
	return err
}

func checkEBS(r *Rule) error {
	if r.Colours.EBS == 0 {
		return nil
	}
	second, _ := r.Second()
	return checkBurst("ebs", r.Colours.EBS, second.Rate)
}

// ebsOption completes the option: an EBS of 0 is another one than none. RFC 2697 allows it beside a CBS above 0.
func ebsOption(o Option) *Option {
	made := sizeOption(func(l *Limit) *Capacity { return &l.Colours.EBS }, func(r *Rule) *uint64 { return &r.Colours.EBS }, o)
	made.Text = func(r *Rule) string {
		if r.Algorithm.hasEBS() && r.Colours.EBS == 0 {
			return zeroText
		}
		return sizeText(r.Colours.EBS)
	}
	made.Same = func(a, b *Rule) bool { return made.Text(a) == made.Text(b) }
	return made
}

func resolveIn(l *Limit, r *Rule) error {
	if r.Colours.In = l.Colours.In; r.Colours.Aware {
		r.Colours.In = cmp.Or(l.Colours.In, DefaultColours)
	}
	return nil
}

func checkIn(r *Rule) error {
	switch in := r.Colours.In; {
	case in == (ColourMap{}):
		return errAllGreen
	case in.Yellow&in.Red != 0:
		return errors.New("colours has a DSCP that is both yellow and red; remove one of them")
	}
	return nil
}

// actionOption is an option that is the action for a colour.
func actionOption(usual Action, in func(*ColourOptions) *Action, of func(*Colours) *Action, o Option) *Option {
	o.RuleOnly, o.LimitedOnly, o.instead = true, true, noColoursInPool
	o.needs = []need{needsColours}
	o.resolve = func(l *Limit, r *Rule) error {
		a := of(&r.Colours)
		if *a = *in(&l.Colours); *a == 0 && r.Algorithm.HasColours() {
			*a = usual
		}
		return nil
	}
	o.check = func(r *Rule) error {
		if a := *of(&r.Colours); a == 0 || a > ActionECN {
			return fmt.Errorf("%s has the unknown value %d; use pass, drop, ecn or a DSCP", o.Name, a)
		}
		return nil
	}
	return option(func(l *Limit) *Action { return in(&l.Colours) }, func(r *Rule) *Action { return of(&r.Colours) }, Action.String, o)
}

const noColoursInPool = "a pool gives packets no colours, so leave it out"

// inherit returns the limit of a shadow with what it has of its rule, but for what both always share.
func (l Limit) inherit(r *Rule) Limit {
	l.Algorithm = r.Algorithm
	l.Colours.PIR, l.Colours.EIR = cmp.Or(l.Colours.PIR, r.Colours.PIR), cmp.Or(l.Colours.EIR, r.Colours.EIR)
	return l
}

// rates describes the rates and bursts of r.
func (c *Colours) rates(r *Rule) string {
	size := func(bytes uint64) string { return human(0, bytes, 1, sizeNames) }
	says := fmt.Sprintf("CIR %v (%s), CBS %s", r.Rate, r.Rate.Bytes(), size(r.Capacity))
	switch r.Algorithm {
	case TRTCM:
		return fmt.Sprintf("%s; PIR %v, PBS %s", says, c.PIR, size(c.PBS))
	case RFC4115:
		return fmt.Sprintf("%s; EIR %v, EBS %s", says, c.EIR, size(c.EBS))
	}
	return says + ", EBS " + size(c.EBS)
}

// actions describes what happens to packets. That green ones pass goes without saying.
func (c *Colours) actions() string {
	says := fmt.Sprintf("yellow packets %s, red packets %s", c.Yellow.says(), c.Red.says())
	if c.Green != ActionPass {
		says = fmt.Sprintf("green packets %s, %s", c.Green.says(), says)
	}
	return says
}

// comesIn describes the colours with which packets come in, if they have some.
func (c *Colours) comesIn() string {
	switch {
	case !c.Aware:
		return ""
	case c.In == DefaultColours:
		return ", colour-aware"
	}
	return ", colour-aware with " + strings.ReplaceAll(c.In.String(), ",", " ")
}
