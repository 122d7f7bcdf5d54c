package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

const (
	// DefaultAdaptAbove is how far the latency of a line may rise above the usual one.
	DefaultAdaptAbove = 30 * time.Millisecond

	leastAdaptAbove, mostAdaptAbove = time.Millisecond, 10 * time.Second
	mostReflectors                  = 8
)

// DefaultReflectors are pinged where a pool names none: addresses of large public DNS services, which answer
// from the nearest of many places.
var DefaultReflectors = []netip.Addr{
	netip.MustParseAddr("1.1.1.1"), netip.MustParseAddr("9.9.9.9"), netip.MustParseAddr("8.8.8.8"),
	netip.MustParseAddr("2606:4700:4700::1111"), netip.MustParseAddr("2620:fe::fe"), netip.MustParseAddr("2001:4860:4860::8888"),
}

// Adapt is how the rate of a pool follows the latency of its line. The rate of the pool is the highest one.
type Adapt struct {
	Min   Rate       // the lowest rate; 0 for a rate that does not adapt
	To    Reflectors // the addresses to ping; "" for DefaultReflectors
	Above AdaptAbove // 0 for DefaultAdaptAbove
}

// Reflectors are IP addresses with a comma between them.
type Reflectors string

func (r *Reflectors) Set(s string) error {
	if s == "default" {
		*r = ""
		return nil
	}
	all, err := parseReflectors(s)
	if err == nil {
		*r = reflectors(all)
	}
	return err
}

func reflectors(all []netip.Addr) Reflectors {
	texts := make([]string, len(all))
	for i, a := range all {
		texts[i] = a.String()
	}
	return Reflectors(strings.Join(texts, ","))
}

func parseReflectors(s string) (all []netip.Addr, err error) {
	for text := range strings.SplitSeq(s, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(text))
		switch a = a.Unmap(); {
		case err != nil:
			return nil, fmt.Errorf("adapt-to: %.64q is not an IP address; list some, such as 1.1.1.1,9.9.9.9", text)
		case a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast():
			return nil, fmt.Errorf("adapt-to: %v cannot be pinged through a line; use an address on the internet", a)
		case slices.Contains(all, a):
			return nil, fmt.Errorf("adapt-to: %v is given twice; remove one of them", a)
		}
		if all = append(all, a); len(all) > mostReflectors {
			return nil, fmt.Errorf("adapt-to has more than %d addresses; use fewer", mostReflectors)
		}
	}
	return all, nil
}

// Addrs are the addresses to ping.
func (r Reflectors) Addrs() []netip.Addr {
	if r == "" {
		return DefaultReflectors
	}
	all, _ := parseReflectors(string(r))
	return all
}

func (r Reflectors) String() string { return string(r) }
func (r Reflectors) Type() string   { return "host,..." }

// AdaptAbove is a time; 0 for DefaultAdaptAbove.
type AdaptAbove time.Duration

func (a *AdaptAbove) Set(s string) error {
	d, err := parseTime("adapt-above", s, "30ms")
	if err != nil {
		return err
	}
	if *a = AdaptAbove(d); d == DefaultAdaptAbove {
		*a = 0
	}
	return nil
}

// Value is the time.
func (a AdaptAbove) Value() time.Duration {
	if a == 0 {
		return DefaultAdaptAbove
	}
	return time.Duration(a)
}

func (a AdaptAbove) String() string { return timeString(a.Value()) }
func (a AdaptAbove) Type() string   { return "time" }

func checkAdaptMin(r *Rule) error {
	lowest := r.Adapt.Min
	switch {
	case lowest == 0:
		return nil
	case r.Cluster.Name != "":
		return errors.New("adapt-min has no use with a cluster, with which other hosts decide on the rate; leave one of them out")
	case lowest > r.Rate:
		return fmt.Errorf("adapt-min %v is above the rate %v; lower it, or raise the rate", lowest, r.Rate)
	}
	return checkRate("adapt-min", lowest.String, lowest)
}

func checkAdaptTo(r *Rule) error {
	if r.Adapt.To == "" {
		return nil
	}
	all, err := parseReflectors(string(r.Adapt.To))
	if err == nil && reflectors(all) != r.Adapt.To {
		err = fmt.Errorf("adapt-to %.64q is not written as %s", string(r.Adapt.To), reflectors(all))
	}
	return err
}

func checkAdaptAbove(r *Rule) error {
	switch above := time.Duration(r.Adapt.Above); {
	case above == 0:
		return nil
	case above == DefaultAdaptAbove:
		return fmt.Errorf("adapt-above has the value %v; use 0 for it", above)
	case above < leastAdaptAbove:
		return fmt.Errorf("adapt-above %v is shorter than %v, which no latency keeps to; raise it", above, leastAdaptAbove)
	case above > mostAdaptAbove:
		return fmt.Errorf("adapt-above %v is longer than %v; lower it", above, mostAdaptAbove)
	}
	return nil
}

// says describes between which rates the rate of a pool adapts.
func (a Adapt) says(highest Rate) (says string) {
	if a.Min == 0 {
		return ""
	}
	says = fmt.Sprintf(", between %v and %v as the line's latency allows", a.Min, highest)
	if a.Above != 0 {
		says += fmt.Sprintf(", %v above the usual", a.Above)
	}
	if a.To != "" {
		says += ", to " + strings.ReplaceAll(string(a.To), ",", " and ")
	}
	return says
}

// A Lessor is who gives a pool leases on its rate: its cluster, or the process that adapts it to its line. The zero Lessor
// is none.
type Lessor struct {
	Cluster ClusterName
	Line    bool
}

// Lessor is who gives r leases.
func (r *Rule) Lessor() Lessor { return Lessor{r.Cluster.Name, r.Adapt.Min != 0} }

// HasLeases reports whether r has its rate by leases.
func (r *Rule) HasLeases() bool { return r.Pool && r.Lessor() != Lessor{} }
