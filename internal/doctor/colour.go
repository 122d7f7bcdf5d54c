package doctor

import (
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A size is a burst size of a rule with colours.
type size struct {
	name, flag string
	bytes      uint64
	rate       policy.Rate // that fills the bucket
	larger     string      // what happens to a packet that is larger
	tcp        bool        // TCP needs some of it
}

func sizesOf(r Rule) []size {
	sizes := []size{{"CBS", "--cbs", r.Capacity, r.Rate, "never green", true}}
	second, _ := r.Second()
	switch c := r.Colours; {
	case r.Algorithm == policy.TRTCM:
		sizes = append(sizes, size{"PBS", "--pbs", c.PBS, c.PIR, "always red", true})
	case c.EBS > 0: // else no packet is to be yellow
		sizes = append(sizes, size{"EBS", "--ebs", c.EBS, second.Rate, "never yellow", false})
	}
	return sizes
}

// checkColours finds burst sizes that are too small for their packets or their rate, and peak limits that leave no room for
// yellow packets.
func checkColours(f Facts, s Hook, d *Device) []report.Finding {
	if d == nil {
		return nil
	}
	p, alike, order := f.biggest(s, d), map[[2]string][]Rule{}, [][2]string{}
	says := map[[2]string]report.Finding{}
	find := func(kind, name string, r Rule, status report.Status, finding, advice string) {
		key := [2]string{kind, name}
		if alike[key] == nil {
			order, says[key] = append(order, key), report.Finding{Status: status, Finding: r.Prefix.String() + ": " + finding, Advice: advice}
		}
		alike[key] = append(alike[key], r)
	}
	for _, r := range s.Limits.limited() {
		if !r.Algorithm.HasColours() {
			continue
		}
		for _, b := range sizesOf(r) {
			raise := func(bytes uint64) string { return fmt.Sprintf("raise %s to %d", b.flag, bytes) }
			advice := raise(max(p.bytes, d.FullFrame()))
			is := fmt.Sprintf("the %s of %d bytes is ", b.name, b.bytes)
			switch frame := d.FullFrame(); {
			case b.bytes < frame:
				find("frame", b.name, r, report.Warning, is+fmt.Sprintf("less than one full frame (%d): such a frame is %s", frame, b.larger), advice)
			case b.bytes < p.bytes:
				if p.less != "" {
					advice += ", or: " + p.less
				}
				find("packet", b.name, r, report.Warning, is+fmt.Sprintf("less than the largest packet (%d), as %s: such a packet is metered as a whole, and is %s",
					p.bytes, p.why, b.larger), advice)
			case b.tcp && b.bytes < bytesIn(10*time.Millisecond, b.rate):
				find("rate", b.name, r, report.Warning, is+fmt.Sprintf("only %s of %v: TCP sends larger bursts, and may not reach that rate",
					report.About(uint64(drain(b.bytes, b.rate))), b.rate), raise(max(policy.DefaultCapacity(b.rate), p.bytes)))
			}
		}
		if r.Colours.Red == policy.ActionECN {
			find("red", "", r, report.Note, "red packets are marked by ECN and take no tokens: no rate holds for a sender that ignores marks",
				"if that is not intended, use ecn for yellow packets, and drop red ones")
		}
		switch c := r.Colours; {
		case r.Algorithm != policy.TRTCM:
		case c.PBS < r.Capacity:
			find("peak", "", r, report.Note, fmt.Sprintf("the PBS of %d bytes is less than the CBS of %d: a burst has red packets while C has room", c.PBS, r.Capacity),
				fmt.Sprintf("if that is not intended, raise --pbs to %d, or lower --cbs", r.Capacity))
		case c.PIR == r.Rate && c.PBS == r.Capacity:
			find("peak", "", r, report.Note, "PIR and PBS are those of the CIR: packets are green or red, and not yellow", "if that is not intended, raise --pir")
		case c.PIR == r.Rate:
			find("peak", "", r, report.Note, "the PIR is the CIR: packets are yellow only in bursts after a pause", "if that is not intended, raise --pir")
		}
	}
	// The worst of all comes first.
	slices.SortStableFunc(order, func(a, b [2]string) int { return slices.Index(kinds, a[0]) - slices.Index(kinds, b[0]) })
	var findings []report.Finding
	for _, key := range order {
		of := says[key]
		if rules := alike[key]; len(rules) > 1 {
			of.Finding += fmt.Sprintf(" (alike: %s)", prefixes(rules[1:]))
		}
		findings = append(findings, s.finding(of.Status, "capacity", of.Finding, of.Advice)...)
	}
	return findings
}

var kinds = []string{"frame", "packet", "rate", "peak", "red"}
