package measure

import (
	"context"
	"fmt"
	"runtime/debug"
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
	readAll  func(What) (*Reading, error) // of reader, but in tests

	mutex   sync.Mutex
	asked   time.Time     // the last time; zero while nothing is read
	next    chan struct{} // closed when there is another reading
	reading *Reading
	err     error
	broken  string // a panic of the last reading; "" for none
}

// NewLive makes a Live of a reader, which it alone uses from now on.
func NewLive(reader *Reader, what What, interval time.Duration) *Live {
	return &Live{reader: reader, what: what, interval: interval, readAll: reader.Read, next: make(chan struct{})}
}

// Latest is the latest reading that has measured an interval. The first who asks waits for that long. A panic of a reading
// is one of those who ask.
func (l *Live) Latest(ctx context.Context) (*Reading, error) {
	for waited := false; ; waited = true {
		l.mutex.Lock()
		if broken := l.broken; waited && broken != "" {
			l.mutex.Unlock()
			panic(broken)
		}
		if l.asked.IsZero() {
			l.reading, l.err, l.broken = nil, nil, ""
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
		reading, broken, err := l.read()
		l.mutex.Lock()
		l.reading, l.err, l.broken = reading, err, broken
		close(l.next)
		l.next = make(chan struct{})
		if time.Since(l.asked) > linger || broken != "" {
			l.reader.Close()
			l.asked = time.Time{}
			l.mutex.Unlock()
			return
		}
		l.mutex.Unlock()
		<-tick.C
	}
}

func (l *Live) read() (reading *Reading, broken string, err error) {
	defer func() {
		if p := recover(); p != nil {
			broken = fmt.Sprintf("%v\n%s", p, debug.Stack())
		}
	}()
	reading, err = l.readAll(l.what)
	return reading, "", err
}
