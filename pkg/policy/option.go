package policy

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Value is the value of an option in a Limit, and a pflag.Value. Set parses what String
// prints; String is empty for a value that is not set. Type describes the value in a
// flag's help: the words of a choice have | between them.
type Value interface {
	Set(string) error
	String() string
	Type() string
}

// An Option is an option of a limit: a flag of set and replay, and a key of policy files.
type Option struct {
	Name    string
	Aliases []string

	Help        string // of its flag
	HelpDefault string // the default in Help, if it is not the Value of an empty Limit
	Doc         string // in docs/reference/policy.md, if Help does not say all
	DocDefault  string // the default there, if it is neither HelpDefault nor the Value of an empty Limit, nor none

	Label       bool // it is a text for people, in Rule.Label; defaults and replays have none
	Shadow      bool // a shadow can have it
	LimitedOnly bool // an unlimited rule cannot have it
	RuleOnly    bool // a pool cannot have it
	PoolOnly    bool // a rule cannot have it
	Decides     bool // the defaults and the use of others depend on it
	Fact        bool // shapectl sets it, so it is in files and not among flags

	instead string // with RuleOnly and PoolOnly: what to do where the option cannot be

	// Value returns the option's field of a limit.
	Value func(*Limit) Value
	// Copy copies the option from one limit to another.
	Copy func(to, from *Limit)
	// Text returns the value in r as Value.Set parses it; empty if r does not have the option.
	Text func(r *Rule) string
	// Same reports whether two rules have the same value.
	Same func(a, b *Rule) bool

	index int // among Options

	needs []need
	// resolve sets the option in a rule, where the options before it in Options are set.
	resolve func(l *Limit, r *Rule) error
	check   func(*Rule) error // checks the value in a rule that meets all needs; may be nil
}

// A need is a condition without which an option has no use.
type need struct {
	option string // what the condition is about; "" for where the option is
	met    func(*Rule) bool
	why    string // completes "has no use" with the conflict and what to do; %v is the value of that option
	usual  bool   // it is for what defaults and plans say: a rule itself may have the option anyway

	about *Option // the option; nil for where the option is
}

func limited(r *Rule) bool { return r.Rate != Unlimited }

var (
	needsRate = []need{
		{option: "rate", met: func(r *Rule) bool { return limited(r) || r.Within == "" }, why: "in a rule that has only its pools; give it a rate, or leave this out"},
		{option: "rate", met: limited, why: "in an unlimited rule; leave it out"},
	}
	needsDelay        = need{option: "excess", met: func(r *Rule) bool { return r.Excess == Delay }, why: "with excess %v; leave it out, or use excess delay"}
	needsNoDelay      = need{option: "excess", met: func(r *Rule) bool { return r.Excess != Delay }, why: "with excess delay, which queues packets instead; leave one of them out"}
	needsSharedBucket = need{option: "each", met: func(r *Rule) bool { return r.Each.Kind != EachFlow }, why: "with each flow, where every flow has its own queue; leave it out"}
	needsBuckets      = need{option: "each", met: func(r *Rule) bool { return !r.hasOneBucket() }, why: "with each all, which has one bucket; leave it out"}
	needsOneBucket    = need{option: "each", met: (*Rule).hasOneBucket, why: "with each %v, which has no bucket to share; leave one of them out"}
	needsPool         = need{option: "within", met: func(r *Rule) bool { return r.Within != "" }, why: "with no pool to draw from; name one with within, or leave it out"}
	needsGuarantee    = need{option: "guarantee", met: func(r *Rule) bool { return r.guaranteed() != 0 }, why: "with no guarantee; leave it out"}
	needsNoGuarantee  = need{option: "guarantee", met: func(r *Rule) bool { return r.Guarantee == 0 }, why: "with guarantee %v; leave one of them out"}
	needsNoPenalty    = need{option: "penalty", met: func(r *Rule) bool { return r.Penalty.Kind == PenaltyNone }, why: "with a penalty, which would punish all sharers for one; leave one of them out"}
	needsCluster      = need{option: "cluster", met: func(r *Rule) bool { return r.Cluster.Name != "" }, why: "with no cluster; name one with cluster, or leave it out"}
	needsNoFixedShare = need{option: "cluster-share", met: func(r *Rule) bool { return r.Cluster.Share == 0 }, why: "with cluster-share, which is fixed; leave one of them out"}
	needsAdapt        = need{option: "adapt-min", met: func(r *Rule) bool { return r.Adapt.Min != 0 }, why: "with no lowest rate to adapt to; give one with adapt-min, or leave it out"}
	needsAware        = need{option: "colour-aware", met: func(r *Rule) bool { return r.Colours.Aware }, why: "with packets that all come in green; add colour-aware, or leave it out"}

	needsQuota        = need{option: "quota", met: (*Rule).hasQuota, why: "without a quota; give one, or leave this out"}
	needsNoColourRule = needsAlgorithm("%v, whose packets have colours; use gcra or leaky", GCRA, Leaky)

	needsColours   = needsAlgorithm("%v; use srtcm, trtcm or rfc4115, or leave it out", SRTCM, TRTCM, RFC4115)
	needsNoColours = needsAlgorithm("%v, which queues nothing; leave it out", GCRA, Leaky)
)

