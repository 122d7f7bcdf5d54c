package netmsg

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

// A list that changes during the request is requested again, a limited number of times.
func TestInterruptedList(t *testing.T) {
	errOther := errors.New("other")
	for _, c := range []struct {
		interrupted int
		then, want  error
		asked       int
	}{
		{0, nil, nil, 1},
		{2, nil, nil, 3},
		{2, errOther, errOther, 3},
		{listTries, nil, netlink.ErrDumpInterrupted, listTries},
	} {
		asked := 0
		all, err := List(func() ([]int, error) {
			asked++
			if asked <= c.interrupted {
				return []int{0}, fmt.Errorf("half of it: %w", netlink.ErrDumpInterrupted)
			}
			return []int{1, 2}, c.then
		})
		if !errors.Is(err, c.want) || asked != c.asked || err == nil && !slices.Equal(all, []int{1, 2}) {
			t.Errorf("%+v: asked %d times: %v, %v", c, asked, all, err)
		}
	}
}
