package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"net/http"
	"strings"
	"sync"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/serve"
	"github.com/shapectl/shapectl/internal/serve/page"
	"github.com/shapectl/shapectl/pkg/loader"
)

// addPage adds the web page, and the readings that it shows. All who ask share one reading a second.
func (a *api) addPage(s *serve.Server, options loader.Options) {
	files := page.Handler()
	s.Handle("/{$}", serve.Static, files)
	s.Handle("/{file}", serve.Static, files)
	live := measure.NewLive(&measure.Reader{Options: options, Netns: a.env.netns}, measure.What{Fullest: fullestBuckets}, usualInterval)
	var last readingText
	s.Handle("GET /api/v1/top", serve.Reads, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reading, err := live.Latest(r.Context())
		if reading == nil {
			e, _ := a.env.inner()
			err = e.advise(err)
			code := exitCode(err)
			serve.Fail(w, status(code, err), code, "top: %v", err)
			return
		}
		h := w.Header()
		h.Set("Content-Type", "application/json")
		h.Set("Cache-Control", "no-store")
		h.Set("Vary", "Accept-Encoding")
		small := strings.Contains(r.Header.Get("Accept-Encoding"), "gzip")
		if small {
			h.Set("Content-Encoding", "gzip")
		}
		_, _ = w.Write(last.of(reading, small)) // what is too large is an error of its own
	}))
}

// A readingText keeps the text of a reading, for all who ask for it.
type readingText struct {
	mutex       sync.Mutex
	reading     *measure.Reading
	text, small []byte // small is compressed; nil until somebody asks for it
}

// of is the text of a reading, compressed or not.
func (t *readingText) of(reading *measure.Reading, small bool) []byte {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.reading != reading {
		var text bytes.Buffer
		encoder := json.NewEncoder(&text)
		encoder.SetEscapeHTML(false)
		must(encoder.Encode(reading.Top()))
		t.reading, t.text, t.small = reading, text.Bytes(), nil
	}
	if !small {
		return t.text
	}
	if t.small == nil {
		var text bytes.Buffer
		w, err := gzip.NewWriterLevel(&text, gzip.BestSpeed)
		must(err)
		_, err = w.Write(t.text)
		must(err)
		must(w.Close())
		t.small = text.Bytes()
	}
	return t.small
}
