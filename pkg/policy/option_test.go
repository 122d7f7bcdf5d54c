package policy

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// samples holds a value of each option that is not the default, and the other options that
// it needs.
var samples = map[string][]string{
	"rate":      {"9mbit"},
	"capacity":  {"123456b"},
	"algorithm": {"leaky"},
	"each":      {"host"},
	"excess":    {"ecn"},
	"queue":     {"54321b", "excess=delay"},
	"ecn-above": {"3ms", "excess=delay"},
	"order":     {"sparse-first", "excess=delay"},
	"penalty":   {"30s", "algorithm=leaky"},

	"pir":          {"20mbit", "algorithm=trtcm"},
	"pbs":          {"123456b", "algorithm=trtcm", "pir=8mbit"},
	"eir":          {"5mbit", "algorithm=rfc4115"},
	"ebs":          {"123456b", "algorithm=srtcm"},
	"colour-aware": {"true", "algorithm=srtcm"},
	"colours":      {"CS0=red,AF12=yellow", "algorithm=srtcm", "colour-aware=true"},
	"green":        {"dscp:CS0", "algorithm=srtcm"},
	"yellow":       {"dscp:AF12", "algorithm=srtcm"},
	"red":          {"ecn", "algorithm=srtcm"},

	"fail":      {"closed"},
	"overhead":  {"-4"},
	"mpu":       {"64"},
	"within":    {"Site 7: down"},
	"guarantee": {"2mbit", "within=uplink"},
	"members":   {"50", "within=uplink", "guarantee=1mbit", "each=host"},
	"weight":    {"256", "within=uplink"},
	"share":     {"flow"},
	"nat":       {"true", "share=host"},

	"cluster":        {"10 gbit: gold"},
	"cluster-weight": {"256", "cluster=gold"},
	"cluster-floor":  {"1mbit", "cluster=gold"},
	"cluster-share":  {"2mbit", "cluster=gold"},
	"cluster-safe":   {"500kbit", "cluster=gold"},

	"adapt-min":   {"2mbit"},
	"adapt-above": {"15ms", "adapt-min=2mbit"},
	"adapt-to":    {"192.0.2.1,2001:db8::1", "adapt-min=2mbit"},

	"name": {"Müller & Söhne"},
	"note": {"pays in May"},

	"pps":             {"10k"},
	"pps-burst":       {"500", "pps=10k"},
	"new-flows":       {"50"},
	"new-flows-burst": {"7", "new-flows=50"},
	"quota":           {"100gb/month@15", "then=5mbit"},
	"then":            {"drop", "quota=5gb/30d"},
	"grace":           {"1tb", "quota=5gb/day", "then=1mbit"},
	"quota-zone":      {"Europe/Berlin", "quota=5gb/week@sun", "then=1mbit"},

	"shadow": {"rate=5mbit,capacity=64kb"}, "host": {"3c:22:fb:12:34:56"}, "waits": {"2mbit", "within=uplink"}, "owner": {"tap7 egress alice"}, "line": {"eth0"},
}