// needsAlgorithm is the need for one of some algorithms. why completes "with the algorithm".
func needsAlgorithm(why string, some ...Algorithm) need {
	return need{option: "algorithm", met: func(r *Rule) bool { return slices.Contains(some, r.Algorithm) }, why: "with the algorithm " + why}
}

// Options lists all options of a limit, in the order in which they are
// written. The default of an option depends only on options before it.
var Options = []*Option{
	option(func(l *Limit) *Rate { return &l.Rate }, func(r *Rule) *Rate { return &r.Rate }, Rate.String, Option{
		Name: "rate", Aliases: []string{"cir"}, Shadow: true, Decides: true,
		Help:       "10mbit, 1.5gbit, 125MB/s, unlimited (--cir)",
		Doc:        "the rate in the long run: `10mbit`, `1.5gbit`, `125MB/s`, `unlimited`",
		DocDefault: "must be given, except with `within`",
		resolve:    resolveRate,
		check:      checkOwnRate,
	}),
	sizeOption(func(l *Limit) *Capacity { return &l.Capacity }, func(r *Rule) *uint64 { return &r.Capacity }, Option{
		Name: "capacity", Aliases: []string{"burst", "cbs"}, Shadow: true, LimitedOnly: true,
		Help:       "burst: 64kb (65536 bytes) or 100ms (--burst, --cbs)",
		Doc:        "the burst that a bucket holds: `64kb` (binary, as in tc), or a time at the rate: `100ms`",
		DocDefault: "300 ms of the rate, at least 128 KiB; for `leaky` with `--excess delay` as `--queue`",
		resolve:    resolveCapacity, check: checkCapacity,
	}),
	option(func(l *Limit) *Algorithm { return &l.Algorithm }, func(r *Rule) *Algorithm { return &r.Algorithm }, Algorithm.String, Option{
		Name: "algorithm", Decides: true, Help: "`meter`: gcra, leaky; srtcm, trtcm, rfc4115",
		Doc: "`gcra` or `leaky`: both give the same verdicts; only `leaky` has penalties. `srtcm`, `trtcm` and `rfc4115` give packets [colours](#colours)",
		needs: []need{
			{option: "algorithm", met: func(r *Rule) bool { return !r.Pool || !r.Algorithm.HasColours() }, why: "in a pool, which gives packets no colours; use gcra or leaky"},
			{option: "rate", met: func(r *Rule) bool { return limited(r) || !r.Algorithm.HasColours() }, why: needsRate[1].why},
		},
		resolve: resolveAlgorithm,
		check:   func(r *Rule) error { return checkName(r.Algorithm, "algorithm", algorithmNames) },
	}),
	same(func(l *Limit) *Each { return &l.Each }, func(r *Rule) *Each { return &r.Each }, Option{
		Name: "each", Decides: true, Shadow: true, LimitedOnly: true, Help: "who gets a bucket",
		RuleOnly: true, instead: "a pool has one bucket; use share for parts of it",
		check: func(r *Rule) error { return checkScope("each", r.Each.Kind, r.Each.Bits, eachNames, r) },
	}),
	same(func(l *Limit) *Excess { return &l.Excess }, func(r *Rule) *Excess { return &r.Excess }, Option{
		Name: "excess", Decides: true, LimitedOnly: true, Help: "what happens to excess packets",
		Doc:   "what happens to excess packets: `drop`; `ecn` marks packets that allow it, up to twice the capacity, and drops the others; `pass` only counts them; `delay` queues them, see [shaping](../shaping.md)",
		needs: []need{needsAlgorithm("%v; say what happens to packets with green, yellow and red", GCRA, Leaky)},
		check: checkExcess,
	}),
	sizeOption(func(l *Limit) *Capacity { return &l.Queue }, func(r *Rule) *uint64 { return &r.Queue }, Option{
		Name: "queue", LimitedOnly: true,
		Help:       "length of the queue: 64kb or 50ms (gcra)",
		Doc:        "with `gcra` and `--excess delay`: the length of the queue, as a size or a time at the rate",
		DocDefault: "50 ms of the rate, at least 16 KiB; below 29 kbit 4.5 s of the rate",
		needs:      []need{needsNoColours, needsDelay, needsAlgorithm("%v, whose capacity is the queue; set the capacity instead", GCRA)},
		resolve:    resolveQueue, check: checkQueue,
	}),
	option(func(l *Limit) *ECNAbove { return &l.ECNAbove }, func(r *Rule) *ECNAbove { return &r.ECNAbove }, ECNAbove.String, Option{
		Name: "ecn-above", LimitedOnly: true,
		Help:       "mark packets that would wait longer (ECN)",
		Doc:        "with `--excess delay`: mark packets by ECN that are delayed longer than this; or `never`",
		DocDefault: "half of the longest delay",
		needs:      []need{needsNoColours, needsDelay},
		resolve:    resolveECNAbove, check: checkECNAbove,
	}),
	same(func(l *Limit) *Order { return &l.Order }, func(r *Rule) *Order { return &r.Order }, Option{
		Name: "order", LimitedOnly: true,
		Help:  "sparse-first: small flows skip the queue (gcra)",
		Doc:   "with `gcra` and `--excess delay`: the order of the queue, `fifo`, or `sparse-first`: flows that send little go first",
		needs: []need{needsNoColours, needsDelay, needsAlgorithm("%v, whose output never exceeds the rate; use the algorithm gcra", GCRA), needsSharedBucket},
		check: func(r *Rule) error { return checkName(r.Order, "order", orderNames) },
	}),
	same(func(l *Limit) *Penalty { return &l.Penalty }, func(r *Rule) *Penalty { return &r.Penalty }, Option{
		Name: "penalty", Shadow: true, LimitedOnly: true,
		RuleOnly: true, instead: "leave it out",
		Help:  "fill the bucket, or keep it full (leaky)",
		Doc:   "with `leaky`: `fill`: each excess packet fills the bucket; `30s`: each excess packet keeps the bucket full for that long",
		needs: []need{needsNoDelay, needsAlgorithm("%v; leave it out, or use leaky", Leaky)},
		check: checkPenalty,
	}),
	same(func(l *Limit) *Guarantee { return (*Guarantee)(&l.Colours.PIR) }, func(r *Rule) *Guarantee { return (*Guarantee)(&r.Colours.PIR) }, Option{
		Name: "pir", Shadow: true, LimitedOnly: true, RuleOnly: true, instead: noColoursInPool,
		Help:       "peak rate (trtcm)",
		Doc:        "with `trtcm`: the peak information rate, at least the rate: packets beyond it are red",
		DocDefault: "must be given then",
		needs:      []need{needsAlgorithm("%v; use trtcm, or leave it out", TRTCM)},
		check:      checkPIR,
	}),
	sizeOption(func(l *Limit) *Capacity { return &l.Colours.PBS }, func(r *Rule) *uint64 { return &r.Colours.PBS }, Option{
		Name: "pbs", Shadow: true, LimitedOnly: true, RuleOnly: true, instead: noColoursInPool,
		Help:       "peak burst (trtcm)",
		Doc:        "with `trtcm`: the peak burst size, as a size or a time at `pir`",
		DocDefault: "300 ms of `pir`, at least 128 KiB",
		needs:      []need{needsAlgorithm("%v; use trtcm, or leave it out", TRTCM)},
		resolve:    resolvePBS,
		check:      func(r *Rule) error { return checkBurst("pbs", r.Colours.PBS, r.Colours.PIR) },
	}),
	same(func(l *Limit) *Guarantee { return (*Guarantee)(&l.Colours.EIR) }, func(r *Rule) *Guarantee { return (*Guarantee)(&r.Colours.EIR) }, Option{
		Name: "eir", Shadow: true, LimitedOnly: true, RuleOnly: true, instead: noColoursInPool,
		Help:       "excess rate (rfc4115)",
		Doc:        "with `rfc4115`: the excess information rate, that of yellow packets; it comes on top of the rate",
		DocDefault: "must be given then",
		needs:      []need{needsAlgorithm("%v; use rfc4115, or leave it out", RFC4115)},
		check:      checkEIR,
	}),
	ebsOption(Option{
		Name: "ebs", Shadow: true, LimitedOnly: true, RuleOnly: true, instead: noColoursInPool,
		Help:       "excess burst (srtcm, rfc4115)",
		Doc:        "with `srtcm` and `rfc4115`: the excess burst size, that of yellow packets, as a size or a time at the rate or `eir`; with `0` no packet is yellow",
		DocDefault: "300 ms of the rate (`srtcm`) or of `eir`, at least 128 KiB",
		needs:      []need{needsAlgorithm("%v; use srtcm or rfc4115, or leave it out", SRTCM, RFC4115)},
		resolve:    resolveEBS,
		check:      checkEBS,
	}),
	same(func(l *Limit) *Switch { return &l.Colours.Aware }, func(r *Rule) *Switch { return (*Switch)(&r.Colours.Aware) }, Option{
		Name: "colour-aware", LimitedOnly: true, RuleOnly: true, instead: noColoursInPool,
		Help:  "packets come in with a colour, by DSCP",
		Doc:   "`true`: packets come in with the colour that their DSCP has in `colours`, and never get a better one; `false`: all come in green",
		needs: []need{needsColours},
	}),
	option(func(l *Limit) *ColourMap { return &l.Colours.In }, func(r *Rule) *ColourMap { return &r.Colours.In }, ColourMap.String, Option{
		Name: "colours", LimitedOnly: true, RuleOnly: true, instead: noColoursInPool,
		HelpDefault: "AFx2 yellow, AFx3 red", Help: "AF12=yellow,CS1=red; others are green",
		Doc:        "with `colour-aware`: DSCPs and their colours, `{AF12: yellow, CS1: red}`, as a flag `AF12=yellow,CS1=red`; others are green",
		DocDefault: "`colours` of the file, else AFx2 yellow and AFx3 red",
		needs:      []need{needsColours, needsAware},
		resolve:    resolveIn,
		check:      checkIn,
	}),
	actionOption(ActionPass, func(c *ColourOptions) *Action { return &c.Green }, func(c *Colours) *Action { return &c.Green }, Option{
		Name: "green", Help: "what happens to green packets",
		Doc:        "what happens to green packets: `pass`, `drop`, `ecn` (marks packets that allow it, and drops the others), or `dscp:AF11` (sets the DSCP)",
		DocDefault: "`pass`",
	}),
	actionOption(ActionPass, func(c *ColourOptions) *Action { return &c.Yellow }, func(c *Colours) *Action { return &c.Yellow }, Option{
		Name: "yellow", Help: "what happens to yellow packets",
		DocDefault: "`pass`",
	}),
	actionOption(ActionDrop, func(c *ColourOptions) *Action { return &c.Red }, func(c *Colours) *Action { return &c.Red }, Option{
		Name: "red", Help: "what happens to red packets",
		HelpDefault: "drop",
	}),
	same(func(l *Limit) *Fail { return &l.Fail }, func(r *Rule) *Fail { return &r.Fail }, Option{
		Name: "fail", Help: "pass or drop if a bucket cannot be updated",
		RuleOnly: true, instead: "set it in rules",
		check: func(r *Rule) error { return checkName(r.Fail, "fail", failNames) },
	}),
	option(func(l *Limit) *Overhead { return &l.Overhead }, func(r *Rule) *int16 { return &r.Framing.Overhead }, numberText[int16], Option{
		Name: "overhead", Shadow: true, HelpDefault: "0",
		RuleOnly: true, instead: "set it in rules, whose packets count in pools as they count there",
		Help:    "`bytes` that the link adds; or " + strings.Join(FramingNames, ", "),
		resolve: resolveOverhead,
		check:   func(r *Rule) error { return checkFraming(int(r.Framing.Overhead), int(r.Framing.MPU)) },
	}),
	numberOption(func(l *Limit) *uint16 { return &l.MPU }, func(r *Rule) *uint16 { return &r.Framing.MPU }, numberText, 0, MaxMPU, Option{
		Name: "mpu", Shadow: true, Help: "fewest `bytes` that a packet counts as",
		RuleOnly: true, instead: "set it in rules, whose packets count in pools as they count there",
		resolve: resolveMPU,
	}),
	textOption(func(l *Limit) *Within { return &l.Within }, func(r *Rule) *Within { return &r.Within }, MaxName, "pool", Option{
		Name: "within", Decides: true, Help: "draw from this pool, too",
		Doc:   "the [pool](../pools.md) that the rule or pool draws from; a rule without a rate has only its pools",
		check: checkWithin,
	}),
	same(func(l *Limit) *Guarantee { return &l.Guarantee }, func(r *Rule) *Guarantee { return &r.Guarantee }, Option{
		Name:  "guarantee",
		Help:  "rate that the pool always has for the rule",
		needs: []need{needsPool},
		check: checkGuarantee,
	}),
	numberOption(func(l *Limit) *Members { return &l.Members }, func(r *Rule) *Members { return &r.Members }, Members.String, 1, math.MaxUint32, Option{
		Name: "members", RuleOnly: true, instead: "a pool has one bucket, so leave it out",
		Help:       "most buckets that have the guarantee",
		DocDefault: "must be given with a guarantee and `each`",
		needs:      []need{needsPool, needsGuarantee, needsBuckets},
	}),
	numberOption(func(l *Limit) *Weight { return &l.Weight }, func(r *Rule) *Weight { return &r.Weight }, Weight.String, 1, MaxWeight, Option{
		Name: "weight", Help: "weight in the pool's shares: 1 to 256",
		check: func(r *Rule) error { return checkWeight("weight", r.Weight) },
		needs: []need{needsPool},
	}),
	same(func(l *Limit) *Share { return &l.Share }, func(r *Rule) *Share { return &r.Share }, Option{
		Name: "share", LimitedOnly: true, Help: "who gets a fair share of the bucket",
		Doc:   "who gets a fair share of the bucket: each `host`, each subnet `/N`, or each `flow`; in a pool also each `member`; with `none`, first come, first served",
		needs: []need{needsAlgorithm("%v, which has no shares; leave it out", GCRA, Leaky), needsOneBucket, needsNoPenalty},
		check: checkShare,
	}),
	same(func(l *Limit) *Switch { return &l.NAT }, func(r *Rule) *Switch { return (*Switch)(&r.NAT) }, Option{
		Name: "nat", LimitedOnly: true, Help: "hosts are those behind NAT",
		Doc:   "the hosts of `each` and `share` are those [behind NAT](../for/line.md#behind-nat): `true` or `false`",
		needs: []need{{option: "share", met: (*Rule).tellsHosts, why: "without hosts to tell apart; add each host or share host, or leave it out"}},
	}),
	textOption(func(l *Limit) *ClusterName { return &l.Cluster.Name }, func(r *Rule) *ClusterName { return &r.Cluster.Name }, MaxName, "name", Option{
		Name: "cluster", PoolOnly: true, Help: "share the rate with this cluster's hosts",
	}),
	numberOption(func(l *Limit) *Weight { return &l.Cluster.Weight }, func(r *Rule) *Weight { return &r.Cluster.Weight }, Weight.String, 1, MaxWeight, Option{
		Name: "cluster-weight", PoolOnly: true, Help: "weight of this host: 1 to 256",
		check: func(r *Rule) error { return checkWeight("cluster-weight", r.Cluster.Weight) },
		needs: []need{needsCluster, needsNoFixedShare},
	}),
	clusterRate(func(c *Cluster) *Rate { return &c.Floor }, Option{
		Name: "cluster-floor", Help: "rate that a lease of this host has at least",
		needs: []need{needsCluster, needsNoFixedShare},
	}),
	clusterRate(func(c *Cluster) *Rate { return &c.Share }, Option{
		Name: "cluster-share", Help: "fixed rate of this host, not by demand",
		needs: []need{needsCluster},
	}),
	clusterRate(func(c *Cluster) *Rate { return &c.Safe }, Option{
		Name: "cluster-safe", HelpDefault: "an equal part", Help: "rate of this host without a lease",
		DocDefault: "the rate divided by the hosts that were known at the last lease; before the first one 8 kbit/s",
		needs:      []need{needsCluster},
	}),
	same(func(l *Limit) *Guarantee { return (*Guarantee)(&l.Adapt.Min) }, func(r *Rule) *Guarantee { return (*Guarantee)(&r.Adapt.Min) }, Option{
		Name: "adapt-min", PoolOnly: true, Help: "adapt to the line's latency, down to this",
		Doc:        "the lowest rate to which [the latency of the line](../for/line.md#a-line-whose-rate-changes) may lower the rate",
		DocDefault: "none: the rate does not adapt",
		check:      checkAdaptMin,
	}),
	same(func(l *Limit) *AdaptAbove { return &l.Adapt.Above }, func(r *Rule) *AdaptAbove { return &r.Adapt.Above }, Option{
		Name: "adapt-above", PoolOnly: true, Help: "lower the rate if pings take this much longer",
		needs: []need{needsAdapt},
		check: checkAdaptAbove,
	}),
	same(func(l *Limit) *Reflectors { return &l.Adapt.To }, func(r *Rule) *Reflectors { return &r.Adapt.To }, Option{
		Name: "adapt-to", PoolOnly: true, HelpDefault: "large DNS services", Help: "ping these IP addresses",
		Doc:        "up to 8 IP addresses to ping, with commas between them; or `default`",
		DocDefault: "Cloudflare, Quad9 and Google DNS, by IPv4 and IPv6",
		needs:      []need{needsAdapt},
		check:      checkAdaptTo,
	}),
	same(func(l *Limit) *PerSecond { return &l.Also.Packets }, func(r *Rule) *PerSecond { return &r.Also.Packets }, Option{
		Name: "pps", LimitedOnly: true,
		Help:       "packets in a second: 10k (beside or instead of a rate)",
		Doc:        "packets in a second, beside the rate or instead of it: `500`, `10k`, `1m`",
		DocDefault: "any number",
		needs:      []need{needsNoColourRule},
	}),
	numberOption(func(l *Limit) *Count { return &l.Also.PacketBurst }, func(r *Rule) *Count { return &r.Also.PacketBurst }, Count.String, 1, math.MaxUint32, Option{
		Name: "pps-burst", LimitedOnly: true, Help: "packets that may come at once",
		DocDefault: "those of 100 ms, at least 64",
		needs:      []need{{option: "pps", met: func(r *Rule) bool { return r.Also.Packets != 0 }, why: "without pps; give it, or leave this out"}},
		resolve: func(l *Limit, r *Rule) error {
			r.Also.PacketBurst = l.Also.PacketBurst.resolve(r.Also.Packets, 10, leastPacketBurst)
			return nil
		},
	}),
	same(func(l *Limit) *PerSecond { return &l.Also.Flows }, func(r *Rule) *PerSecond { return &r.Also.Flows }, Option{
		Name: "new-flows", LimitedOnly: true,
		Help:       "new connections and flows in a second: 50",
		Doc:        "packets in a second that begin a flow: the SYN of TCP; of others the first one, and the first after 15 to 30 s without",
		DocDefault: "any number",
		needs:      []need{needsNoColourRule, {option: "each", met: func(r *Rule) bool { return r.Each.Kind != EachFlow }, why: "with each flow, which begins once; leave it out"}},
	}),
	numberOption(func(l *Limit) *Count { return &l.Also.FlowBurst }, func(r *Rule) *Count { return &r.Also.FlowBurst }, Count.String, 1, math.MaxUint32, Option{
		Name: "new-flows-burst", LimitedOnly: true, Help: "new flows that may come at once",
		DocDefault: "those of a second, at least 10",
		needs:      []need{{option: "new-flows", met: func(r *Rule) bool { return r.Also.Flows != 0 }, why: "without new-flows; give it, or leave this out"}},
		resolve: func(l *Limit, r *Rule) error {
			r.Also.FlowBurst = l.Also.FlowBurst.resolve(r.Also.Flows, 1, leastFlowBurst)
			return nil
		},
	}),
	same(func(l *Limit) *Quota { return &l.Also.Quota }, func(r *Rule) *Quota { return &r.Also.Quota }, Option{
		Name: "quota", LimitedOnly: true,
		Help:       "bytes in a period: 100gb/month, 5gb/day, 100gb/30d",
		Doc:        "bytes in a [period](../quotas.md): `100gb/month` (binary, as in tc), `/month@15`, `/week`, `/week@sun`, `/day`; or what comes back steadily within hours or days: `100gb/30d`",
		DocDefault: "none",
		needs:      []need{needsNoColourRule},
	}),
	same(func(l *Limit) *Then { return &l.Also.Then }, func(r *Rule) *Then { return &r.Also.Then }, Option{
		Name: "then", LimitedOnly: true,
		Help:       "rate once the quota is used up, or drop",
		DocDefault: "must be given with a quota",
		needs:      []need{needsQuota}, check: checkThen,
	}),
	written(func(l *Limit) *uint64 { return &l.Also.Grace }, func(r *Rule) *uint64 { return &r.Also.Grace },
		func(v *uint64) Value { return volume{v, "grace"} }, volumeText, Option{
			Name: "grace", LimitedOnly: true, Help: "bytes beyond the quota that have the full rate",
			needs: []need{needsQuota},
			resolve: func(l *Limit, r *Rule) error {
				r.Also.Grace = l.Also.Grace
				return nil
			},
		}),
	textOption(func(l *Limit) *Zone { return &l.Also.Zone }, func(r *Rule) *Zone { return &r.Also.Zone }, MaxName, "zone", Option{
		Name: "quota-zone", LimitedOnly: true, Help: "time zone, such as Europe/Berlin",
		DocDefault: "that of the host",
		needs:      []need{needsQuota}, check: checkZone,
	}),
	shadowOption,
	textOption(func(l *Limit) *string { return &l.Name }, func(r *Rule) *string { return &r.Label.Name }, MaxName, "text", Option{
		Name: "name", Label: true,
		Help: "who or what the rule is for, at most 64 bytes",
	}),
	textOption(func(l *Limit) *string { return &l.Note }, func(r *Rule) *string { return &r.Label.Note }, MaxNote, "text", Option{
		Name: "note", Label: true,
		Help: "remark about the rule, at most 256 bytes",
	}),
	same(func(l *Limit) *MAC { return &l.Host }, func(r *Rule) *MAC { return &r.Label.Host }, Option{
		Name: "host", Fact: true,
		Doc: "no flag, as `export` writes it: the [host](#hosts) that the rule or pool is for",
	}),
	same(func(l *Limit) *Guarantee { return &l.Waits }, func(r *Rule) *Guarantee { return &r.Label.Waits }, Option{
		Name: "waits", Fact: true,
		Doc:   "no flag: the guarantee that the rule or pool gets once there is room in its pool",
		needs: []need{needsPool, needsNoGuarantee},
	}),
	same(func(l *Limit) *Owner { return &l.Owner }, func(r *Rule) *Owner { return &r.Label.Owner }, Option{
		Name: "owner", Fact: true, PoolOnly: true,
		Doc:     "no flag: the device, direction and host that a pool belongs to: `tap7 egress alice`. When the device is gone, `serve` deletes the pool",
		instead: "a rule belongs to its device, so leave it out",
	}),
	textOption(func(l *Limit) *LineOf { return &l.Line }, func(r *Rule) *LineOf { return &r.Label.Line }, MaxName, "device", Option{
		Name: "line", Fact: true, PoolOnly: true,
		Doc:     "no flag: the device of the line that a pool is of. `shapectl line` changes and removes the pool",
		instead: "write it in its pool, or leave it out",
	}),
}

