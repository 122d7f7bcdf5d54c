package report

import (
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
)

// Bits and Bytes write figures as all tables have them.
func Bits(n uint64) string { return bitsText(n) }

// Bytes is Bits for bytes.
func Bytes(n uint64) string { return bytesText(n) }

// RateText is the rate, and who has it.
func (r *Rule) RateText() string { return r.rate() }

// Facts says in one line what a rule or pool is.
func Facts(it *live.Item) string {
	rule, says := NewRule(it), it.Sentence()
	for _, more := range []string{state(rule), rule.Note} {
		if more != "" {
			says += "; " + more
		}
	}
	return plain.Line(says)
}
