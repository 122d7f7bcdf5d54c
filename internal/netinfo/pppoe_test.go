package netinfo

import (
	"slices"
	"testing"
)

func TestPPPoEDevices(t *testing.T) {
	names := pppoeDevices(`Id       Address              Device
0000001A 52:54:00:12:34:56     eth0
0000001B 52:54:00:12:34:57     eth0
00000001 52:54:00:12:34:58 a-long-name.100
`)
	if want := []string{"eth0", "a-long-name.100"}; !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}
}
