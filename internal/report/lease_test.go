package report

import "testing"

// TestRateNow: a screen shows what packets meet, not the rate of the whole cluster.
func TestRateNow(t *testing.T) {
	yes, no, rate, lease, safe := true, false, uint64(10e9), uint64(3e9), uint64(1e9)
	for want, r := range map[string]Rule{
		"10gbit":   {RateBits: &rate},
		"3.00gbit": {RateBits: &rate, Leased: &yes, rateNow: &lease},
		"1.00gbit": {RateBits: &rate, Leased: &no, rateNow: &safe},
	} {
		if got := r.RateNowText(); got != want {
			t.Errorf("%s, not %s", got, want)
		}
	}
}