// limitOf is a limit of 8mbit and of options such as excess=delay.
func limitOf(t *testing.T, options []string) (l Limit) {
	t.Helper()
	l.Rate = 8e6
	for _, o := range options {
		key, value, _ := strings.Cut(o, "=")
		if err := l.Set(key, value); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// A rule becomes a limit of which the same rule is made, and in which a capacity follows the rate.
func TestRuleLimit(t *testing.T) {
	prefix := netip.MustParsePrefix("10.0.0.0/24")
	for _, options := range [][]string{
		{}, {"rate=unlimited", "fail=closed"}, {"capacity=64kb", "each=/28", "name=Müller & Söhne", "note=x"},
		{"excess=delay", "ecn-above=never", "order=sparse-first", "queue=20ms"}, {"excess=delay", "algorithm=leaky"},
		{"algorithm=leaky", "penalty=30s", "excess=ecn"}, {"overhead=ethernet"}, {"overhead=-4", "mpu=64"},
		{"within=uplink", "guarantee=1mbit", "weight=3", "share=/30"}, {"rate=unlimited", "within=uplink", "guarantee=1mbit"},
		{"algorithm=srtcm"}, {"algorithm=trtcm", "pir=20mbit", "pbs=100ms", "yellow=dscp:AF12", "red=pass", "each=host", "fail=closed"},
		{"algorithm=rfc4115", "eir=1mbit", "ebs=64kb", "colour-aware=true", "green=dscp:0"},
		{"algorithm=srtcm", "colour-aware=true", "colours=CS1=red", "overhead=ethernet"}, {"rate=unlimited", "algorithm=trtcm"},
		{"within=uplink", "guarantee=1mbit", "each=host", "members=50"}, {"within=uplink", "each=/24", "share=host"},
		{"within=uplink", "waits=1mbit", "each=host", "members=50"},
	} {
		for _, shadow := range []string{"none", "rate=5mbit", "rate=1mbit,capacity=64kb,each=host,overhead=docsis"} {
			l := limitOf(t, options)
			var err error
			if l.Shadow, err = ParseShadow(shadow); err != nil {
				t.Fatal(err)
			}
			if l.Rate == Unlimited {
				l.Shadow = nil
			}
			have, err := l.Rule(prefix)
			if err != nil {
				t.Fatal(options, err)
			}
			have = have.On(14)
			if got, err := (Draft{}).Missing(&have).As(Usual).Rule(prefix); err != nil || got != have {
				t.Errorf("%v, shadow %s: %v, %+v became %+v", options, shadow, err, have, got)
			}
		}
	}
	have, err := Limit{Rate: 10e6}.Rule(prefix)
	l := Draft{}.Missing(&have)
	l.Rate = 50e6
	got, errFaster := l.Rule(prefix)
	if want := (Rule{Prefix: prefix, Rate: 50e6, Capacity: DefaultCapacity(50e6)}); got != want {
		t.Errorf("%v %v: at another rate it is %+v, not %+v", err, errFaster, got, want)
	}
}

// TestOptions converts each option from text to a rule and back.
func TestOptions(t *testing.T) {
	prefix, names := netip.MustParsePrefix("10.0.0.0/24"), map[string]bool{}
	for _, o := range Options {
		for _, name := range append(slices.Clone(o.Aliases), o.Name) {
			if names[name] || FindOption(name) != o || LimitKey(name) != o.Name {
				t.Errorf("%s is not one option", name)
			}
			names[name] = true
		}
		with := samples[o.Name]
		if with == nil {
			t.Errorf("%s has no value to test", o.Name)
			continue
		}
		value := with[0]
		l := limitOf(t, with[1:])
		without, err := l.Resolve(prefix) // guarantees may need the option
		if err != nil {
			t.Fatal(err)
		}
		plain := l
		if err := l.Set(o.Name, value); err != nil {
			t.Fatal(err)
		}
		r, err := l.Rule(prefix)
		if o.PoolOnly {
			if err == nil || !(strings.Contains(err.Error(), "cluster") || strings.Contains(err.Error(), "adapt-min") || o.Fact) {
				t.Errorf("%s of a rule: %v", o.Name, err)
			}
			r, err = l.Pool("pool")
		}
		if err != nil {
			t.Fatal(err)
		}
		if o.Same(&without, &r) || !o.Same(&r, &r) || o.Text(&r) != value || o.Value(&l).String() != value || !o.Useful(&r) {
			t.Errorf("%s: the rule has %q, and the limit %q", o.Name, o.Text(&r), o.Value(&l))
		}
		if o.Copy(&l, &noLimit); o.Name != "rate" && l != plain {
			t.Errorf("%s: %+v is left", o.Name, l)
		}
		for _, other := range with[1:] { // the other options of a rule say what it needs
			if key, _, _ := strings.Cut(other, "="); key == "algorithm" {
				alone := Limit{Rate: 8e6}
				alone.Set(o.Name, value)
				if _, err := alone.Rule(prefix); err == nil || !strings.HasPrefix(err.Error(), o.Name+" ") {
					t.Errorf("%s without %s: %v", o.Name, other, err)
				}
			}
		}
		if _, err := ParseShadow(o.Name + "=" + value); (err == nil) != o.Shadow {
			t.Errorf("%s in a shadow: %v", o.Name, err)
		}
		unlimited := Limit{Rate: Unlimited}
		unlimited.Set(o.Name, value)
		if slices.Contains(with, "within=uplink") {
			unlimited.Within = "uplink"
		}
		_, err = unlimited.Rule(prefix)
		refused := o.LimitedOnly || o.Name == "members" || o.PoolOnly
		if (err == nil) == refused {
			t.Errorf("%s of an unlimited rule: %v", o.Name, err)
		}
		pool := limitOf(t, with[1:])
		if err := pool.Set(o.Name, value); err != nil {
			t.Fatal(err)
		}
		r, err = pool.Pool("pool")
		if refused := o.RuleOnly || o.Name == "penalty"; (err == nil) == refused || err != nil && !strings.Contains(err.Error(), "pool") {
			t.Errorf("%s of a pool: %v", o.Name, err)
		}
	}
}
