package policy

// Label is what people call a rule. Packets do not see it.
type Label struct {
	Plan string // the plan of the policy file that the rule follows; empty for none
	Name string // empty for none
	Note string // empty for none
}
