package main

import (
	"context"
	"time"
)

// A pulse tells whether a loop goes round.
type pulse chan struct{}

// wait waits for a time to come. It returns false if ctx is done before.
func (p pulse) wait(ctx context.Context, until <-chan time.Time) bool {
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

// isAlive returns nil once the loop goes round.
func (p pulse) isAlive(ctx context.Context) error {
	select {
	case p <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
