package netinfo

import (
	"fmt"
	"sync"
)

// eventBytes is enough for the messages about a thousand devices.
const eventBytes = 4 << 20

// A feed keeps what it knows of something in a network namespace up to date by messages of the kernel.
type feed[M any] struct {
	what string // it is about, for errors
	// subscribe sends messages until done is closed or some were lost. It calls lost for any error after that, too.
	subscribe func(messages chan<- M, done <-chan struct{}, buffer int, lost func(error)) error
	list      func() error // learns all there is
	handle    func(M)      // learns from a message
	isNews    func() bool  // whether the owner wants to hear of what was learned
	more      chan struct{}
	buffer    int // receive buffer in bytes

	mu   sync.Mutex
	done chan struct{} // nil before it begins, or if messages were lost and all must be listed again
}

// More returns a channel that receives a value when there is something to take.
func (f *feed[M]) More() <-chan struct{} { return f.more }

// Close stops following.
func (f *feed[M]) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stop()
}

func (f *feed[M]) stop() {
	if f.done != nil {
		close(f.done)
		f.done = nil
	}
}

// ready begins, if it has not begun yet or messages were lost: it subscribes, and then lists all there is. Changes during the
// list also arrive as messages, in order. It must be called with the lock, on a thread of the network namespace.
func (f *feed[M]) ready() error {
	if f.done != nil {
		return nil
	}
	messages, done := make(chan M), make(chan struct{})
	lost := func(error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.done == done {
			f.stop()
			f.tell()
		}
	}
	if err := f.subscribe(messages, done, f.buffer, lost); err != nil {
		return fmt.Errorf("follow the %s: %w", f.what, err)
	}
	f.done = done
	go func() {
		for m := range messages {
			f.mu.Lock()
			if f.done == done {
				if f.handle(m); f.isNews() {
					f.tell()
				}
			}
			f.mu.Unlock()
		}
	}()
	err := f.list()
	if err != nil {
		f.stop()
	}
	return err
}

func (f *feed[M]) tell() {
	select {
	case f.more <- struct{}{}:
	default:
	}
}
