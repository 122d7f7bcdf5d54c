// Package policy defines rules: their options, how people write them, and the
// sentence that describes a rule. Every value type parses text, prints text that
// parses back, and satisfies pflag.Value. Parsing uses exact integer arithmetic.
// The package does no I/O and imports only the standard library.
package policy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
)

// maxLevel bounds the level of a bucket in bytes, so that the data path's arithmetic
// cannot overflow.
const maxLevel = 1 << 41

// Rule limits the packets of one prefix in one direction of one device. Or it is a pool.
type Rule struct {
	Prefix    netip.Prefix // of a pool its PoolKey
	Pool      bool         // Label.Name is the name of the pool
	Rate      Rate
	Capacity  uint64 // bytes, MinCapacity to MaxCapacity; 0 if Rate is Unlimited
	Algorithm Algorithm
	Each      Each
	Excess    Excess
	Queue     uint64   // bytes beyond Capacity that can be queued, if Excess is Delay and Algorithm GCRA; else 0
	ECNAbove  ECNAbove // above 0 if Excess is Delay; else 0
	Order     Order    // FIFO, unless Excess is Delay and Algorithm GCRA
	Penalty   Penalty
	Colours   Colours // zero unless the algorithm gives packets colours
	Fail      Fail
	Framing   Framing
	Within    Within
	Guarantee Guarantee
	Members   Members
	Weight    Weight
	Share     Share
	NAT       bool    // hosts and subnets are those behind NAT
	Cluster   Cluster // only of a pool
	Adapt     Adapt   // only of a pool
	Shadow    Shadow
	Also      Also
	Unit      Unit // Bytes, unless the limit is one that Chained returns
	Label     Label
}

// Limits reports whether a rule or pool limits anything, itself or by a pool.
func (r *Rule) Limits() bool { return r.Rate != Unlimited || r.Within != "" }

// CalledOn is the name of a rule or pool. A rule of a device that has none, and is for any address, is called as the device.
func (r *Rule) CalledOn(device string) string {
	if r.Label.Name == "" && r.Prefix.Bits() == 0 {
		return device
	}
	return r.Label.Name
}

// Validate returns an error if r is not valid; it names the first option that is wrong.
func (r *Rule) Validate() error {
	err := checkText("plan", r.Label.Plan, MaxName)
	switch name := r.Label.Name; {
	case !r.Pool:
		err = cmp.Or(checkPrefix(r.Prefix), err)
	case CheckPoolName(name) != nil:
		err = CheckPoolName(name)
	case r.Prefix != PoolKey(name):
		err = fmt.Errorf("pool %q has the key of another one", name)
	case r.Within == Within(name):
		err = fmt.Errorf("within %q is the pool itself; name another pool", name)
	case r.Rate == Unlimited:
		err = errors.New("rate unlimited would limit nothing, and a pool always has a rate; give it 400gbit, the highest, or delete it")
	case r.Excess == Pass:
		err = errors.New("excess pass would limit nothing in a pool; use another one, or propose a rate with shadow")
	case r.Label.Plan != "":
		err = NotInPool("plan")
	}
	if err != nil {
		return err
	}
	return r.validateOptions()
}

func (r *Rule) validateOptions() error {
	for _, o := range Options {
		if err := o.validate(r); err != nil {
			return err
		}
	}
	return nil
}
