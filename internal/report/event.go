package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Kinds of events.
const (
	Overflow        = "overflow"
	PenaltyStarts   = "penalty"
	GuaranteeFails  = "guarantee"
	ChangeBegun     = "change-begun"
	ChangeConfirmed = "change-confirmed"
	ChangeReverted  = "change-reverted"
	ChangeExpired   = "change-expired"
	DeviceAppeared  = "device-appeared"
	DeviceGone      = "device-gone"
	RulesChanged    = "rules-changed"
	RulesMissing    = "rules-missing"
	RulesRestored   = "rules-restored"
	QuotaNearlyUsed = "quota-80"
	QuotaUsedUp     = "quota-used-up"
	QuotaRestored   = "quota-restored"
	LeaseBegun      = "lease-begun"
	LeaseEnded      = "lease-ended"
	LeftOut         = "left-out"
)

// EventKinds are all kinds of events.
var EventKinds = []string{
	Overflow, PenaltyStarts, GuaranteeFails, ChangeBegun, ChangeConfirmed, ChangeReverted, ChangeExpired,
	DeviceAppeared, DeviceGone, RulesChanged, RulesMissing, RulesRestored, QuotaNearlyUsed, QuotaUsedUp, QuotaRestored, LeaseBegun, LeaseEnded, LeftOut,
}

// KindsOf are the kinds that a name stands for: itself, or all whose name begins with it ("change", "device", "rules").
func KindsOf(name string) (kinds []string, err error) {
	for _, kind := range EventKinds {
		if kind == name || strings.HasPrefix(kind, name+"-") {
			kinds = append(kinds, kind)
		}
	}
	if kinds == nil {
		return nil, fmt.Errorf("there is no kind of event %.50q; use %s, or the part before the hyphen", name, strings.Join(EventKinds, ", "))
	}
	return kinds, nil
}

// An Event is a moment that operators want to know of.
type Event struct {
	Time          time.Time `json:"time"`
	Kind          string    `json:"kind"`
	Device        string    `json:"device"`
	Direction     string    `json:"direction"`
	Network       string    `json:"network"`
	Name          string    `json:"name"`
	Key           string    `json:"key"`
	Address       string    `json:"address"`
	Pool          string    `json:"pool"`
	Sharer        string    `json:"sharer"`
	Excess        string    `json:"excess"`
	Colour        string    `json:"colour"`
	LevelBytes    *uint64   `json:"level_bytes"`
	CapacityBytes *uint64   `json:"capacity_bytes"`
	NewPeriod     bool      `json:"new_period"`
	LeftOut       uint64    `json:"left_out"`
	Sentence      string    `json:"sentence"`

	// Unit is what LevelBytes and CapacityBytes count.
	Unit policy.Unit `json:"-"`
	// Then is what comes after the quota.
	Then policy.Then `json:"-"`

	// Colours says what happens to packets by colour; nil for a rule without colours.
	Colours *policy.Colours `json:"-"`

	// Changed are the rules or pools that changed, for filters, where there are several: Network and Name are empty then.
	Changed []ChangedRule `json:"-"`
}

// A ChangedRule is the network of a rule and its name, or the name of a pool.
type ChangedRule struct{ Network, Name string }

// Rule names the rule of an event, or its device.
func (e *Event) Rule() string {
	parts := []string{e.Device, e.Direction, addressOf(e.Network)}
	if e.Network != "" && e.Name != "" {
		parts = append(parts, fmt.Sprintf("(%q)", e.Name))
	}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), " ")
}

// whose says whose bucket it is.
func (e *Event) whose() string {
	if e.Key == "" || e.Key == e.Network {
		return ""
	}
	return " of " + addressOf(e.Key)
}

