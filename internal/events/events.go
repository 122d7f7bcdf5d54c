// Package events tells what happens in a network namespace, as it happens: buckets that overflow, penalties, guarantees
// that are refused, changes of rules, and devices that come and go. Packets pay nothing while nobody listens.
package events

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/listener"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	mostEvents = 100                    // of packets in a second
	lookEvery  = 100 * time.Millisecond // at changes and rules
	renewEvery = time.Second            // the lease, see listener.Lease
	leftAfter  = time.Second            // events that were left out are told of without another event
	patience   = 50 * time.Millisecond  // with a command at work: the lease must be renewed meanwhile
)

// Options say what to listen to.
type Options struct {
	Loader loader.Options
	// Kinds are kinds of report.EventKinds; nil for all.
	Kinds []string
	// Only lets events through. LeftOut of one that it lets through counts since the last such event.
	Only Filter
	// OnProblem is called for what keeps events from being told for a while.
	OnProblem func(error)
}

// Listen calls on for each event in the network namespace of the calling thread, until ctx is done. It calls ready, which
// may be nil, when it listens. It goes on when rules are flushed, the maps grow, or another build of the same layout takes over.
// The error wraps fs.ErrPermission without the capabilities to listen.
func Listen(ctx context.Context, o Options, ready func(), on func(report.Event)) error {
	s := &session{Options: o, on: on, arrivals: netinfo.NewArrivals(), packets: make(chan listener.Event)}
	defer s.close()
	if err := s.begin(); err != nil {
		return err
	}
	if ready != nil {
		ready()
	}
	look, renew := time.NewTicker(lookEvery), time.NewTicker(renewEvery)
	defer look.Stop()
	defer renew.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return s.look() // what happened last
		case e := <-s.packets:
			err = s.packet(e)
		case <-s.arrivals.More():
			err = s.follow()
		case <-s.cgroups.More():
			err = s.follow()
		case <-look.C:
			if err = s.followMaps(); err == nil {
				err = s.look()
			}
		case <-renew.C:
			if err = s.renew(); err == nil {
				err = s.lookAtLacks()
			}
			s.lookAtQuotas()
		}
		if err != nil {
			return err
		}
	}
}

// A session is one call of Listen.
type session struct {
	Options
	on       func(report.Event)
	arrivals *netinfo.Arrivals
	cgroups  netinfo.CgroupArrivals
	devices  devices

	store      *maps.Store // nil where there are no rules, or those of another layout
	generation loader.Generation
	problem    string // that OnProblem was last called with
	listener   *listener.Listener
	stop       chan struct{} // ends the reader of listener
	packets    chan listener.Event
	leftOut    uint64    // of the listener, as far as told
	leftSince  time.Time // when more were left out than told; zero for none

	change change
	rules  rules
	lacks  lacks
	quotas quotas
	leased map[string]bool // whether a pool with a cluster has a lease
}

// begin takes what there is as known.
func (s *session) begin() error {
	err := s.open(loader.Generation{}) // which refuses callers without the capabilities
	if errors.Is(err, maps.ErrOtherLayout) {
		s.generation, _ = loader.CurrentGeneration(s.Loader)
		err = s.report(err)
	}
	if err != nil {
		return err
	}
	if err := s.follow(); err != nil {
		return err
	}
	s.Loader.Patience = patience
	if s.store != nil {
		s.change.look(s.store, func(report.Event) {})
	}
	if err := s.lookAtRules(); err != nil {
		return err
	}
	if err := s.followCgroups(); err != nil {
		return err
	}
	s.lookAtLeases()
	s.lookAtQuotas()
	return s.lookAtLacks()
}

// open opens the maps of a generation, and listens to it.
func (s *session) open(generation loader.Generation) error {
	o := s.Loader
	o.Renews = true
	n, err := loader.Read(o)
	if err != nil {
		return err
	}
	store, opened, err := n.Maps()
	n.Close()
	if err != nil {
		if errors.Is(err, maps.ErrOtherLayout) {
			s.closeStore()
			s.generation = generation // there is nothing more to learn from it
		}
		return err
	}
	if store != nil && s.listener != nil && s.listener.Moves(store.Listeners()) {
		s.store.Close()
		s.store, s.generation = store, opened
		return nil
	}
	s.closeStore()
	s.store, s.generation = store, opened
	if store == nil {
		s.generation = generation
		return nil
	}
	return s.listen()
}

// listen lets packets tell of the kinds that are asked for.
func (s *session) listen() (err error) {
	var kinds []listener.EventKind
	for kind, name := range kindNames {
		if s.wants(name) {
			kinds = append(kinds, kind)
		}
	}
	if kinds == nil {
		return nil
	}
	if s.listener, err = s.store.Listeners().Listen(mostEvents, kinds...); err != nil {
		return err
	}
	s.leftOut, s.leftSince, s.stop = 0, time.Time{}, make(chan struct{})
	go func(l *listener.Listener, stop chan struct{}) {
		for {
			e, err := l.Next(time.Time{})
			if errors.Is(err, os.ErrClosed) {
				return
			}
			if err != nil {
				time.Sleep(lookEvery)
				continue
			}
			select {
			case s.packets <- e:
			case <-stop:
				return
			}
		}
	}(s.listener, s.stop)
	return nil
}

