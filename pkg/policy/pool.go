package policy

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
)

const (
	// MaxDepth is the largest number of pools above a rule.
	MaxDepth = 16
	// MaxWeight is the largest weight of a rule or pool.
	MaxWeight = 256
	// minGuaranteeBurst holds a few full packets, so that a small guarantee is not refused to a sender whose
	// packets come in pairs.
	minGuaranteeBurst = 32 << 10

	none = "none"
)

// A pool is a named bucket of a network namespace. It is a Rule of the Table without a device, and has
// a name instead of a network.

// PoolKey returns the prefix by which a pool is found among the pools of its namespace. It is a hash of
// the name and has nothing to do with addresses.
func PoolKey(name string) netip.Prefix {
	hash := sha256.Sum256([]byte(name))
	return netip.PrefixFrom(netip.AddrFrom16([16]byte(hash[:16])), 128)
}

// IsPools reports whether the rules of the table are the pools of the namespace.
func (t Table) IsPools() bool { return t.Device == "" }

// Pool makes a pool. It returns an error if the pool is not valid.
func (l Limit) Pool(name string) (r Rule, err error) {
	if err := CheckPoolName(name); err != nil {
		return Rule{Pool: true}, err
	}
	l.Name = name
	if r, err = l.resolve(Rule{Prefix: PoolKey(name), Pool: true}); err == nil {
		err = r.Validate()
	}
	return r, err
}

// CheckPoolName returns an error if a pool cannot have the name.
func CheckPoolName(name string) error {
	switch name {
	case "":
		return errors.New("the name of a pool is empty; write one such as uplink")
	case none:
		return fmt.Errorf("a pool cannot be called %s, which stands for no pool; choose another name", none)
	}
	return checkText("pool", name, MaxName)
}

// Within is the name of the pool that a rule or pool draws from; "" for none.
type Within string

func (w Within) String() string { return string(w) }

// NotInPool is the error for an option or a plan that a pool cannot have.
func NotInPool(key string) error {
	instead := "write the options instead" // of a plan
	if o := FindOption(key); o != nil && o.RuleOnly {
		key, instead = o.Name, o.instead
	}
	return fmt.Errorf("%s has no use in a pool; %s", key, instead)
}

func checkWithin(r *Rule) error {
	if r.Within != "" && r.Algorithm.HasColours() {
		return fmt.Errorf("within %q: the algorithm %v draws from no pool; use within none, or another algorithm", string(r.Within), r.Algorithm)
	}
	return nil
}

// Weight is the part that a rule or pool gets of the shares of its pool, relative to the others there: 2 to
// MaxWeight, or 0 for 1.
type Weight uint16

// Value is the weight as a number from 1 on.
func (w Weight) Value() uint16 { return max(uint16(w), 1) }

func (w Weight) String() string { return strconv.Itoa(int(w.Value())) }
func checkWeight(what string, w Weight) error {
	if w == 1 || w > MaxWeight {
		return fmt.Errorf("%s has the value %d; use 2 to %d, or 0 for 1", what, uint16(w), MaxWeight)
	}
	return nil
}

// Guarantee is a part of the rate of a pool, such as what a rule always gets of it; 0 for none.
type Guarantee Rate

func (g *Guarantee) Set(s string) error {
	if s == none {
		*g = 0
		return nil
	}
	r, err := ParseRate(s)
	if err == nil && r == Unlimited {
		err = errors.New("it must be a rate such as 5mbit")
	}
	if err == nil {
		*g = Guarantee(r)
	}
	return err
}

func (g Guarantee) String() string {
	if g == 0 {
		return none
	}
	return Rate(g).String()
}

func (g Guarantee) Type() string { return "rate|none" }

// Members is how many buckets a rule has at most that each have its guarantee; 0 if that is not known.
type Members uint32

func (m Members) String() string {
	if m == 0 {
		return ""
	}
	return strconv.FormatUint(uint64(m), 10)
}

// guaranteed is the guarantee of the rule, also while that waits for room.
func (r *Rule) guaranteed() Rate { return Rate(cmp.Or(r.Guarantee, r.Label.Waits)) }

func checkGuarantee(r *Rule) error {
	g := r.guaranteed()
	switch {
	case g == 0:
		return nil
	case r.Rate != Unlimited && g > r.Rate:
		return fmt.Errorf("guarantee %v is above the rate %v; lower it, or raise the rate", g, r.Rate)
	case !r.hasOneBucket() && r.Members == 0:
		return fmt.Errorf("guarantee %v is for each bucket of the rule; say with members how many there are at most, such as members 50", g)
	}
	return checkRate("guarantee", g.String, g)
}

// Guaranteed returns the limit whose conforming packets are guaranteed to r; false if r has no guarantee.
func (r Rule) Guaranteed() (guaranteed Rule, ok bool) {
	rate := Rate(r.Guarantee)
	return Rule{
		Prefix: r.Prefix, Pool: r.Pool, Rate: rate, Capacity: max(minGuaranteeBurst, bytesIn(defaultDrain, rate)),
		Each: r.Each, NAT: r.NAT, Members: r.Members, Framing: r.Framing,
	}, rate != 0
}

// resolveRate sets the rate. A rule that has only its pools is unlimited itself.
func resolveRate(l *Limit, r *Rule) error {
	switch r.Rate = l.Rate; {
	case l.Rate != 0:
	case l.Also.some():
		r.Rate = MaxRate
	case l.Within != "" && !r.Pool:
		r.Rate = Unlimited
	}
	return nil
}
