package replay

import (
	"io"
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// A chart has at most mostBins intervals. It has at least half as many, unless the
	// trace is shorter than firstWidth * mostBins.
	mostBins   = 400
	firstWidth = 1000 // ns
)

// A Chart shows the offered and passed rates and the bucket level over time, in equal
// intervals. The length of a trace is known only at its end, so pairs of intervals are
// joined whenever there are too many.
type Chart struct {
	limits Limits
	bins   []bin
	width  uint64 // ns of a bin
	start  uint64 // ns: time of the first packet
	began  bool
}

type bin struct {
	offered, passed uint64    // bytes, by arrival time and by departure time
	level, second   uint64    // units: the highest level of any bucket, and of any second one
	colours         [3]uint64 // bytes of packets with colours, by arrival time
}

// NewChart returns a chart without packets.
func NewChart(l Limits) *Chart { return &Chart{limits: l, width: firstWidth} }

// Add counts a packet. Packets that match no rule are not in the chart. A packet from
// before the first one counts in the first interval.
func (c *Chart) Add(r Result) {
	if r.Rule == NoRule {
		return
	}
	if !c.began {
		c.began, c.start = true, r.Time
	}
	b := c.bin(r.Time)
	b.offered += r.Bytes
	b.level, b.second = max(b.level, r.Level), max(b.second, r.Second)
	if c.limits.Rules[r.Rule].Algorithm.HasColours() {
		b.colours[r.Colour] += r.Bytes
	}
	if r.Verdict != model.Drop {
		c.bin(r.Departure()).passed += r.Bytes
	}
}

// bin returns the interval that contains a time.
func (c *Chart) bin(at uint64) *bin {
	at -= min(at, c.start)
	for at/c.width >= mostBins {
		c.join()
	}
	for uint64(len(c.bins)) <= at/c.width {
		c.bins = append(c.bins, bin{})
	}
	return &c.bins[at/c.width]
}

func (c *Chart) join() {
	joined := c.bins[:0]
	for pair := range slices.Chunk(c.bins, 2) {
		b := pair[0]
		for _, other := range pair[1:] {
			b.offered, b.passed = b.offered+other.offered, b.passed+other.passed
			b.level, b.second = max(b.level, other.level), max(b.second, other.second)
			for i, bytes := range other.colours {
				b.colours[i] += bytes
			}
		}
		joined = append(joined, b)
	}
	c.bins, c.width = joined, 2*c.width
}

// WriteSVG draws the chart: rates at the top, levels below. The title may have several lines.
func (c *Chart) WriteSVG(w io.Writer, title string) error { return c.draw(title).writeSVG(w) }

// limit returns the rule of the chart, and whether it has a single bucket. The rules of one
// chart differ only in their prefixes.
func (c *Chart) limit() (rule policy.Rule, one bool) {
	rule = c.limits.Rules[0]
	return rule, len(c.limits.Rules) == 1 && rule.Each.Kind == policy.EachAll
}
