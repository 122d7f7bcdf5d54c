package policy

import (
	"fmt"
	"slices"
)

// Value is what a Limit has for an option. Set reads what String writes, which is
// empty for a value that is not set; Type names the value in a flag's help, the
// words of a choice with | between them. It is a pflag.Value.
type Value interface {
	Set(string) error
	String() string
	Type() string
}

// An Option is one option of a limit: a flag of set and replay, and a key of a policy file.
type Option struct {
	Name    string
	Aliases []string

	Help        string // of its flag
	HelpDefault string // there, if it is not what the Value of an empty Limit prints
	Doc         string // in README's table
	DocDefault  string // there, if it is not what the Value of an empty Limit prints

	Shadow      bool // a shadow may have its own
	LimitedOnly bool // an unlimited rule cannot have it

	// Value is the option's field of a limit.
	Value func(*Limit) Value
	// Reset takes the option from a limit.
	Reset func(*Limit)
	// Text is what Value.Set reads to make a rule with this option as in r; empty if r cannot have it.
	Text func(r *Rule) string
	// Same reports whether two rules agree in this option.
	Same func(a, b *Rule) bool

	needs []need
	// resolve sets the option in a rule; those before it in Options are set already.
	resolve func(l *Limit, r *Rule, l2Bytes uint8) error
	valid   func(*Rule) error // checks the value in any rule; may be nil
	fits    func(*Rule) error // checks it beside the other options of a rule that has a rate; may be nil
}

// A need is something without which an option has no use.
type need struct {
	met func(*Rule) bool
	// why says with what else there is no use, and what to do.
	why func(*Rule) string
}

var (
	needsDelay = need{
		func(r *Rule) bool { return r.Excess == Delay },
		func(r *Rule) string { return fmt.Sprintf("excess %v; leave it out, or use excess delay", r.Excess) },
	}
	needsSharedBucket = need{
		func(r *Rule) bool { return r.Each.Kind != EachFlow },
		func(*Rule) string { return "each flow, where a flow waits only for itself; leave it out" },
	}
)

func needsGCRA(why string) need {
	return need{
		func(r *Rule) bool { return r.Algorithm == GCRA },
		func(*Rule) string { return "the algorithm leaky, " + why },
	}
}

// Options are all options of a limit but its shadow, in the order in which they are
// written. Each stands behind those on which its default depends.
var Options = []*Option{
	same(func(l *Limit) *Rate { return &l.Rate }, func(r *Rule) *Rate { return &r.Rate }, Option{
		Name: "rate", Aliases: []string{"cir"}, Shadow: true,
		Help:       "10mbit, 1.5gbit, 125MB/s, unlimited (--cir)",
		Doc:        "what may pass in the long run: `10mbit`, `1.5gbit`, `125MB/s`, `unlimited`",
		DocDefault: "must be given",
		fits:       func(r *Rule) error { return checkRate(r.Rate.String, r.Rate) },
	}),
	option(func(l *Limit) *Capacity { return &l.Capacity }, func(r *Rule) *uint64 { return &r.Capacity }, sizeText, Option{
		Name: "capacity", Aliases: []string{"burst", "cbs"}, Shadow: true, LimitedOnly: true,
		Help:       "burst: 64kb, or 100ms (--burst, --cbs)",
		Doc:        "what a bucket holds: `64kb` (binary, as in tc), or what the rate lets through in a time: `100ms`",
		DocDefault: "300 ms of the rate, 128 KiB at least; of a `leaky` rule that delays as `--queue`",
		resolve:    resolveCapacity, fits: fitCapacity,
	}),
	same(func(l *Limit) *Algorithm { return &l.Algorithm }, func(r *Rule) *Algorithm { return &r.Algorithm }, Option{
		Name: "algorithm", Help: "meter; only leaky has penalties",
		Doc:   "`gcra` or `leaky`: the same verdicts; only `leaky` has penalties",
		valid: func(r *Rule) error { return checkName(r.Algorithm, "algorithm", algorithmNames) },
	}),
	same(func(l *Limit) *Each { return &l.Each }, func(r *Rule) *Each { return &r.Each }, Option{
		Name: "each", Shadow: true, LimitedOnly: true, Help: "who has a bucket of its own",
		Doc:   "who has a bucket: `all` together, each `host`, each subnet `/N`, each `flow`",
		valid: func(r *Rule) error { return r.Each.validate(r.Prefix) },
	}),
	same(func(l *Limit) *Excess { return &l.Excess }, func(r *Rule) *Excess { return &r.Excess }, Option{
		Name: "excess", LimitedOnly: true, Help: "what happens to excess packets",
		Doc:   "`drop`; `ecn` marks packets that allow it up to twice the capacity, and drops others; `pass` only counts; `delay` holds back, [see below](#hold-back-instead-of-dropping)",
		valid: func(r *Rule) error { return checkName(r.Excess, "excess", excessNames) },
	}),
	option(func(l *Limit) *Queue { return &l.Queue }, func(r *Rule) *uint64 { return &r.Queue }, sizeText, Option{
		Name: "queue", LimitedOnly: true,
		Help:       "queue beyond the capacity: 64kb or 50ms (gcra)",
		Doc:        "with `gcra` and `--excess delay`: what may wait beyond the capacity, as a size or a time",
		DocDefault: "50 ms of the rate, 16 KiB at least; below 29 kbit 4.5 s of it",
		needs:      []need{needsDelay, needsGCRA("whose capacity is the queue; set the capacity instead")},
		resolve:    resolveQueue, fits: fitQueue,
	}),
	option(func(l *Limit) *ECNAbove { return &l.ECNAbove }, func(r *Rule) *ECNAbove { return &r.ECNAbove }, ECNAbove.String, Option{
		Name: "ecn-above", LimitedOnly: true,
		Help:       "mark ECT packets that would wait longer",
		Doc:        "with `--excess delay`: packets that would wait longer are marked, if they allow it; `never`",
		DocDefault: "half of the longest wait",
		needs:      []need{needsDelay},
		resolve:    resolveECNAbove, fits: fitECNAbove,
	}),
	same(func(l *Limit) *Order { return &l.Order }, func(r *Rule) *Order { return &r.Order }, Option{
		Name: "order", LimitedOnly: true,
		Help:  "sparse-first: small flows skip the queue (gcra)",
		Doc:   "with `gcra` and `--excess delay`: `fifo`, or `sparse-first`: flows that send little do not wait for others",
		needs: []need{needsDelay, needsGCRA("which never lets more leave than the rate; use the algorithm gcra"), needsSharedBucket},
		valid: func(r *Rule) error { return checkName(r.Order, "order", orderNames) },
	}),
	same(func(l *Limit) *Penalty { return &l.Penalty }, func(r *Rule) *Penalty { return &r.Penalty }, Option{
		Name: "penalty", Shadow: true, LimitedOnly: true,
		Help:  "excess fills the bucket, or holds it (leaky)",
		Doc:   "`fill`: excess leaves the bucket full; `30s`: full, and held so for that long after each excess packet",
		valid: func(r *Rule) error { return r.Penalty.validate() },
		fits:  fitPenalty,
	}),
	same(func(l *Limit) *Fail { return &l.Fail }, func(r *Rule) *Fail { return &r.Fail }, Option{
		Name: "fail", Help: "verdict if a bucket cannot be updated",
		Doc:   "what becomes of a packet whose bucket can not be updated: `open` or `closed`",
		valid: func(r *Rule) error { return checkName(r.Fail, "fail", failNames) },
	}),
	option(func(l *Limit) *Overhead { return &l.Overhead }, func(r *Rule) *int16 { return &r.Framing.Overhead }, numberText[int16], Option{
		Name: "overhead", Shadow: true, HelpDefault: "0",
		Help:       "added `bytes`; or ethernet, docsis, pppoe-ptm",
		Doc:        "bytes that the link adds to each packet; or tc-cake's `ethernet`, `docsis`, `pppoe-ptm`",
		DocDefault: "0",
		resolve:    resolveOverhead,
		valid:      func(r *Rule) error { return checkFraming(int(r.Framing.Overhead), int(r.Framing.MPU)) },
	}),
	option(func(l *Limit) *MPU { return &l.MPU }, func(r *Rule) *uint16 { return &r.Framing.MPU }, numberText[uint16], Option{
		Name: "mpu", Shadow: true, Help: "least `bytes` that a packet counts",
		Doc:        "bytes that a packet counts at least",
		DocDefault: "0",
		resolve:    resolveMPU,
	}),
}

