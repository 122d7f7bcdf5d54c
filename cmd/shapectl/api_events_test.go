package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// All clients share one listening, which ends with the last of them. A slow client loses events, and is told how many.
func TestEventFeed(t *testing.T) {
	started, ended := make(chan func(report.Event), 3), make(chan bool, 3)
	f := &eventFeed{clients: map[*eventClient]bool{}, listen: func(ctx context.Context, ready func(), on func(report.Event)) error {
		ready()
		started <- on
		<-ctx.Done()
		ended <- true
		return nil
	}}
	ask := func(accept string) (*httptest.ResponseRecorder, func()) {
		ctx, leave := context.WithCancel(context.Background())
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/api/v1/events", nil)
		r.Header.Set("Accept", accept)
		w, left := httptest.NewRecorder(), make(chan error)
		clients := func() int {
			f.mutex.Lock()
			defer f.mutex.Unlock()
			return len(f.clients)
		}
		before := clients()
		go func() { left <- f.serve(w, r) }()
		testenv.Eventually(t, "a client", func() bool { return clients() > before })
		return w, func() {
			testenv.Eventually(t, "events to be written", func() bool {
				f.mutex.Lock()
				defer f.mutex.Unlock()
				for c := range f.clients {
					if len(c.events) > 0 {
						return false
					}
				}
				return true
			})
			leave()
			if err := <-left; err != nil {
				t.Error(err)
			}
		}
	}
	page, leavePage := ask("text/event-stream")
	on := <-started
	script, leaveScript := ask("application/json")
	slow := &eventClient{events: make(chan report.Event, 1)}
	f.add(slow)
	for range 3 {
		on(report.Event{Kind: report.Overflow, Device: "eth0"})
	}
	<-slow.events
	on(report.Event{Kind: report.Overflow})
	if e := <-slow.events; e.LeftOut != 2 {
		t.Errorf("left out: %d", e.LeftOut)
	}
	leavePage()
	leaveScript()
	if n := strings.Count(page.Body.String(), "data: {"); n != 4 || !strings.HasSuffix(page.Body.String(), "}\n\n") {
		t.Errorf("server-sent events: %q", page.Body)
	}
	if lines := strings.Split(script.Body.String(), "\n"); len(lines) != 5 || !strings.HasPrefix(lines[0], `{"time"`) {
		t.Errorf("lines: %q", lines)
	}
	if len(started) > 0 || len(ended) > 0 {
		t.Error("not one listening for all")
	}
	f.remove(slow)
	<-ended

	f.listen = func(context.Context, func(), func(report.Event)) error { return errors.New("no maps") }
	if err := f.serve(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)); err == nil || err.Error() != "no maps" {
		t.Errorf("an error of listening: %v", err)
	}
}