func init() {
	for i, o := range Options {
		o.index = i
		first := []need(nil)
		if o.RuleOnly {
			first = append(first, need{met: func(r *Rule) bool { return !r.Pool }, why: "in a pool; " + o.instead})
		}
		if o.PoolOnly {
			first = append(first, need{met: func(r *Rule) bool { return r.Pool }, why: "in a rule; " + cmp.Or(o.instead, "give it to a pool, and put the rule within that")})
		}
		if o.LimitedOnly {
			first = append(first, needsRate...)
		}
		o.needs = slices.Concat(first, o.needs)
		for i := range o.needs {
			o.needs[i].about = FindOption(o.needs[i].option)
		}
	}
}

// They have no option set.
var (
	noRule  Rule
	noLimit Limit
)

// Useful reports whether the option has a use beside the other options of r.
func (o *Option) Useful(r *Rule) bool {
	return !slices.ContainsFunc(o.needs, func(n need) bool { return !n.met(r) })
}

// DependsOn reports whether the option has a use only with some values of another one.
func (o *Option) DependsOn(other string) bool {
	return slices.ContainsFunc(o.needs, func(n need) bool { return n.option == other })
}

// unmet is the first need that a rule with the option does not meet; nil for none.
func (o *Option) unmet(r *Rule) *need {
	for i := range o.needs {
		if n := &o.needs[i]; !n.usual && !n.met(r) {
			return n
		}
	}
	return nil
}

// noUse is the error of an option that has no use, with its value unless that may be a default, which nobody wrote.
func (o *Option) noUse(r *Rule, n *need, value string) error {
	what := o.Name
	if value != "" && n.option != "" {
		what += " " + value
	}
	why := n.why
	if n.about != nil {
		why = strings.Replace(why, "%v", n.about.Text(r), 1)
	}
	return fmt.Errorf("%s has no use %s", what, why)
}

// validate checks the option together with the others of r.
func (o *Option) validate(r *Rule) error {
	n := o.unmet(r)
	switch {
	case n != nil && o.Same(&noRule, r), n == nil && o.check == nil:
		return nil
	case n == nil:
		return o.check(r)
	case o.Text(&noRule) == "":
		return o.noUse(r, n, "")
	}
	return o.noUse(r, n, o.Text(r))
}

// LimitKey returns the name of the option that has a name or alias, and any other text as
// it is.
func LimitKey(name string) string {
	if o := FindOption(name); o != nil {
		return o.Name
	}
	return name
}

// FindOption returns the option that has a name or alias, or nil.
func FindOption(name string) *Option {
	for _, o := range Options {
		if o.Name == name || slices.Contains(o.Aliases, name) {
			return o
		}
	}
	return nil
}
