package events

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// A source is a Feed, and what it is told.
type source struct {
	*Feed
	tell    chan report.Event
	idle    chan struct{} // takes once clients were sent all that was told
	end     chan error
	running atomic.Int32
	kinds   atomic.Pointer[[]string] // of the last one that listened
}

func newSource() *source {
	s := &source{Feed: NewFeed("", Options{}), tell: make(chan report.Event), idle: make(chan struct{}), end: make(chan error)}
	s.listen = func(ctx context.Context, o Options, ready func(), on func(report.Event)) error {
		s.running.Add(1)
		defer s.running.Add(-1)
		s.kinds.Store(&o.Kinds)
		ready()
		for {
			select {
			case <-ctx.Done():
				return nil
			case err := <-s.end:
				return err
			case e := <-s.tell:
				on(e)
			case <-s.idle:
			}
		}
	}
	return s
}

// join listens until the test ends or leave is called.
func (s *source) join(t *testing.T, kinds []string, only Filter, on func(report.Event)) (leave func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- s.Listen(ctx, kinds, only, func() { close(ready) }, on)
	}()
	<-ready
	return func() error {
		cancel()
		return <-ended
	}
}

func TestFeed(t *testing.T) {
	s := newSource()
	all, slow, changes := make(chan report.Event), make(chan report.Event), make(chan report.Event, 10)
	others := make(chan report.Event, 10)
	leaveAll := s.join(t, nil, nil, func(e report.Event) { all <- e })
	leaveOthers := s.join(t, nil, Filter{{name: "eth1"}}, func(e report.Event) { others <- e })
	leaveSlow := s.join(t, nil, nil, func(e report.Event) { slow <- e })
	if s.running.Load() != 1 {
		t.Errorf("%d listen for three clients", s.running.Load())
	}
	leaveChanges := s.join(t, []string{report.ChangeBegun, report.LeftOut}, nil, func(e report.Event) { changes <- e })
	if kinds := *s.kinds.Load(); s.running.Load() != 2 || slices.ContainsFunc(kinds, ofPackets) {
		t.Errorf("%d listen, to %v, for a client that wants nothing of packets", s.running.Load(), kinds)
	}
	testenv.Must(t, leaveChanges())
	testenv.Eventually(t, "nobody listens for the client that left", func() bool { return s.running.Load() == 1 })

	const events = 3 * waiting / 2
	for n := range uint64(events + 1) {
		s.tell <- report.Event{Kind: report.Overflow, LeftOut: 5 * (n / events)}
		if e := <-all; e.LeftOut != 5*(n/events) {
			t.Errorf("a client that keeps up lost %d", e.LeftOut)
		}
	}
	s.idle <- struct{}{}
	if e := <-others; e.Kind != report.LeftOut || e.LeftOut != 5 {
		t.Errorf("a client that asks for another device is told %+v, not that 5 were left out", e)
	}
	var told, lost uint64
	for told+lost < events+1+5 {
		e := <-slow
		if lost += e.LeftOut; e.Kind != report.LeftOut {
			told++
		}
	}
	if told+lost != events+1+5 || told > waiting+1 {
		t.Errorf("a slow client was told of %d and lost %d, of %d", told, lost, events+1+5)
	}

	testenv.Must(t, leaveAll())
	testenv.Must(t, leaveOthers())
	testenv.Must(t, leaveSlow())
	testenv.Eventually(t, "nobody listens without clients", func() bool { return s.running.Load() == 0 })

	leave := s.join(t, nil, nil, func(report.Event) {})
	wrong := errors.New("wrong")
	s.end <- wrong
	if err := leave(); err != nil && !errors.Is(err, wrong) {
		t.Errorf("a client hears %v", err)
	}
	testenv.Must(t, s.join(t, nil, nil, func(report.Event) {})())
}
