package main

import "io"

// pages is a buffer that grows without copying.
type pages [][]byte

const (
	firstPage = 1 << 12
	doublings = 8 // of pages, until they are as large as they get
	mostPage  = firstPage << doublings
)

func (p *pages) Write(text []byte) (int, error) {
	n := len(text)
	for len(text) > 0 {
		last := len(*p) - 1
		if last < 0 || len((*p)[last]) == cap((*p)[last]) {
			*p = append(*p, make([]byte, 0, firstPage<<min(len(*p), doublings)))
			last++
		}
		page := (*p)[last]
		fits := min(len(text), cap(page)-len(page))
		(*p)[last], text = append(page, text[:fits]...), text[fits:]
	}
	return n, nil
}

// WriteTo writes all pages, and frees each after it is written.
func (p *pages) WriteTo(w io.Writer) (n int64, err error) {
	for i, page := range *p {
		m, err := w.Write(page)
		n += int64(m)
		if err != nil {
			return n, err
		}
		(*p)[i] = nil
	}
	return n, nil
}
