package policy

import "testing"

func TestReflectors(t *testing.T) {
	for text, want := range map[string]Reflectors{
		"default": "", "192.0.2.1": "192.0.2.1", "192.0.2.1, 2001:DB8::1": "192.0.2.1,2001:db8::1", "::ffff:192.0.2.1": "192.0.2.1",
	} {
		var r Reflectors
		if err := r.Set(text); err != nil || r != want {
			t.Errorf("%s: %q, %v", text, r, err)
		}
		if addrs := r.Addrs(); want == "" && len(addrs) != len(DefaultReflectors) || want != "" && reflectors(addrs) != want {
			t.Errorf("%s: %v", text, addrs)
		}
	}
	for text, part := range map[string]string{
		"":                           `adapt-to: "" is not an IP address; list some, such as 1.1.1.1,9.9.9.9`,
		"example.net":                `"example.net" is not an IP address`,
		"192.0.2.1,":                 `"" is not an IP address`,
		"192.0.2.1,::ffff:192.0.2.1": "192.0.2.1 is given twice",
		"fe80::1%eth0":               "fe80::1%eth0 cannot be pinged through a line",
		"169.254.1.1":                "169.254.1.1 cannot be pinged through a line",
		"127.0.0.1":                  "127.0.0.1 cannot be pinged through a line",
		"0.0.0.0":                    "0.0.0.0 cannot be pinged",
		"ff02::1":                    "ff02::1 cannot be pinged",
		"1.1.1.1,1.1.1.2,1.1.1.3,1.1.1.4,1.1.1.5,1.1.1.6,1.1.1.7,1.1.1.8,1.1.1.9": "more than 8 addresses",
	} {
		var r Reflectors
		wantError(t, r.Set(text), part)
	}
}

// Guarantees within a pool that adapts must fit its lowest rate.
func TestGuaranteesInAdapting(t *testing.T) {
	up := poolOf("up", func(r *Rule) { r.Adapt.Min = 2e6 })
	for guarantee, wrong := range map[Guarantee]bool{2e6: false, 3e6: true} {
		low := poolOf("low", func(r *Rule) { r.Within, r.Guarantee = "up", guarantee })
		err := CheckPools([]Table{{Rules: []Rule{low, up}}})
		if wrong {
			wantError(t, err, `adapt-min 2mbit is less than the guarantees within the pool, which add up to 3mbit`)
		} else if err != nil {
			t.Error(err)
		}
	}
}
