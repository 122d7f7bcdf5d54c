package policy

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Also are other limits of a rule or pool, to which its packets must conform as well. The zero Also is none.
type Also struct {
	Packets     PerSecond // packets on the wire
	PacketBurst Count     // above 0 with Packets
	Flows       PerSecond // first packets of flows
	FlowBurst   Count     // above 0 with Flows
	Quota       Quota
	Grace       uint64 // bytes beyond the quota that have the full rate
	Zone        Zone
	Then        Then // once quota and grace are used up; not 0 with a quota
}

// some reports whether there are any, before all is resolved.
func (a Also) some() bool { return a.Packets|a.Flows != 0 || a.Quota.Bytes != 0 }

// AnyRate reports whether only other limits limit r.
func (r Rule) AnyRate() bool { return r.Rate == MaxRate && r.Also != (Also{}) }

// A Unit is what a limit counts.
type Unit uint8

// The capacity and the rate of a limit are in packets or flows where they are in bytes else.
const (
	Bytes Unit = iota
	Packets
	Flows
	InQuota    // in bytes, coarser
	AfterQuota // in bytes: the limit that is in force while the one before is used up
)

const (
	// MaxQuota is the largest quota in bytes: 4 PiB.
	MaxQuota = 1 << 52

	leastPacketBurst, leastFlowBurst = 64, 10
)

// Chained returns the first of the other limits of r, of which the next one is that of the result; false for none. A quota comes
// first, so it stays what it is when others come and go.
func (r Rule) Chained() (next Rule, ok bool) {
	next = Rule{Prefix: r.Prefix, Each: r.Each, NAT: r.NAT, Also: r.Also}
	a, then := &next.Also, r.Also.Then
	if r.Unit == InQuota {
		a.Quota, a.Grace, a.Zone, a.Then = Quota{}, 0, "", 0
	}
	switch {
	case a.Quota.Bytes != 0:
		next.Unit, next.Capacity, next.Cluster.Name = InQuota, a.Quota.Bytes+a.Grace, r.Cluster.Name
		next.Algorithm, next.Excess = Leaky, Delay // a change keeps what is used, not what is left
	case r.Unit == InQuota && then != ThenDrop:
		next.Unit, next.Rate, next.Capacity = AfterQuota, Rate(then), DefaultCapacity(Rate(then))
	case a.Flows != 0:
		next.Unit, next.Rate, next.Capacity = Flows, a.Flows.rate(), uint64(a.FlowBurst)
		a.Flows, a.FlowBurst = 0, 0
	case a.Packets != 0:
		next.Unit, next.Rate, next.Capacity = Packets, a.Packets.rate(), uint64(a.PacketBurst)
		a.Packets, a.PacketBurst = 0, 0
	default:
		return Rule{}, false
	}
	return next, true
}

// PerSecond is a number of packets or flows per second, from 1 on; 0 for none.
type PerSecond uint32

var perSecondUnits = map[string]uint64{"": 1, "/s": 1, "k": 1e3, "k/s": 1e3, "m": 1e6, "m/s": 1e6}

func (n *PerSecond) Set(s string) error {
	if s == none {
		*n = 0
		return nil
	}
	number, unit, err := splitNumber("number", s, "10k")
	if err != nil {
		return err
	}
	size := perSecondUnits[strings.ToLower(unit)]
	v, whole := scale(number, size)
	switch {
	case size == 0:
		return fmt.Errorf("number %q has the unknown unit %q; write how many in a second, such as 500, 10k or 1m", s, unit)
	case !whole || v == 0 || v > math.MaxUint32:
		return fmt.Errorf("number %q is not a whole number from 1 to %d in a second; write one", s, uint32(math.MaxUint32))
	}
	*n = PerSecond(v)
	return nil
}

func (n PerSecond) String() string {
	switch {
	case n == 0:
		return none
	case n%1e6 == 0:
		return strconv.Itoa(int(n/1e6)) + "m"
	case n%1e3 == 0:
		return strconv.Itoa(int(n/1e3)) + "k"
	}
	return strconv.Itoa(int(n))
}

func (n PerSecond) Type() string { return "number|none" }

// rate is n where each counts as a byte.
func (n PerSecond) rate() Rate { return Rate(n) * 8 }

// Count is a number of packets or flows; 0 if it is not set.
type Count uint32

func (c Count) String() string {
	if c == 0 {
		return ""
	}
	return strconv.Itoa(int(c))
}

