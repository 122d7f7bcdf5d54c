package measure

import (
	"testing"
	"time"

	"github.com/shapectl/shapectl/pkg/loader"
)

// TestLivePanic sees that a panic of a reading is one of those who wait for it, each time.
func TestLivePanic(t *testing.T) {
	l := NewLive(&Reader{Netns: "/proc/self/ns/net"}, What{}, time.Millisecond)
	l.readAll = func(What) (*Reading, error) {
		return nil, loader.In(l.reader.Netns, func() error { panic("broken") })
	}
	for range 2 {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("who asks hears of no panic")
				}
			}()
			l.Latest(t.Context())
		}()
	}
}
