package main

import (
	"encoding/json"
	"net/http"

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
		encoder := json.NewEncoder(w)
		encoder.SetEscapeHTML(false)
		_ = encoder.Encode(reading.Top()) // an answer that is too large is an error of its own
	}))
}
