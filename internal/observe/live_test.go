package observe

import (
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/live"
)

// Sums go on from reading to reading, and end with their rule: they are no more than there are rules.
func TestSums(t *testing.T) {
	rules := []*live.Item{ruleOf("egress", "10.0.0.0/24"), ruleOf("egress", "10.1.0.0/24")}
	key := rules[0].Key
	measured := &Parts{Limited: Part{Packets: 10, AgainPackets: 1}}
	measured.Limited.Receiver.add(20 * time.Millisecond)
	s := Sums{Rules: map[live.Key][2]Sum{}}
	for range 2 {
		s.add(&Reading{Rules: map[live.Key]*Parts{key: measured, {Device: "gone"}: measured}, LostFlows: 3}, rules)
	}
	sum := s.Rules[key][1]
	if len(s.Rules) != 1 || sum.Packets != 20 || sum.Again != 2 || sum.Receiver.Samples != 2 || sum.Receiver.All != 40*time.Millisecond || s.LostFlows != 6 {
		t.Errorf("the sums are %+v", s)
	}
	if m := sum.Receiver.Median; m < 19*time.Millisecond || m > 21*time.Millisecond {
		t.Errorf("the median is %v", m)
	}
	s.add(&Reading{}, rules)
	if sum := s.Rules[key][1]; sum.Packets != 20 || sum.Receiver.Median != 0 {
		t.Errorf("without TCP, the sums are %+v", s)
	}
	s.add(&Reading{}, rules[1:])
	if len(s.Rules) != 0 {
		t.Errorf("without the rule, the sums are %+v", s)
	}
}
