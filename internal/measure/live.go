package measure

import (
	"context"
	"sync"
	"time"
)

// linger is how long a Live goes on reading after nobody asks any more.
const linger = 5 * time.Second

// A Live takes a reading at each interval, for as long as somebody asks for readings. So many who ask share one reading,
// and what it measured is of the same interval for all.
type Live struct {
	reader   *Reader
	what     What
	interval time.Duration

	mutex   sync.Mutex
	asked   time.Time     // the last time; zero while nothing is read
	next    chan struct{} // closed when there is another reading
	reading *Reading
	err     error
}

// NewLive makes a Live of a reader, which it alone uses from now on.
func NewLive(reader *Reader, what What, interval time.Duration) *Live {
	return &Live{reader: reader, what: what, interval: interval, next: make(chan struct{})}
}

// Latest is the latest reading that has measured an interval. The first who asks waits for that long.
func (l *Live) Latest(ctx context.Context) (*Reading, error) {
	for {
		l.mutex.Lock()
		if l.asked.IsZero() {
			l.reading, l.err = nil, nil
			go l.run()
		}
		l.asked = time.Now()
		reading, err, next := l.reading, l.err, l.next
		l.mutex.Unlock()
		if err != nil || reading != nil && reading.Interval > 0 {
			return reading, err
		}
		select {
		case <-next:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// run reads until nobody has asked for a while.
func (l *Live) run() {
	tick := time.NewTicker(l.interval)
	defer tick.Stop()
	l.reader.forget()
	for {
		reading, err := l.reader.Read(l.what)
		l.mutex.Lock()
		l.reading, l.err = reading, err
		close(l.next)
		l.next = make(chan struct{})
		if time.Since(l.asked) > linger {
			l.reader.Close()
			l.asked = time.Time{}
			l.mutex.Unlock()
			return
		}
		l.mutex.Unlock()
		<-tick.C
	}
}
