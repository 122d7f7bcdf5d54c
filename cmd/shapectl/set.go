package main

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

type setOptions struct {
	device    string
	direction policy.Direction
	match     policy.Match
	rule      policy.Rule
	capacity  policy.Capacity
	overhead  string
	mpu       byteCount
}

func (e *env) setCommand() *cobra.Command {
	var o setOptions
	cmd := &cobra.Command{
		Use:   "set DEV ingress|egress CIDR --rate RATE [flags]",
		Short: "Set a rule, or change it",
		Long: `Set a rule, or change it: a flag that is not given has its default, also where
the rule was set with another value before. Buckets owe what they owed, up to
the new capacity, and counters go on.`,
		Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host
  shapectl set eth0 ingress 0.0.0.0/0 --rate 1gbit --capacity 20ms
  shapectl set eth0 egress 10.0.0.9 --rate unlimited
  shapectl set wg0 ingress 2001:db8::/32 --rate 1.5MB/s --each /64 --excess ecn`,
		Args:              args(3, 3),
		ValidArgsFunction: e.completeRule,
		RunE: func(cmd *cobra.Command, given []string) error {
			var err error
			if o.direction, err = direction("set", given[1]); err != nil {
				return err
			}
			if o.rule.Prefix, err = policy.ParsePrefix(given[2]); err != nil {
				return inputf("set: %w", err)
			}
			if !cmd.Flags().Changed("rate") {
				return inputf("set: --rate is missing; say how much, such as --rate 10mbit, or --rate unlimited")
			}
			if !cmd.Flags().Changed("match") {
				o.match = o.direction.FarSide()
			}
			o.device = given[0]
			return e.set(o)
		},
	}
	f := cmd.Flags()
	once(f, &o.rule.Rate, "rate", "what may pass in the long run: 10mbit, 1.5gbit, 125MB/s, unlimited (also --cir)")
	once(f, &o.capacity, "capacity", "what a bucket holds: 64kb, or what the rate lets through in a time: 100ms (default: from the rate; also --burst, --cbs)")
	once(f, &o.rule.Algorithm, "algorithm", "the meter")
	once(f, &o.rule.Each, "each", "who shares a bucket")
	once(f, &o.match, "match", "the address that CIDR is compared with (default: the far side)")
	once(f, &o.rule.Excess, "excess", "what becomes of packets that do not conform")
	once(f, &o.rule.Penalty, "penalty", "what an excess packet does to its bucket (leaky): fill it, and hold it full for a time")
	once(f, &o.rule.Fail, "fail", "what becomes of a packet whose bucket can not be updated")
	f.StringVar(&o.overhead, "overhead", "0", "`bytes` that a link adds to each packet, or a keyword of tc-cake: ethernet, docsis, pppoe-ptm")
	once(f, &o.mpu, "mpu", "`bytes` that a packet counts at least")
	f.Lookup("match").DefValue = "" // it depends on the direction
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		switch name {
		case "cir":
			name = "rate"
		case "cbs", "burst":
			name = "capacity"
		}
		return pflag.NormalizedName(name)
	})
	return cmd
}

func (e *env) set(o setOptions) error {
	doing := fmt.Sprintf("set %s on %s %s", o.rule.Prefix, o.device, o.direction)
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		dev, err := device(n, o.device)
		if err != nil {
			return err
		}
		rule, err := o.complete(dev)
		if err != nil {
			return inputError{err}
		}
		change, err := n.Put(dev, o.direction, o.match, rule)
		if err != nil {
			return err
		}
		if change.Upgraded {
			fmt.Fprintf(e.err, "%s %s: programs of another build were replaced; rules, buckets and counters were kept\n", dev.Name, o.direction)
		}
		if change.Forgotten != "" {
			fmt.Fprintf(e.err, "%s %s: the rules of %s, which is gone and whose number this device has now, were forgotten\n", dev.Name, o.direction, change.Forgotten)
		}
		if change.Reattached != "" {
			fmt.Fprintf(e.err, "%s %s: was not in force (%s); all its rules are attached again\n", dev.Name, o.direction, change.Reattached)
		}
		rules, err := findRules(n, filterRules{device: dev.Name, direction: &o.direction, prefix: &rule.Prefix})
		if err != nil {
			return err
		}
		if e.json {
			return report.JSON(e.out, rules)
		}
		return report.Sentences(e.out, rules)
	})
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

// complete is the rule, with all that depends on the device or on other flags.
func (o setOptions) complete(dev loader.Device) (policy.Rule, error) {
	r := o.rule
	var err error
	if r.Framing, err = policy.ParseFraming(o.overhead, dev.L2Bytes); err != nil {
		return r, err
	}
	if o.mpu != 0 {
		if o.mpu > policy.MaxMPU {
			return r, fmt.Errorf("mpu of %d bytes is out of range; use 0 to %d", o.mpu, policy.MaxMPU)
		}
		r.Framing.MPU = uint16(o.mpu)
	}
	switch {
	case o.capacity != policy.Capacity{}:
		if r.Rate == policy.Unlimited {
			return r, fmt.Errorf("a rule of rate unlimited has no capacity; leave --capacity out")
		}
		if r.Capacity, err = o.capacity.Resolve(r.Rate); err != nil {
			return r, err
		}
	case r.Rate != policy.Unlimited:
		r.Capacity = policy.DefaultCapacity(r.Rate)
	}
	if err := r.Validate(); err != nil {
		return r, err
	}
	r.Each = r.Each.Canonical(r.Prefix)
	return r, nil
}