// A Quota is how many bytes pass in a period. The zero Quota is none.
type Quota struct {
	Bytes  uint64
	Period Period
}

// A Period is a day, week or month of the calendar, or a time over which a quota comes back steadily: "month", "month@15", "30d".
type Period string

var (
	calendarPeriod = regexp.MustCompile(`^(?:(day)|(week)(?:@(mon|tue|wed|thu|fri|sat|sun))?|(month)(?:@([1-9]|1[0-9]|2[0-8]))?)$`)
	rollingPeriod  = regexp.MustCompile(`^([1-9][0-9]{0,3})(h|d)$`)
	weekdays       = map[string]int{"mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6, "sun": 0}
)

// Valid reports whether this build knows the period.
func (p Period) Valid() bool { return calendarPeriod.MatchString(string(p)) || p.Rolling() > 0 }

// Rolling is the time over which a quota of the period comes back; 0 if it comes back at once when a period begins.
func (p Period) Rolling() time.Duration {
	parts := rollingPeriod.FindStringSubmatch(string(p))
	if parts == nil {
		return 0
	}
	n, _ := strconv.Atoi(parts[1])
	return time.Duration(n) * map[string]time.Duration{"h": time.Hour, "d": 24 * time.Hour}[parts[2]]
}

// Begins returns when the period of a calendar begins that a time is in, n periods later. It is midnight in that time's zone, or
// the first moment of the day if the clock skips midnight.
func (p Period) Begins(at time.Time, n int) time.Time {
	year, month, day := at.Date()
	switch parts := calendarPeriod.FindStringSubmatch(string(p)); {
	case parts[1] != "":
		day += n
	case parts[2] != "":
		first := weekdays[cmp.Or(parts[3], "mon")]
		day += 7*n - (int(at.Weekday())-first+7)%7
	default:
		first, _ := strconv.Atoi(cmp.Or(parts[5], "1"))
		if day < first {
			n--
		}
		day, month = first, month+time.Month(n)
	}
	begins, noon := time.Date(year, month, day, 0, 0, 0, 0, at.Location()), time.Date(year, month, day, 12, 0, 0, 0, at.Location())
	if begins.Day() != noon.Day() { // before the gap
		_, begins = begins.ZoneBounds()
	}
	return begins
}

func (q *Quota) Set(s string) error {
	if s == none {
		*q = Quota{}
		return nil
	}
	size, period, found := strings.Cut(s, "/")
	if !found || !Period(period).Valid() {
		return fmt.Errorf("quota %.64q has no period that is known; write one such as 100gb/month, 100gb/month@15 (a day from 1 to 28), 20gb/week, 5gb/day or 100gb/30d", s)
	}
	bytes, err := ParseVolume("quota", size)
	if err == nil {
		*q = Quota{bytes, Period(period)}
	}
	return err
}

// ParseVolume parses a number of bytes of up to MaxQuota.
func ParseVolume(what, s string) (uint64, error) {
	number, unit, err := splitNumber(what, s, "100gb")
	if err != nil {
		return 0, err
	}
	size := volumeUnits[strings.ToLower(unit)]
	v, whole := scale(number, size)
	switch {
	case unit == "":
		return 0, fmt.Errorf("%s %q has no unit; did you mean %sgb?", what, s, number)
	case strings.HasSuffix(strings.ToLower(unit), "bit"):
		return 0, fmt.Errorf("%s %q is in bits; write it in bytes such as 100gb", what, s)
	case size == 0:
		return 0, fmt.Errorf("%s %q has the unknown unit %q; use mb, gb or tb", what, s, unit)
	case !whole || v == 0:
		return 0, fmt.Errorf("%s %q is not a whole number of bytes above 0; write one such as 100gb", what, s)
	case v > MaxQuota:
		return 0, fmt.Errorf("%s %q is above 4096tb, the largest there is; lower it", what, s)
	}
	return v, nil
}

// volumeUnits are sizeUnits and terabytes.
var volumeUnits = map[string]uint64{"t": 1 << 40, "tb": 1 << 40, "tib": 1 << 40}

func init() {
	for unit, size := range sizeUnits {
		volumeUnits[unit] = size
	}
}

// volumeText is "" for 0.
func volumeText(bytes uint64) string {
	if bytes == 0 {
		return ""
	}
	return inLargest(bytes, volumeUnits, "tb", "gb", "mb", "kb", "b")
}

func (q Quota) String() string {
	if q == (Quota{}) {
		return none
	}
	return volumeText(q.Bytes) + "/" + string(q.Period)
}

func (q Quota) Type() string { return "size/period|none" }

// volume is a number of bytes that an option calls what.
type volume struct {
	at   *uint64
	what string
}

func (v volume) Set(s string) (err error) {
	if *v.at = 0; s != zeroText {
		*v.at, err = ParseVolume(v.what, s)
	}
	return err
}

func (v volume) String() string { return volumeText(*v.at) }
func (v volume) Type() string   { return "size" }

// Zone is the name of a time zone, such as Europe/Berlin; "" for that of the host.
type Zone string

// Location is the time zone.
func (z Zone) Location() (in *time.Location, err error) {
	if z == "" { // that of the host, not of whoever runs a command
		data, err := os.ReadFile("/etc/localtime")
		if err != nil {
			return time.UTC, nil
		}
		return time.LoadLocationFromTZData("Local", data)
	}
	if in, err = time.LoadLocation(string(z)); err != nil {
		err = fmt.Errorf("quota-zone %q is unknown here; use a name in /usr/share/zoneinfo, such as Europe/Berlin", string(z))
	}
	return in, err
}

func checkZone(r *Rule) error {
	_, err := r.Also.Zone.Location()
	return err
}

// Then is what comes after a quota: a rate, or ThenDrop; 0 if it is not set.
type Then Rate

// ThenDrop drops all packets once the quota is used up.
const ThenDrop Then = math.MaxUint64

func (t *Then) Set(s string) error {
	if s == Drop.String() {
		*t = ThenDrop
		return nil
	}
	r, err := ParseRate(s)
	if err == nil && r == Unlimited {
		err = errors.New("it must be a rate such as 5mbit, or drop")
	}
	if err == nil {
		*t = Then(r)
	}
	return err
}

func (t Then) String() string {
	switch t {
	case 0:
		return ""
	case ThenDrop:
		return Drop.String()
	}
	return Rate(t).String()
}

func (t Then) Type() string { return "rate|drop" }

// resolve sets a burst that is not given to a part of a second of what passes, but at least to some.
func (c Count) resolve(n PerSecond, part, least uint32) Count {
	if c == 0 && n != 0 {
		c = Count(max(uint32(n)/part, least))
	}
	return c
}

func checkThen(r *Rule) error {
	switch t := r.Also.Then; {
	case t == 0:
		return errors.New("then is missing; say what comes after the quota: a rate such as 5mbit, or drop")
	case t == ThenDrop && r.Excess == Pass:
		return errors.New("then drop would drop nothing with excess pass; only to count, give the rate itself, else leave excess pass out")
	case t != ThenDrop && Rate(t) > r.Rate:
		return fmt.Errorf("then %v is above the rate %v; lower it", t, r.Rate)
	case r.Cluster.Name != "" && r.Also.Quota.Period.Rolling() != 0:
		return fmt.Errorf("quota %v comes back steadily, which hosts of a cluster cannot share; give a day, week or month, or no cluster", r.Also.Quota)
	}
	return nil
}

func (r *Rule) hasQuota() bool { return r.Also.Quota.Bytes != 0 }

// says describes the other limits of a rule.
func (a Also) says() (says string) {
	if a.Packets != 0 {
		says += fmt.Sprintf(", at most %v packets/s (burst %v)", a.Packets, a.PacketBurst)
	}
	if a.Flows != 0 {
		says += fmt.Sprintf(", at most %v new flows/s (burst %v)", a.Flows, a.FlowBurst)
	}
	if a.Quota.Bytes == 0 {
		return says
	}
	period, then := "a "+string(a.Quota.Period), "nothing"
	if kind, first, found := strings.Cut(period, "@"); found {
		period = kind + " from the " + first + " on"
	} else if a.Quota.Period.Rolling() != 0 {
		period = "in " + string(a.Quota.Period)
	}
	if a.Zone != "" {
		period += " (" + string(a.Zone) + ")"
	}
	if a.Then != ThenDrop {
		then = a.Then.String()
	}
	says += ", " + human(0, a.Quota.Bytes, 1, sizeNames)
	if a.Grace != 0 {
		says += " and a grace of " + human(0, a.Grace, 1, sizeNames)
	}
	return says + " " + period + ", then " + then
}
