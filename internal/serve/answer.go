package serve

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The places of requests that are under way. Who reads over TCP takes none from those who read over the socket.
// Readers and those who measure take none from changes: a change must be confirmed in time.
const (
	readingTCP = iota
	readingSocket
	streamingTCP
	streamingSocket
	measuring
	computing
	changing
	places
)

var (
	// mostAtOnce are the places of each kind. Changes would wait for each other anyway.
	mostAtOnce = [places]int{8, 8, 32, 32, 4, 2, 1}
	// waitForPlace is how long a request waits for a place, and a change for those before it.
	waitForPlace = [places]time.Duration{5 * time.Second, 5 * time.Second, 0, 0, 15 * time.Second, 15 * time.Second, 15 * time.Second}
)

// mostOfUser are the places for reading over the socket that a user may take, other than the owner.
const mostOfUser = 4

// MaxAnswer is the size of the largest answer.
const MaxAnswer = 64 << 20

// An Answer is what a handler answers. It is sent when the handler has returned.
type Answer struct {
	header http.Header
	status int
	text   bytes.Buffer
	zip    *gzip.Writer // into text; nil for a client that does not take that
	length int          // of the text before it was compressed
	// Over means that the text is too large. It is then not sent, but an error.
	Over bool
}

func (a *Answer) Header() http.Header { return a.header }

// WriteHeader sets the status; the last one counts.
func (a *Answer) WriteHeader(status int) { a.status = status }

func (a *Answer) Write(text []byte) (int, error) {
	if a.Over = a.Over || a.text.Len()+len(text) > MaxAnswer; a.Over {
		a.text.Reset()
		return 0, errors.New("the answer is too large")
	}
	if a.length += len(text); a.zip != nil {
		return a.zip.Write(text)
	}
	return a.text.Write(text)
}

// Discard forgets the text so far.
func (a *Answer) Discard() {
	a.length = 0
	if a.text.Reset(); a.zip != nil {
		a.zip.Reset(&a.text)
	}
}

// Len is the size of the text so far.
func (a *Answer) Len() int { return a.length }

// zips are writers that are used again, as each takes a megabyte.
var zips = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // which fails only for levels that do not exist
	return w
}}

// acceptsGzip reports whether the client of a request wants answers compressed by gzip. With a weight of 0, it does not.
func acceptsGzip(h http.Header) bool {
	for part := range strings.SplitSeq(strings.Join(h.Values("Accept-Encoding"), ","), ",") {
		coding, weight, _ := strings.Cut(strings.ReplaceAll(part, " ", ""), ";")
		q, err := strconv.ParseFloat(strings.TrimPrefix(weight, "q="), 64)
		if coding == "gzip" && (err != nil || q > 0) {
			return true
		}
	}
	return false
}

type bodyKey struct{}

// Body is the whole body of a request.
func Body(r *http.Request) []byte {
	text, _ := r.Context().Value(bodyKey{}).([]byte)
	return text
}

// enter waits for a place. It answers and returns false if there is none in time.
func enter(places chan struct{}, wait time.Duration, w http.ResponseWriter, r *http.Request) bool {
	select {
	case places <- struct{}{}:
		return true
	default:
	}
	late := time.NewTimer(wait)
	defer late.Stop()
	select {
	case places <- struct{}{}:
		return true
	case <-r.Context().Done():
	case <-late.C:
		w.Header().Set("Retry-After", "1")
		Fail(w, http.StatusServiceUnavailable, exitKernel, "too many requests are under way; nothing was changed; try again")
	}
	return false
}

// bounded calls a handler if the client may, one of few at once.
func (s *Server) bounded(who Access, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.permitted(who, w, r) {
			return
		}
		defer s.clients.holds(peerOf(r).conn, s.bodySize(r))()
		r, ok := s.withBody(who, w, r)
		if !ok {
			return
		}
		kind := readingTCP
		switch {
		case who == Measures:
			kind = measuring
		case who == Computes:
			kind = computing
		case who == Changes:
			kind = changing
			if !s.changes.Allow() {
				w.Header().Set("Retry-After", "1")
				Fail(w, http.StatusTooManyRequests, exitInput, "too many changes; nothing was changed; wait")
				return
			}
		case peerOf(r).overSocket():
			kind = readingSocket
		}
		if a := s.handle(kind, next, w, r); a != nil {
			s.send(a, w, r)
		}
	})
}

