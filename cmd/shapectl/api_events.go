package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/shapectl/shapectl/internal/events"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/serve"
	"github.com/shapectl/shapectl/pkg/loader"
)

// waitingEvents is how many events wait for a client that does not take them; more are left out.
const waitingEvents = 256

// An eventFeed gives events to all who ask for them. It listens once, as only a few may, and only while somebody asks.
type eventFeed struct {
	listen func(ctx context.Context, ready func(), on func(report.Event)) error

	mutex   sync.Mutex
	clients map[*eventClient]bool
	now     *listening // nil while nobody asks
}

type eventClient struct {
	events  chan report.Event
	leftOut uint64
}

type listening struct {
	ready, ended chan struct{}
	err          error // once it has ended
	stop         context.CancelFunc
}

// addEvents adds the events as they happen: server-sent events, or lines of JSON.
func (a *api) addEvents(s *serve.Server, options loader.Options) {
	feed := &eventFeed{clients: map[*eventClient]bool{}}
	feed.listen = func(ctx context.Context, ready func(), on func(report.Event)) error {
		o := events.Options{Loader: options, OnProblem: func(err error) { a.say(fmt.Sprintf("events: %v", a.env.advise(err))) }}
		return loader.In(a.env.netns, func() error { return events.Listen(ctx, o, ready, on) })
	}
	s.HandleStream("GET /api/v1/events", serve.Reads, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := feed.serve(w, r); err != nil {
			err = fmt.Errorf("events: %w", a.env.advise(err))
			serve.Fail(w, status(exitCode(err), err), exitCode(err), "%v", err)
		}
	}))
}

// serve writes events until the client leaves. An error means that nothing was written.
func (f *eventFeed) serve(w http.ResponseWriter, r *http.Request) error {
	c := &eventClient{events: make(chan report.Event, waitingEvents)}
	l := f.add(c)
	defer f.remove(c)
	select {
	case <-l.ready:
	case <-l.ended:
		return l.err
	case <-r.Context().Done():
		return nil
	}
	sse := strings.Contains(r.Header.Get("Accept"), "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Type", map[bool]string{true: "text/event-stream", false: "application/x-ndjson"}[sse])
	control := http.NewResponseController(w)
	_ = control.Flush() // the header tells the client that somebody listens
	for {
		select {
		case <-r.Context().Done():
			return nil
		case <-l.ended:
			return nil
		case e := <-c.events:
			var line strings.Builder
			if err := e.JSONLine(&line); err != nil {
				return nil
			}
			text := line.String()
			if sse {
				text = "data: " + strings.TrimSuffix(text, "\n") + "\n\n"
			}
			if _, err := w.Write([]byte(text)); err != nil {
				return nil
			}
			if control.Flush() != nil {
				return nil
			}
		}
	}
}

// add has a client told of events from now on.
func (f *eventFeed) add(c *eventClient) *listening {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.clients[c] = true
	if f.now == nil {
		ctx, stop := context.WithCancel(context.Background())
		l := &listening{ready: make(chan struct{}), ended: make(chan struct{}), stop: stop}
		f.now = l
		go func() {
			l.err = f.listen(ctx, func() { close(l.ready) }, f.tell)
			f.mutex.Lock()
			defer f.mutex.Unlock()
			close(l.ended)
			if f.now == l {
				f.now = nil
			}
		}()
	}
	return f.now
}

// remove forgets a client. Packets pay for events only while there is another.
func (f *eventFeed) remove(c *eventClient) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if delete(f.clients, c); len(f.clients) == 0 && f.now != nil {
		f.now.stop()
		f.now = nil
	}
}

// tell gives an event to all. A client that takes none does not hold up the others.
func (f *eventFeed) tell(e report.Event) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	for c := range f.clients {
		mine := e
		mine.LeftOut += c.leftOut
		select {
		case c.events <- mine:
			c.leftOut = 0
		default:
			c.leftOut++
		}
	}
}
