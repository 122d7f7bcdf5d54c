package maps_test

import (
	"errors"
	"testing"
	"time"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
)

// A change is armed, confirmed and reverted before the moment that it is prepared for, or not at all.
func TestLate(t *testing.T) {
	testenv.Root(t)
	store, err := maps.New(maps.Size{Rules: 1}, bpf.AbiHook{L2Bytes: 14})
	testenv.Must(t, err)
	defer store.Close()
	inTime := func(what string, want maps.ChangeState, err error) {
		t.Helper()
		testenv.Must(t, err)
		if state, _ := store.Change(); state != want {
			t.Errorf("%s: the change is %q, want %q", what, state, want)
		}
	}
	late := func(what string, want maps.ChangeState, err error) {
		t.Helper()
		if state, _ := store.Change(); !errors.Is(err, maps.ErrLate) || state != want {
			t.Errorf("%s: the change is %q, want %q; error %v", what, state, want, err)
		}
	}
	ahead := func(d time.Duration) uint64 { return maps.Now() + uint64(d) }

	store.Time(ahead(-1), ahead(time.Hour))
	late("armed after it begins", maps.NoChange, store.Arm())
	store.Time(ahead(time.Minute), ahead(time.Hour))
	inTime("armed", maps.Armed, store.Arm())

	store.Time(0, ahead(time.Hour)) // since the host was started
	late("reverted in the past", maps.Pending, store.Revert(ahead(-1)))
	inTime("to revert in a minute", maps.Pending, store.Revert(ahead(time.Minute)))
	inTime("confirmed", maps.Committed, store.Confirm())
	late("reverted in the past", maps.Committed, store.Revert(ahead(-1)))

	soon := ahead(20 * time.Millisecond)
	inTime("to revert soon", maps.Pending, store.Revert(soon))
	for maps.Now() < soon {
		time.Sleep(time.Millisecond)
	}
	late("confirmed after it reverted", maps.Expired, store.Confirm())
}