// handle returns what a handler answers; nil if it was not called.
func (s *Server) handle(kind int, next http.Handler, w http.ResponseWriter, r *http.Request) *Answer {
	if p := peerOf(r); kind == readingSocket && !p.isOwner() {
		all, _ := s.ofUser.LoadOrStore(p.conn.uid, make(chan struct{}, mostOfUser))
		places := all.(chan struct{})
		if !enter(places, waitForPlace[kind], w, r) {
			return nil
		}
		defer func() { <-places }()
	}
	if !enter(s.places[kind], waitForPlace[kind], w, r) {
		return nil
	}
	defer func() { <-s.places[kind] }()
	defer s.clients.busy(peerOf(r).conn)()
	if r.Context().Err() != nil {
		return nil // it left while it waited
	}
	a := &Answer{header: w.Header(), status: http.StatusOK}
	if acceptsGzip(r.Header) {
		a.zip = zips.Get().(*gzip.Writer)
		a.zip.Reset(&a.text)
		defer zips.Put(a.zip)
	}
	next.ServeHTTP(a, r)
	if a.zip != nil && a.length > 0 {
		a.zip.Close() // to memory
		a.header.Set("Content-Encoding", "gzip")
	}
	return a
}

// send sends an answer. A client that takes it slowly keeps no place, and is the first to go if there are many.
func (s *Server) send(a *Answer, w http.ResponseWriter, r *http.Request) {
	a.header.Add("Vary", "Accept-Encoding")
	if a.Over {
		a.header.Del("Content-Encoding")
		Fail(w, http.StatusBadRequest, exitInput, "the answer has more than %d MB; ask for less", MaxAnswer>>20)
		return
	}
	defer s.clients.holds(peerOf(r).conn, a.text.Len())()
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTime)) // tests have none
	if a.status != http.StatusNoContent && a.status != http.StatusNotModified {
		a.header.Set("Content-Length", strconv.Itoa(a.text.Len()))
	}
	w.WriteHeader(a.status)
	_, _ = w.Write(a.text.Bytes()) // the client may have left
}

// bodySize is how many bytes the body of a request may have.
func (s *Server) bodySize(r *http.Request) int {
	if r.ContentLength < 0 {
		return int(s.o.MaxBody)
	}
	return int(min(r.ContentLength, s.o.MaxBody))
}

// withBody reads the body, before a request takes a place.
func (s *Server) withBody(who Access, w http.ResponseWriter, r *http.Request) (*http.Request, bool) {
	if who == Static {
		return r, true // nobody looks at it
	}
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		if r.ContentLength != 0 {
			Fail(w, http.StatusBadRequest, exitInput, "a GET has no body; send a POST if there is one")
			return r, false
		}
		return r, true
	}
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		Fail(w, http.StatusUnsupportedMediaType, exitInput, "the body must be JSON: send 'Content-Type: application/json'")
		return r, false
	}
	var text bytes.Buffer
	text.Grow(s.bodySize(r) + bytes.MinRead) // or it would take a multiple, for a while
	_, err := text.ReadFrom(http.MaxBytesReader(w, r.Body, s.o.MaxBody))
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		Fail(w, http.StatusRequestEntityTooLarge, exitInput, "the body has more than %d bytes; start serve with a larger --max-body", s.o.MaxBody)
		return r, false
	case err != nil:
		Fail(w, http.StatusBadRequest, exitInput, "the body is incomplete")
		return r, false
	}
	r = r.WithContext(context.WithValue(r.Context(), bodyKey{}, text.Bytes()))
	r.Body = io.NopCloser(&text) // for handlers that know nothing of Body
	return r, true
}

// streamed calls a handler whose answer ends when the client leaves or the server stops.
func (s *Server) streamed(who Access, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.permitted(who, w, r) {
			return
		}
		r, ok := s.withBody(who, w, r)
		if !ok {
			return
		}
		kind := streamingTCP
		if peerOf(r).overSocket() {
			kind = streamingSocket
		}
		if !enter(s.places[kind], waitForPlace[kind], w, r) {
			return
		}
		defer func() { <-s.places[kind] }()
		defer s.clients.busy(peerOf(r).conn)()
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		go func() {
			select {
			case <-s.stopping:
				cancel()
			case <-ctx.Done():
			}
		}()
		next.ServeHTTP(stream{w, http.NewResponseController(w)}, r.WithContext(ctx))
	})
}

// A stream ends if the client does not take a part of it in time.
type stream struct {
	http.ResponseWriter
	control *http.ResponseController
}

func (d stream) Write(text []byte) (int, error) {
	_ = d.control.SetWriteDeadline(time.Now().Add(writeTime))
	return d.ResponseWriter.Write(text)
}

func (d stream) Flush() { _ = d.FlushError() }

func (d stream) FlushError() error {
	_ = d.control.SetWriteDeadline(time.Now().Add(writeTime))
	return d.control.Flush()
}

func (d stream) Unwrap() http.ResponseWriter { return d.ResponseWriter }
