package report

import (
	"bufio"
	"io"
)

// Line is what a line is limited to.
type Line struct {
	Device     string          `json:"device"`
	Directions []LineDirection `json:"directions"` // that are limited, uploads first
	// Policy is the policy of the line, in YAML, without the other limits of the host.
	Policy string `json:"policy"`
	// Applied is what changed; null with --dry-run.
	Applied *Applied `json:"applied"`
}

// LineDirection is a direction of a line.
type LineDirection struct {
	Direction string `json:"direction"`
	LineRate  uint64 `json:"line_bits_per_second"` // as it was given
	Rate      uint64 `json:"rate_bits_per_second"` // of the pool
	Share     string `json:"share"`
	Excess    string `json:"excess"`
	Sentence  string `json:"sentence"`
}

// Text writes a sentence for each direction, and how much changed; without a change only the policy.
func (l Line) Text(w io.Writer) error {
	if l.Applied == nil {
		_, err := io.WriteString(w, l.Policy)
		return err
	}
	text := bufio.NewWriter(w)
	for _, d := range l.Directions {
		text.WriteString(d.Sentence + "\n")
	}
	if err := text.Flush(); err != nil {
		return err
	}
	return l.Applied.Text(w)
}
