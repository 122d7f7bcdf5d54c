package netinfo

import (
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

func TestPPPoEDevices(t *testing.T) {
	names, err := pppoeDevices(strings.NewReader(`Id       Address              Device
0000001A 52:54:00:12:34:56     eth0
0000001B 52:54:00:12:34:57     eth0
00000001 52:54:00:12:34:58 a-long-name.100
`))
	testenv.Must(t, err)
	if want := []string{"eth0", "a-long-name.100"}; !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}
}
