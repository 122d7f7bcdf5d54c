package maps

import "testing"

// Green packets are those that are neither yellow nor red, and never fewer than none: packets go on while counters are read.
func TestGreenCounters(t *testing.T) {
	for _, test := range []struct{ passed, dropped, yellow, red, green uint64 }{
		{93, 10, 30, 10, 60}, {90, 10, 91, 10, 0}, {0, 0, 0, 0, 0},
	} {
		c := Counters{PassedPackets: test.passed, PassedBytes: 100 * test.passed, DroppedPackets: test.dropped, DroppedBytes: 100 * test.dropped}
		c.addColours(Counters{
			PassedPackets: test.yellow, PassedBytes: 100 * test.yellow,
			DroppedPackets: test.red, DroppedBytes: 100 * test.red, ExcessPackets: test.red + 1, ExcessBytes: 100 * (test.red + 1), MarkedPackets: 2, ContendedPackets: 200,
		})
		if c.GreenPackets != test.green || c.GreenBytes != 100*test.green {
			t.Errorf("%+v: %+v", test, c)
		}
	}
}
