package policy

import (
	"slices"
	"testing"
)

// A device gets all its guarantees or none, in turn, beside those that are given. What is within a pool that gets a guarantee
// was promised by the pools above, and is not counted twice.
func TestGrant(t *testing.T) {
	tables := forest(t, "up: rate=10mbit", "tap1: within=up guarantee=6mbit", "tap2: within=up guarantee=3mbit", "alone: within=up guarantee=2mbit",
		"10.0.0.1: within=tap2 guarantee=1mbit", "10.0.0.2: within=tap1 guarantee=4mbit", "10.0.0.3: within=up guarantee=5mbit")
	for i := range tables[0].Rules {
		if p := &tables[0].Rules[i]; p.Label.Name != "up" && p.Label.Name != "alone" {
			p.Label.Owner.Device = p.Label.Name
		}
	}
	given := tables[1]
	given.Rules = slices.Clone(given.Rules[1:2]) // a rule of eth0 within tap1
	tables[1].Rules = slices.Delete(tables[1].Rules, 1, 2)
	waiting := append(WithoutGuarantees(tables), given)
	turns := []string{"tap1", "eth0", "tap2", `pool "alone"`}
	tree := NewTree(waiting)
	var got []string
	for _, c := range tree.Grant(func(who string) int { return slices.Index(turns, who) }) {
		got = append(got, c.Who)
		if c.NoRoom != nil {
			got = append(got, c.NoRoom.Error())
		}
	}
	// Of 10 mbit, tap1 gets 6, of which 4 were promised before. With eth0 it would be 12, and with tap2 it is 9.
	want := []string{"tap1", "eth0", `pool "up": rate 10mbit is less than the guarantees within the pool, which add up to 17mbit; raise it, or lower them`,
		"tap2", `pool "alone"`, `pool "up": rate 10mbit is less than the guarantees within the pool, which add up to 17mbit; raise it, or lower them`}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if n := tree.Find("up"); n.Members != 9e6 || CheckPools(waiting) != nil {
		t.Errorf("%v are promised: %v", n.Members, CheckPools(waiting))
	}
	if r := waiting[1].Rules[0]; r.Guarantee != 0 || r.Label.Waits != 1e6 {
		t.Errorf("eth0 has a part of its guarantees: %+v", r)
	}
}
