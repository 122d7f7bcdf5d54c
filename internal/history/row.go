package history

import (
	"encoding/binary"
	"slices"
	"time"
)

// Rows are the readings of a chunk that is not full yet: each as differences from the one before it, unless that had
// other series. They are written as they come.

const (
	wholeRow = 0
	nextRow  = 1
)

func appendRow(b []byte, r, before *Reading) []byte {
	same := before != nil && slices.EqualFunc(r.Samples, before.Samples, func(a, b Sample) bool { return a.Series == b.Series })
	if !same {
		b = append(b, wholeRow)
		before = &Reading{Time: time.Unix(0, 0), Samples: make([]Sample, len(r.Samples))}
	} else {
		b = append(b, nextRow)
	}
	b = appendInt(b, r.Time.UnixNano()-before.Time.UnixNano())
	b = binary.AppendUvarint(b, r.Mono-before.Mono)
	b = appendBytes(b, r.Policy)
	if !same {
		b = appendSeries(b, len(r.Samples), func(i int) *Series { return &r.Samples[i].Series })
	}
	for c := range columns {
		for i := range r.Samples {
			b = appendInt(b, int64(r.Samples[i].columns()[c]-before.Samples[i].columns()[c]))
		}
	}
	return b
}

// readRow is the inverse of appendRow.
func readRow(b []byte, before *Reading) (*Reading, error) {
	if len(b) == 0 {
		return nil, errDamaged
	}
	r := reader{b: b[1:]}
	if b[0] == wholeRow {
		before = &Reading{Time: time.Unix(0, 0)}
	} else if before == nil {
		return nil, errDamaged
	}
	row := &Reading{Time: before.Time.Add(time.Duration(r.int())), Mono: before.Mono + r.uint(), Policy: r.string()}
	if b[0] == wholeRow {
		for _, s := range r.series() {
			row.Samples = append(row.Samples, Sample{Series: s})
		}
	} else {
		row.Samples = slices.Clone(before.Samples)
	}
	for c := range columns {
		for i := range row.Samples {
			s := &row.Samples[i]
			counted := s.columns()
			counted[c] += uint64(r.int())
			s.Counters = fromColumns(counted)
		}
	}
	return row, r.err
}
