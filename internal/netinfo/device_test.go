package netinfo

import (
	"os"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

func TestForwards(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	va, err := DeviceByName("va")
	testenv.Must(t, err)
	for _, step := range []struct {
		file, value string
		ipv4, ipv6  bool
	}{
		{"ipv4/conf/all/forwarding", "0", false, false},
		{"ipv4/conf/vb/forwarding", "1", false, false},
		{"ipv4/conf/va/forwarding", "1", true, false},
		{"ipv6/conf/va/disable_ipv6", "0", true, false},
		{"ipv6/conf/va/forwarding", "1", true, false},
		{"ipv6/conf/all/forwarding", "1", true, true},
		{"ipv6/conf/va/disable_ipv6", "1", true, false},
	} {
		testenv.Must(t, os.WriteFile("/proc/sys/net/"+step.file, []byte(step.value), 0))
		if ipv4, ipv6 := va.Forwards(); ipv4 != step.ipv4 || ipv6 != step.ipv6 {
			t.Errorf("with %s = %s: %v and %v, want %v and %v", step.file, step.value, ipv4, ipv6, step.ipv4, step.ipv6)
		}
	}
}