func (e *Event) filled() string {
	if e.LevelBytes == nil || e.CapacityBytes == nil {
		return ""
	}
	switch e.Unit {
	case policy.Packets:
		return fmt.Sprintf(" (%d of %d packets)", *e.LevelBytes, *e.CapacityBytes)
	case policy.Flows:
		return fmt.Sprintf(" (%d of %d new flows)", *e.LevelBytes, *e.CapacityBytes)
	}
	return fmt.Sprintf(" (%s of %s)", Bytes(*e.LevelBytes), Bytes(*e.CapacityBytes))
}

// exceeded says which limit has too little room.
func (e *Event) exceeded() string {
	switch {
	case e.Unit != policy.InQuota && e.Unit != policy.AfterQuota:
		return "is full" + e.filled()
	case e.Then == policy.ThenDrop:
		return "has used up its quota"
	}
	return fmt.Sprintf("exceeds %v, as its quota is used up", e.Then)
}

var excessWords = map[string]string{"dropped": "dropped", "marked": "marked by ECN", "delayed": "queued", "passed": "passed and counted"}

// colours are those that the packet may have: listeners hear only of red packets and of those that are dropped.
func (e *Event) colours() string {
	if e.Excess != "dropped" {
		return policy.Red.String()
	}
	var colours []string
	for colour := policy.Green; colour <= policy.Red; colour++ {
		if a := e.Colours.Action(colour); a == policy.ActionDrop || a == policy.ActionECN {
			colours = append(colours, colour.String())
		}
	}
	return strings.Join(colours, " or ")
}

// fate is what happened to a packet with a colour.
func (e *Event) fate() string {
	if e.Excess == "dropped" {
		return "are dropped"
	}
	red := Colouring{Action: e.Colours.Red.String()}
	return red.become(true)
}

// DescribePacket sets the sentence of an event that a packet caused.
func (e *Event) DescribePacket() {
	pool := fmt.Sprintf("pool %q", e.Pool)
	switch {
	case e.Colours != nil:
		e.Colour = e.colours()
		e.Sentence = fmt.Sprintf("%s: packets%s are %s, and %s", e.Rule(), e.whose(), e.Colour, e.fate())
	case e.Sharer != "":
		e.Sentence = e.beyondShare()
	case e.Kind == GuaranteeFails:
		e.Sentence = fmt.Sprintf("%s: %s refuses packets of %s within its guarantee: it has no room for all guarantees", e.Rule(), pool, addressOf(e.Key))
	case e.Kind == PenaltyStarts:
		e.Sentence = fmt.Sprintf("%s: a penalty starts for the bucket%s%s", e.Rule(), e.whose(), e.filled())
	case e.Pool != "":
		e.Sentence = fmt.Sprintf("%s: %s %s; excess packets are %s; first address: %s", e.Rule(), pool, e.exceeded(), excessWords[e.Excess], e.Address)
	default:
		e.Sentence = fmt.Sprintf("%s: the bucket%s %s; excess packets are %s", e.Rule(), e.whose(), e.exceeded(), excessWords[e.Excess])
	}
}

// beyondShare says who took more than its fair share.
func (e *Event) beyondShare() string {
	who := e.Rule()
	if e.Sharer != e.Network {
		who += ": " + addressOf(e.Sharer)
	}
	what := "its share"
	if e.Pool != "" {
		what += fmt.Sprintf(" of pool %q", e.Pool)
	}
	return fmt.Sprintf("%s takes more than %s%s; excess packets are dropped", who, what, e.filled())
}

// Line is an event for people: the time of day, the kind and the sentence.
func (e *Event) Line() string {
	line := fmt.Sprintf("%s %s: %s", e.Time.Local().Format("15:04:05.000"), e.Kind, plain.Line(e.Sentence))
	if e.LeftOut > 0 && e.Kind != LeftOut {
		line += fmt.Sprintf(" (%d events before it were left out)", e.LeftOut)
	}
	return line
}

// JSONLine is an event as one line.
func (e *Event) JSONLine(w io.Writer) error {
	return encoder(w, "", "").Encode(e)
}