var noRule Rule // has no option

// option completes an option that a limit has as L and a rule as R.
func option[L, R comparable, P interface {
	*L
	Value
}](in func(*Limit) P, of func(*Rule) *R, text func(R) string, o Option) *Option {
	o.Value = func(l *Limit) Value { return in(l) }
	o.Reset = func(l *Limit) { *in(l) = *new(L) }
	o.Text = func(r *Rule) string { return text(*of(r)) }
	o.Same = func(a, b *Rule) bool { return *of(a) == *of(b) }
	return &o
}

// same completes an option that a rule has as its limit has it.
func same[T comparable, P interface {
	*T
	Value
}](in func(*Limit) P, of func(*Rule) P, o Option) *Option {
	o.resolve = func(l *Limit, r *Rule, _ uint8) error {
		*of(r) = *in(l)
		return nil
	}
	return option(in, func(r *Rule) *T { return of(r) }, func(v T) string { return P(&v).String() }, o)
}

// Useful reports whether the other options of r let it make use of this one.
func (o *Option) Useful(r *Rule) bool {
	return !slices.ContainsFunc(o.needs, func(n need) bool { return !n.met(r) })
}

// noUse is the error of a rule that has the option where it has no use. It does not
// give a value that may be a default from other options.
func (o *Option) noUse(r *Rule, why string) error {
	says := o.Name
	if o.Text(&noRule) != "" {
		says += " " + o.Text(r)
	}
	return fmt.Errorf("%s has no use %s", says, why)
}

// validate checks the option beside the others of r.
func (o *Option) validate(r *Rule) error {
	given := !o.Same(&noRule, r)
	if r.Rate == Unlimited {
		if given && o.LimitedOnly {
			return o.noUse(r, "in an unlimited rule; leave it out")
		}
		return nil
	}
	for _, n := range o.needs {
		if given && !n.met(r) {
			return o.noUse(r, "with "+n.why(r))
		}
	}
	if o.fits == nil {
		return nil
	}
	return o.fits(r)
}

// LimitKey is the name of an option by any of its names.
func LimitKey(name string) string {
	if o := FindOption(name); o != nil {
		return o.Name
	}
	return name
}

// FindOption is the option of a name, also one of its aliases; nil if there is none.
func FindOption(name string) *Option {
	for _, o := range Options {
		if o.Name == name || slices.Contains(o.Aliases, name) {
			return o
		}
	}
	return nil
}
