package policyfile

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// contradictions reports networks that appear twice in sorted rules. It warns about rules
// that never apply, because rules with longer prefixes cover their network.
func (r *reader) contradictions(rules []rule) {
	behind := make([]int, len(rules)) // for each rule, the first one after it that is not within its network
	for i, this := range slices.Backward(rules) {
		if i > 0 && rules[i-1].prefix == this.prefix {
			r.report(this.at, fmt.Sprintf("network %v appears twice, first in %s; remove one of them",
				policy.CIDR(this.prefix), r.where(rules[i-1].at)))
		}
		next, inner := this.prefix.Addr(), i+1 // the first address that longer networks do not cover
		for inner < len(rules) && rules[inner].prefix.Overlaps(this.prefix) {
			if within := rules[inner].prefix; within.Addr() == next {
				next = policy.Last(within).Next()
			}
			inner = behind[inner]
		}
		behind[i] = inner
		if next == policy.Last(this.prefix).Next() { // the zero Addr follows the last one of all
			r.warned = append(r.warned, problem{this.at, fmt.Sprintf(
				"the rule for %v never applies: longer networks in this direction cover all of it; remove it, or one of them", this.prefix)})
		}
	}
}
