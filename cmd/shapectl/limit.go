package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/pkg/policy"
)

// limitFlags are the flags that say what a rule does, for each command that takes one.
type limitFlags struct {
	limit    policy.Rule // without a prefix
	match    policy.Match
	capacity policy.Capacity
	overhead string
	mpu      byteCount
}

// add adds the flags; side says which address is matched if none is named.
func (l *limitFlags) add(f *pflag.FlagSet, side string) {
	once(f, &l.limit.Rate, "rate", "what may pass in the long run: 10mbit, 1.5gbit, 125MB/s, unlimited (also --cir)")
	once(f, &l.capacity, "capacity", "what a bucket holds: 64kb, or what the rate lets through in a time: 100ms (default: from the rate; also --burst, --cbs)")
	once(f, &l.limit.Algorithm, "algorithm", "the meter")
	once(f, &l.limit.Each, "each", "who shares a bucket")
	once(f, &l.match, "match", "the address that CIDR is compared with (default: "+side+")")
	once(f, &l.limit.Excess, "excess", "what becomes of packets that do not conform")
	once(f, &l.limit.Penalty, "penalty", "what an excess packet does to its bucket (leaky): fill it, and hold it full for a time")
	once(f, &l.limit.Fail, "fail", "what becomes of a packet whose bucket can not be updated")
	f.StringVar(&l.overhead, "overhead", "0", "`bytes` that a link adds to each packet, or a keyword of tc-cake: ethernet, docsis, pppoe-ptm")
	once(f, &l.mpu, "mpu", "`bytes` that a packet counts at least")
	f.Lookup("match").DefValue = "" // its usage says which
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		switch name {
		case "cir":
			name = "rate"
		case "cbs", "burst":
			name = "capacity"
		}
		return pflag.NormalizedName(name)
	})
}

// rule is the rule for a network, with all that depends on the link or on other
// flags. tiny allows capacities of less than a full packet.
func (l *limitFlags) rule(prefix netip.Prefix, l2Bytes uint8, tiny bool) (policy.Rule, error) {
	r := l.limit
	r.Prefix = prefix
	var err error
	if r.Framing, err = policy.ParseFraming(l.overhead, l2Bytes); err != nil {
		return r, err
	}
	if l.mpu != 0 {
		if l.mpu > policy.MaxMPU {
			return r, fmt.Errorf("mpu of %d bytes is out of range; use 0 to %d", l.mpu, policy.MaxMPU)
		}
		r.Framing.MPU = uint16(l.mpu)
	}
	switch {
	case l.capacity != policy.Capacity{}:
		if r.Rate == policy.Unlimited {
			return r, fmt.Errorf("a rule of rate unlimited has no capacity; leave --capacity out")
		}
		if r.Capacity, err = l.capacity.Resolve(r.Rate); err != nil {
			return r, err
		}
	case r.Rate != policy.Unlimited:
		r.Capacity = policy.DefaultCapacity(r.Rate)
	}
	check := r
	if tiny && r.Rate != policy.Unlimited {
		check.Capacity = max(r.Capacity, policy.MinCapacity)
	}
	if err := check.Validate(); err != nil {
		return r, err
	}
	r.Each = r.Each.Canonical(r.Prefix)
	return r, nil
}

// once adds a flag that may be given one time only, as two names of one flag may not disagree.
func once(f *pflag.FlagSet, v pflag.Value, name, usage string) {
	f.Var(&onceValue{Value: v}, name, usage)
}

type onceValue struct {
	pflag.Value
	given bool
}

func (o *onceValue) Set(s string) error {
	if o.given {
		return errors.New("it was given already, under this name or another")
	}
	o.given = true
	return o.Value.Set(s)
}

// byteCount is a number of bytes.
type byteCount uint64

func (c *byteCount) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return errors.New("write a whole number of bytes")
	}
	*c = byteCount(n)
	return nil
}

func (c *byteCount) String() string { return strconv.FormatUint(uint64(*c), 10) }
func (c *byteCount) Type() string   { return "bytes" }
