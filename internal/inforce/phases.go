package inforce

import (
	"bytes"

	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/pkg/loader"
)

// Phases are the policies that a device gets which appears: the one in force, and the one that is in force once the
// last change has reverted. Both are mine, unless the change that brought it can revert or has reverted. If no other
// policy was in force before that change, the File is nil.
func Phases(n *loader.Namespace, mine lastgood.Policy) (now, reverted lastgood.Policy, err error) {
	last, err := n.Policies()
	now, reverted = phases(last, mine, func(p Packed) lastgood.Policy { return Parsed(p, mine) })
	return now, reverted, err
}

func phases(last loader.Policies, mine lastgood.Policy, parsed func(Packed) lastgood.Policy) (now, reverted lastgood.Policy) {
	of := func(p Packed) lastgood.Policy {
		if len(p) == 0 {
			return lastgood.Policy{}
		}
		return parsed(p)
	}
	if !bytes.Equal(last.Now, last.Reverted) {
		now, reverted = of(last.Now), of(last.Reverted)
		if now.File == mine.File || reverted.File == mine.File && !last.Lasts {
			return now, reverted
		}
	}
	if of(last.Undone).File == mine.File {
		now = of(last.Now)
		return now, now
	}
	return mine, mine
}

// Parsed is a policy that was recorded: mine if it is that, or if this build cannot read it.
func Parsed(packed Packed, mine lastgood.Policy) lastgood.Policy {
	p, err := packed.Parse()
	if err != nil || bytes.Equal(p.Text, mine.Text) {
		return mine
	}
	return p
}