func (s *session) closeListener() {
	if s.listener != nil {
		close(s.stop)
		s.listener.Close()
		s.listener = nil
	}
}

func (s *session) closeStore() {
	s.closeListener()
	if s.store != nil {
		s.store.Close()
		s.store = nil
	}
}

func (s *session) close() {
	s.closeStore()
	s.arrivals.Close()
	s.cgroups.Close()
}

// report calls OnProblem for errors that may pass, and returns others.
func (s *session) report(err error) error {
	if err == nil {
		return nil
	}
	passes := errors.Is(err, maps.ErrOtherLayout) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, listener.ErrFull)
	if !passes {
		return err
	}
	if text := err.Error(); text != s.problem {
		s.problem = text
		s.OnProblem(err)
	}
	return nil
}

// followMaps goes on with other maps, if there are others.
func (s *session) followMaps() error {
	generation, err := loader.CurrentGeneration(s.Loader)
	if err == nil && generation != s.generation {
		err = s.open(generation)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil // another command is at work: soon
	}
	return s.report(err)
}

// renew goes on listening.
func (s *session) renew() (err error) {
	switch {
	case s.listener != nil:
		if err = s.listener.Renew(); errors.Is(err, listener.ErrLost) { // the process was stopped for a while
			s.closeListener()
			err = s.listen()
		}
	case s.store != nil:
		err = s.listen() // there was no room for another listener
	}
	s.tellLeftOut()
	return s.report(err)
}

// tellLeftOut tells of events that were left out, if no other event does.
func (s *session) tellLeftOut() {
	if s.listener == nil {
		return
	}
	all := s.listener.LeftOut()
	switch {
	case all == s.leftOut:
		s.leftSince = time.Time{}
	case s.leftSince.IsZero():
		s.leftSince = time.Now()
	case time.Since(s.leftSince) >= leftAfter:
		n := all - s.leftOut
		s.leftOut, s.leftSince = all, time.Time{}
		s.tell(leftOut(n))
	}
}

func (s *session) wants(kind string) bool { return s.Kinds == nil || slices.Contains(s.Kinds, kind) }

// tell tells of an event, at once if it has no time yet.
func (s *session) tell(e report.Event) {
	if !s.wants(e.Kind) || !s.Only.Matches(e) {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	s.on(e)
}

// wallClock converts a time of maps.Now.
func wallClock(at uint64) time.Time { return time.Now().Add(time.Duration(at - maps.Now())) }

var (
	kindNames = map[listener.EventKind]string{
		listener.Overflow: report.Overflow, listener.PenaltyStarts: report.PenaltyStarts, listener.GuaranteeFails: report.GuaranteeFails,
	}
	fateNames = map[listener.Fate]string{listener.Dropped: "dropped", listener.Marked: "marked", listener.Delayed: "delayed", listener.Passed: "passed"}
)

// packet tells of an event of a packet.
func (s *session) packet(e listener.Event) error {
	if s.store == nil {
		return nil
	}
	cause, ok := s.store.Cause(e)
	if !ok { // the maps have just grown
		if err := s.followMaps(); err != nil || s.store == nil {
			return err
		}
		if cause, ok = s.store.Cause(e); !ok {
			return nil
		}
	}
	out := report.Event{
		Time: wallClock(e.Time), Kind: kindNames[e.Kind], Excess: fateNames[e.Fate], Key: cause.Key, Address: cause.From.String(),
		Pool: cause.Pool, Sharer: cause.Sharer, Unit: cause.Unit, Then: cause.Then, LevelBytes: &cause.Level, CapacityBytes: &cause.Capacity, Name: cause.Rule.Label.Name,
		Device: s.nameOf(cause.Set), Direction: cause.Set.Direction().String(), LeftOut: e.LeftOut - min(e.LeftOut, s.leftOut),
	}
	if cause.Rule.Prefix.IsValid() {
		out.Network = policy.CIDR(cause.Rule.Prefix)
	}
	if cause.Rule.Algorithm.HasColours() {
		out.Colours = &cause.Rule.Colours
	}
	if !s.Only.Matches(out) {
		return nil // the next event counts what was left out
	}
	s.leftOut = max(s.leftOut, e.LeftOut)
	out.DescribePacket()
	s.tell(out)
	return nil
}

// nameOf is the name of the device of a set, as it is now if it is here.
func (s *session) nameOf(set *maps.Set) string {
	if name, here := s.devices.names[set.Ifindex()]; here {
		return name
	}
	return set.Device()
}

// look compares changes and rules with what they were.
func (s *session) look() error {
	if s.store != nil {
		s.change.look(s.store, s.tell)
	} else {
		s.change = change{}
	}
	err := s.lookAtRules()
	s.lookAtLeases()
	s.newcomers()
	return cmp.Or(err, s.followCgroups())
}
