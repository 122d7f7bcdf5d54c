package top

import "github.com/shapectl/shapectl/internal/live"

// samples is how many readings the plots show: a minute at one a second.
const samples = 60

// A point is what a rule did over an interval.
type point struct{ passed, dropped float32 } // bit/s

// A series is the last points of a rule, in a ring.
type series struct {
	points [samples]point
	next   int
	n      int
	seen   uint64 // by which reading
}

func (s *series) add(p point) {
	s.points[s.next] = p
	s.next = (s.next + 1) % samples
	s.n = min(s.n+1, samples)
}

// last is the i-th last point, from 0; zero where there is none.
func (s *series) last(i int) point {
	if s == nil || i >= s.n {
		return point{}
	}
	return s.points[(s.next-1-i+2*samples)%samples]
}

// history is what each rule did lately.
type history struct {
	of      map[live.Key]*series
	reading uint64
}

// add adds a reading, and forgets rules that are gone.
func (h *history) add(r *live.Reading) {
	if h.of == nil {
		h.of = map[live.Key]*series{}
	}
	h.reading++
	for i := range r.Items {
		it := &r.Items[i]
		if it.Interval == 0 {
			continue
		}
		s := h.of[it.Key]
		if s == nil {
			s = &series{}
			h.of[it.Key] = s
		}
		s.seen = h.reading
		s.add(point{float32(it.UseBits().N), float32(it.DroppedBits().N)})
	}
	if len(h.of) <= len(r.Items) {
		return
	}
	for key, s := range h.of {
		if s.seen != h.reading {
			delete(h.of, key)
		}
	}
}

// plot draws the points of rules together in so many cells, the newest on the right. full is the rate of a full cell; 0
// for the highest point. dropped says which cells have lost packets.
func (h *history) plot(rules []*live.Item, cells int, full float64, blocks []rune) (text []rune, dropped []bool) {
	each := max(samples/cells, 1)
	heights := make([]float64, cells)
	dropped = make([]bool, cells)
	for _, it := range rules {
		s := h.of[it.Key]
		for cell := range cells {
			sum := float64(0)
			for i := range each {
				p := s.last(cell*each + i)
				sum += float64(p.passed)
				dropped[cells-1-cell] = dropped[cells-1-cell] || p.dropped > 0
			}
			heights[cells-1-cell] += sum / float64(each)
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
