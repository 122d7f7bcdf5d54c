package events

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

// waiting is how many events wait for a client. A client that falls behind further loses some.
const waiting = 1000

// A Feed lets many clients in a process share what is heard: the kernel has one listener for all of them, and none while
// there are none, or while they want nothing of packets.
type Feed struct {
	netns   string // as netns.In takes it
	options Options
	listen  func(context.Context, Options, func(), func(report.Event)) error // Listen, but in tests

	mutex sync.Mutex
	heard [2]*hearing // for clients that want nothing of packets, and for others
}

// A hearing is one call of Listen, for as long as it has clients.
type hearing struct {
	clients map[*client]bool
	stop    context.CancelFunc
	ready   chan struct{} // closed when it listens
	ended   chan struct{} // closed when it does not any more
	err     error         // why
}

type client struct {
	kinds  []string
	only   Filter
	events chan report.Event
	mutex  sync.Mutex
	lost   uint64 // not told of yet
}

// NewFeed makes a Feed of a network namespace. Kinds and Only of o are those of each client.
func NewFeed(netns string, o Options) *Feed { return &Feed{netns: netns, options: o, listen: Listen} }

// Listen calls on for each event of these kinds, nil for all, that only lets through, as the function Listen does. Events
// that come faster than on takes them are left out, and counted.
func (f *Feed) Listen(ctx context.Context, kinds []string, only Filter, ready func(), on func(report.Event)) error {
	c := &client{kinds: kinds, only: only, events: make(chan report.Event, waiting)}
	h := f.join(c)
	defer f.leave(h, c)
	late := time.NewTicker(leftAfter)
	defer late.Stop()
	begun := h.ready
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-begun:
			if begun = nil; ready != nil {
				ready()
			}
		case e := <-c.events:
			e.LeftOut += c.takeLost()
			on(e)
		case <-late.C:
			if len(c.events) > 0 {
				continue // the next one tells
			}
			if n := c.takeLost(); n > 0 {
				e := leftOut(n)
				e.Time = time.Now()
				on(e)
			}
		case <-h.ended:
			return h.err
		}
	}
}

// join adds a client. The first one begins to listen.
func (f *Feed) join(c *client) *hearing {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	which, options := 0, f.options
	options.Kinds = slices.DeleteFunc(slices.Clone(report.EventKinds), ofPackets)
	if c.kinds == nil || slices.ContainsFunc(c.kinds, ofPackets) {
		which, options.Kinds = 1, nil
	}
	h := f.heard[which]
	if h != nil {
		select {
		case <-h.ended: // by itself
			h = nil
		default:
		}
	}
	if h == nil {
		ctx, stop := context.WithCancel(context.Background())
		h = &hearing{clients: map[*client]bool{}, stop: stop, ready: make(chan struct{}), ended: make(chan struct{})}
		f.heard[which] = h
		go f.hear(ctx, h, options)
	}
	h.clients[c] = true
	return h
}

// ofPackets reports whether packets pay for events of a kind.
func ofPackets(kind string) bool {
	for _, name := range kindNames {
		if name == kind {
			return true
		}
	}
	return false
}

// leave removes a client. The last one ends listening.
func (f *Feed) leave(h *hearing, c *client) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if delete(h.clients, c); len(h.clients) > 0 {
		return
	}
	h.stop()
	for i := range f.heard {
		if f.heard[i] == h {
			f.heard[i] = nil
		}
	}
}

// hear listens for clients.
func (f *Feed) hear(ctx context.Context, h *hearing, o Options) {
	defer close(h.ended)
	h.err = netns.Stay(ctx, f.netns, func(ctx context.Context) error {
		return f.listen(ctx, o, func() { close(h.ready) }, func(e report.Event) { f.send(h, e) })
	})
	if h.err == nil && ctx.Err() == nil {
		h.err = errors.New("the events ended")
	}
}

// send gives an event to the clients that want it, and waits for none of them.
func (f *Feed) send(h *hearing, e report.Event) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	for c := range h.clients {
		c.send(e)
	}
}

func (c *client) send(e report.Event) {
	switch {
	case e.Kind == report.LeftOut: // is told with the next one
		c.lose(e.LeftOut)
	case c.kinds != nil && !slices.Contains(c.kinds, e.Kind), !c.only.Matches(e):
		c.lose(e.LeftOut)
	default:
		select {
		case c.events <- e:
		default:
			c.lose(1 + e.LeftOut)
		}
	}
}

func (c *client) lose(n uint64) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.lost += n
}

func (c *client) takeLost() (n uint64) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	n, c.lost = c.lost, 0
	return n
}

// leftOut says that events were left out.
func leftOut(n uint64) report.Event {
	return report.Event{Kind: report.LeftOut, LeftOut: n, Sentence: fmt.Sprintf("%s of packets left out", plain.Count(n, "event"))}
}
