package observe

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/pulse"
)

const (
	followEvery = time.Second
	readEvery   = 5 // times that it follows
)

// A Live looks all the time. Many may ask it for what it measured last.
type Live struct {
	options Options
	rules   func() ([]*live.Item, error)
	say     func(string)
	pulse.Pulse

	mutex sync.Mutex
	first chan struct{} // closed when there is a reading, or an error
	last  Reading
	err   error
	sums  Sums
}

// Sums are what was measured since a Live began, of the rules that are there now.
type Sums struct {
	Rules map[live.Key][2]Sum // while the rule did not limit, and while it did
	// These were left out.
	LostSamples, LostFlows, LostRules uint64
}

// A Sum is of a rule.
type Sum struct {
	Receiver, Sender SumOfTimes
	Packets, Again   uint64 // with payload
}

// SumOfTimes are round trips of one side.
type SumOfTimes struct {
	Samples uint64
	All     time.Duration
	Median  time.Duration // of the last reading; 0 if that had none
}

func (s *SumOfTimes) add(t Times) {
	s.Samples += t.Samples
	s.All += t.sum
	s.Median = t.Quantile(0.5)
}

func (s *Sum) add(p Part) {
	s.Receiver.add(p.Receiver)
	s.Sender.add(p.Sender)
	s.Packets += p.Packets
	s.Again += p.AgainPackets
}

// NewLive makes a Live, which reads rules by a function, and says what goes wrong.
func NewLive(o Options, rules func() ([]*live.Item, error), say func(string)) *Live {
	return &Live{options: o, rules: rules, say: say, Pulse: make(pulse.Pulse), first: make(chan struct{}), sums: Sums{Rules: map[live.Key][2]Sum{}}}
}

// Run looks until ctx is done. Without tcx it says so, and looks at nothing.
func (l *Live) Run(ctx context.Context, ready func()) error {
	ready()
	o, err := Start(l.options)
	l.note(nil, nil, err)
	if err == nil {
		defer o.Close()
	}
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for round := 1; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-l.Pulse:
			continue
		case <-tick.C:
		}
		if o == nil {
			continue
		}
		rules, err := l.rules()
		if rules != nil {
			err = errors.Join(err, o.Follow(rules))
		}
		if round++; round%readEvery != 1 {
			l.note(nil, nil, err)
			continue
		}
		reading, failed := o.Read()
		l.note(&reading, rules, errors.Join(err, failed))
	}
}

// note keeps what was read, and says what went wrong unless it did the last time.
func (l *Live) note(r *Reading, rules []*live.Item, err error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if err != nil && (l.err == nil || l.err.Error() != err.Error()) {
		l.say(err.Error())
	}
	if l.err = err; r != nil {
		l.last = *r
		l.sums.add(r, rules)
	}
	if r != nil || err != nil {
		select {
		case <-l.first:
		default:
			close(l.first)
		}
	}
}

// add adds a reading, and forgets rules that are gone.
func (s *Sums) add(r *Reading, rules []*live.Item) {
	now := make(map[live.Key][2]Sum, len(s.Rules))
	for i := range rules {
		key := rules[i].Key
		sums, known := s.Rules[key]
		parts := r.Rules[key]
		if parts == nil {
			if !known {
				continue
			}
			parts = &Parts{}
		}
		sums[0].add(parts.Free)
		sums[1].add(parts.Limited)
		now[key] = sums
	}
	s.Rules = now
	s.LostSamples += r.LostSamples
	s.LostFlows += r.LostFlows
	s.LostRules = uint64(r.LostRules)
}

// Latest is the latest reading, and what is wrong now. Whoever asks before the first one waits for it. Its maps must not
// be changed.
func (l *Live) Latest(ctx context.Context) (Reading, error) {
	select {
	case <-l.first:
	case <-ctx.Done():
		return Reading{}, ctx.Err()
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.last, l.err
}

// Sums are those of now.
func (l *Live) Sums() Sums {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	sums := l.sums
	sums.Rules = maps.Clone(sums.Rules)
	return sums
}
