// Package pulse tells whether a loop goes round.
package pulse

import (
	"context"
	"time"
)

// A Pulse is of a loop. The zero Pulse is of one that nobody asks about.
type Pulse chan struct{}

// Wait waits for a time to come. It returns false if ctx is done before.
func (p Pulse) Wait(ctx context.Context, until <-chan time.Time) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-p:
		case <-until:
			return true
		}
	}
}

// Alive returns nil once the loop goes round.
func (p Pulse) Alive(ctx context.Context) error {
	select {
	case p <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
