package live

import (
	"context"
	"sync"
	"time"
)

// linger is how long a Shared goes on reading after nobody watches any more.
const linger = 5 * time.Second

// A Shared is a Reader that many use at the same time. For as long as somebody watches, it reads once an interval, and all
// share what it read.
type Shared struct {
	reader   *Reader
	interval time.Duration

	mutex   sync.Mutex
	asked   time.Time // by who watches, the last time; zero while nobody does, and nothing is read
	more    What      // is to be read the next time
	next    chan struct{}
	reading *Reading // the last one; nil if that failed
	had     What     // what it has
	regular bool     // it measured one interval
	err     error
}

// NewShared makes a Shared of a reader, which it alone uses from now on.
func NewShared(reader *Reader, interval time.Duration) *Shared {
	reader.reuses = true
	return &Shared{reader: reader, interval: interval, next: make(chan struct{})}
}

// Watch is the latest reading that measured one interval. The first who asks waits for that long. Who calls Release on it uses
// neither it nor its items any more.
func (s *Shared) Watch(ctx context.Context, what What) (*Reading, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for {
		if s.asked.IsZero() {
			s.regular, s.err = false, nil
			go s.run()
		}
		s.asked, s.more = time.Now(), s.more.and(what)
		if s.err != nil || s.regular && s.had.and(what) == s.had {
			return s.used(), s.err
		}
		if err := s.wait(ctx); err != nil {
			return nil, err
		}
	}
}

// used is the reading, with one more user.
func (s *Shared) used() *Reading {
	if s.reading != nil {
		s.reading.users.Add(1)
	}
	return s.reading
}

// Release gives memory back to the Shared of the reading, so that its later readings need not be collected as garbage.
func (out *Reading) Release() { out.users.Add(-1) }

// Now is a reading with what is asked for, at most an interval old. Its own interval may be long.
func (s *Shared) Now(ctx context.Context, what What) (*Reading, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for !s.asked.IsZero() { // those who watch keep their intervals
		s.more = s.more.and(what)
		if s.err != nil || s.isRecent() && s.had.and(what) == s.had {
			return s.used(), s.err
		}
		if err := s.wait(ctx); err != nil {
			return nil, err
		}
	}
	if !s.isRecent() || s.had.and(what) != s.had {
		s.reading, s.err = s.reader.Read(what)
		s.reader.Close() // maps take memory
		s.had, s.regular = what, false
	}
	return s.used(), s.err
}

func (s *Shared) isRecent() bool { return s.reading != nil && time.Since(s.reading.Time) < s.interval }

// wait waits for another reading. The caller holds the mutex, which is free meanwhile.
func (s *Shared) wait(ctx context.Context) error {
	next := s.next
	s.mutex.Unlock()
	defer s.mutex.Lock()
	select {
	case <-next:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run reads until nobody has watched for a while.
func (s *Shared) run() {
	for n := 0; ; n++ {
		began := time.Now()
		s.mutex.Lock()
		if n > 0 && time.Since(s.asked) > linger {
			s.asked = time.Time{}
			s.reader.Close()
			close(s.next) // for those who wait for a reading
			s.next = make(chan struct{})
			s.mutex.Unlock()
			return
		}
		what := s.more
		s.more = What{}
		s.mutex.Unlock()
		reading, err := s.reader.Read(what)
		s.mutex.Lock()
		s.reading, s.err, s.had, s.regular = reading, err, what, n > 0
		close(s.next)
		s.next = make(chan struct{})
		s.mutex.Unlock()
		time.Sleep(max(s.interval-time.Since(began), s.interval/2)) // after a reading that took long, too, the next one measures something
	}
}

// and is what either of two asks for.
func (w What) and(o What) What {
	return What{max(w.Fullest, o.Fullest), w.Slots || o.Slots, w.Buckets || o.Buckets, w.Sharers || o.Sharers, w.Lacks || o.Lacks}
}
