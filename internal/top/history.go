package top

import "github.com/shapectl/shapectl/internal/live"

// samples is how many readings the plots show: a minute at one a second.
const samples = 60

// blocks are what plots are drawn with.
var blocks = []rune("▁▂▃▄▅▆▇█")

// A point is what a rule did over an interval.
type point struct{ passed, dropped float32 } // bit/s

// history is what each rule did in the last readings: the reading n is at n % samples.
type history struct {
	of map[live.Key]*[samples]point
	n  int
}

// add adds a reading, and forgets rules that are gone.
func (h *history) add(r *live.Reading) {
	h.n++
	now := make(map[live.Key]*[samples]point, len(r.Items))
	for i := range r.Items {
		it := &r.Items[i]
		points := h.of[it.Key]
		if points == nil {
			points = new([samples]point)
		}
		points[h.n%samples] = point{float32(it.UseBits().N), float32(it.DroppedBits().N)}
		now[it.Key] = points
	}
	h.of = now
}

// plot draws the points of rules together in so many cells, the newest on the right. full is the rate of a full cell; 0
// for the highest point. dropped says which cells have lost packets.
func (h *history) plot(rules []*live.Item, cells int, full float64) (text []rune, dropped []bool) {
	each := max(samples/cells, 1)
	heights := make([]float64, cells)
	dropped = make([]bool, cells)
	for _, it := range rules {
		points := h.of[it.Key]
		for i := 0; points != nil && i < min(cells*each, samples); i++ {
			cell, p := cells-1-i/each, points[(h.n-i+samples)%samples]
			heights[cell] += float64(p.passed) / float64(each)
			dropped[cell] = dropped[cell] || p.dropped > 0
		}
	}
	if full == 0 {
		for _, height := range heights {
			full = max(full, height)
		}
	}
	text = make([]rune, cells)
	for i, height := range heights {
		text[i] = ' '
		if height > 0 && full > 0 {
			text[i] = blocks[min(int(height/full*float64(len(blocks))), len(blocks)-1)]
		}
	}
	return text, dropped
}
