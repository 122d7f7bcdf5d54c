package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// filterRules says which rules are meant.
type filterRules struct {
	device    string            // "" for any
	pattern   bool              // device is a pattern: resolve decides
	direction *policy.Direction // nil for both
	networks  networks          // exactly these; nil for all

	// What show searches for; each only if set.
	address netip.Addr    // rules whose network contains it, the one that decides first
	network *netip.Prefix // rules for it or for networks in it; if there are none, the one that contains it
	wider   bool          // only that one
	label   string        // a rule's name or plan: exactly, else by a pattern, else a part of it; else a part of the note
	plan    string        // exactly

	buckets  bool // with the buckets that are not empty
	active   bool // with their number
	affected bool // with the hosts that shadows would have affected
	brief    bool // without sentences
}

// networks are the networks that one argument names.
type networks []netip.Prefix

func (n networks) String() string {
	if len(n) > 1 {
		return policy.Any
	}
	return n[0].String()
}

type showOptions struct {
	wide, sentences, buckets, shadows bool

	interval time.Duration // 0 for none
	sort     string
	top      int // 0 for all
}

const (
	leastInterval = 10 * time.Millisecond
	maxInterval   = time.Hour
)

func showCommand(e *env) *cobra.Command {
	var o showOptions
	var plan string
	cmd := &cobra.Command{
		Use:   "show [DEV [ingress|egress [CIDR|any]] | ADDRESS | CIDR | NAME | PLAN] [flags]",
		Short: "Show rules and what happened to their packets",
		Long: `Show rules and what happened to their packets. A device, direction and network name one rule, which is shown in
full. A single argument may also be an address, a network, or a name:

  ADDRESS   the rules whose network contains it; the first one decides
  CIDR      the rules for it and for parts of it, else the one that contains it
  NAME      the rules with that name or plan, or a pattern or part of it, or with
            a part of the note

PASSED and DROPPED count since a rule was set. With --interval, USE and DROPPED are those of that time. OF RATE is
USE in percent of the rate, if a rule has one bucket. DROPPED is a share of packets. Columns without values are
left out. An argument that names neither a device nor a rule is an error (exit code 1).

any stands for 0.0.0.0/0 and ::/0. DEV may be a pattern, see 'shapectl help patterns'.`,
		Example: `  shapectl show eth0
  shapectl show 10.0.3.7
  shapectl show --interval 1s --sort use --top 10
  shapectl show 'tap*' egress --wide`,
		Args:              args(0, 3),
		ValidArgsFunction: e.completeShow,
		RunE: func(cmd *cobra.Command, given []string) error {
			if err := o.check(cmd); err != nil {
				return err
			}
			if len(given) > 0 && given[0] == "" {
				return inputf("show: the first argument is empty; leave it out for all rules")
			}
			want, err := parseFilter("show", given)
			if err != nil {
				return err
			}
			if want.plan = plan; plan == "" && cmd.Flags().Changed("plan") {
				return inputf("show: --plan is empty; leave it out for all rules")
			}
			want.buckets, want.affected = o.buckets, o.shadows || e.json
			return e.show(want, len(given) == 1, o)
		},
	}
	flags := cmd.Flags()
	flags.Var(duration(&o.interval), "interval", "measure use and drops over this `time`, such as 1s")
	flags.StringVar(&o.sort, "sort", "device", "`order`: "+strings.Join(report.Sorts, ", "))
	flags.IntVar(&o.top, "top", 0, "show only the first `N` rules, or buckets")
	flags.StringVar(&plan, "plan", "", "only rules that follow this plan")
	flags.BoolVar(&o.wide, "wide", false, "show all columns")
	flags.BoolVar(&o.sentences, "sentences", false, "describe each rule in a sentence")
	flags.BoolVar(&o.buckets, "buckets", false, "list the buckets that are not empty, and the delay of a packet")
	flags.BoolVar(&o.shadows, "shadow", false, "show what shadow limits would have refused")
	flags.BoolVar(&o.wide, "stats", false, "the same as --wide")
	must(flags.MarkHidden("stats"))
	must(cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(report.Sorts, cobra.ShellCompDirectiveNoFileComp)))
	must(cmd.RegisterFlagCompletionFunc("plan", cobra.NoFileCompletions))
	return cmd
}

// check reports options that are wrong or do not go together.
func (o showOptions) check(cmd *cobra.Command) error {
	set := cmd.Flags().Changed
	views := 0
	for _, name := range []string{"buckets", "shadow", "sentences"} {
		if set(name) {
			views++
		}
	}
	switch {
	case views > 1 || o.shadows && o.wide:
		return inputf("show: --buckets, --shadow and --sentences are screens of their own; give one of them")
	case set("interval") && (o.interval < leastInterval || o.interval > maxInterval):
		return inputf("show: --interval %v is out of range; use %v to %v", o.interval, leastInterval, maxInterval)
	case o.sort == "use" && o.interval == 0:
		return inputf("show: --sort use needs a measurement; add --interval 1s")
	case !slices.Contains(report.Sorts, o.sort):
		return inputf("show: --sort %q is unknown; use one of %s", o.sort, strings.Join(report.Sorts, ", "))
	case set("top") && o.top < 1:
		return inputf("show: --top %d shows nothing; use 1 or more", o.top)
	}
	return nil
}

// parseFilter reads [DEV [ingress|egress [CIDR]]] of a command.
func parseFilter(cmd string, given []string) (want filterRules, err error) {
	if len(given) > 0 {
		want.device = given[0]
	}
	if len(given) > 1 {
		d, err := policy.ParseDirection(given[1])
		if err != nil {
			return want, inputf("%s: %w", cmd, directionError(given[1], err))
		}
		want.direction = &d
	}
	if len(given) > 2 {
		if want.networks, err = policy.ParseNetworks(given[2]); err != nil {
			return want, inputf("%s: %w", cmd, argumentError{err})
		}
	}
	return want, nil
}

func (e *env) show(want filterRules, search bool, o showOptions) error {
	since := func(report.Rules, uint64) {}
	if o.interval > 0 {
		first := want
		first.brief, first.buckets, first.affected = true, false, false
		rules, began, err := e.rules(&first, search)
		if rules == nil {
			return err
		}
		since = sampled(rules, began)
		time.Sleep(o.interval)
	}
	want.brief, want.active = !e.json && !o.sentences, o.wide || o.buckets
	rules, at, err := e.rules(&want, search)
	if rules == nil {
		return err
	}
	since(rules, at)
	of := len(rules)
	rules.Sort(o.sort)
	if o.buckets {
		of = rules.KeepFullest(o.top)
	} else if o.top > 0 {
		rules = rules[:min(o.top, of)]
	}
	// The state is closed, so that nobody waits for the reader of a long answer.
	written := e.print(rules, func(w io.Writer) error {
		switch {
		case len(rules) == 0:
			_, err := fmt.Fprintln(w, want.noRules())
			return err
		case o.shadows:
			return rules.Shadows(w, e.columns)
		case o.buckets:
			return rules.BucketsText(w, of, e.columns)
		case o.sentences:
			return rules.Sentences(w)
		case of == 1 && want.isSingle() && !o.wide:
			return rules[0].Detail(w)
		}
		return report.Table{Rules: rules, Of: of, Wide: o.wide, Width: e.columns}.Text(w)
	})
	if written != nil {
		return e.degraded("show: done, but the answer could not be written: %w", written)
	}
	return err
}

// sampled keeps the counters of rules that were read at a time. The function measures what the same rules did since then.
func sampled(rules report.Rules, began uint64) (since func(now report.Rules, at uint64)) {
	type key struct{ device, direction, cidr string }
	keyOf := func(r *report.Rule) key { return key{r.Device, r.Direction, r.CIDR} }
	samples := make(map[key]report.Sample, len(rules))
	for i := range rules {
		samples[keyOf(&rules[i])] = rules[i].Sample()
	}
	return func(now report.Rules, at uint64) {
		for i := range now {
			if sample, ok := samples[keyOf(&now[i])]; ok {
				now[i].Since(sample, at-began)
			}
		}
	}
}

// noRules says that no rule passes a filter.
func (want filterRules) noRules() string {
	switch {
	case want.address.IsValid():
		return "no rule for " + want.address.String()
	case want.network != nil:
		return "no rule for " + want.network.String()
	}
	return "no rules"
}

// isSingle reports whether a filter is for one rule rather than for many.
func (want filterRules) isSingle() bool {
	return !want.pattern && (want.networks != nil || want.label != "" || want.address.IsValid())
}

// rules are those of a filter, and the time at which they were read. With the error come
// those that could be read, nil if there are none. The filter is resolved.
func (e *env) rules(want *filterRules, search bool) (rules report.Rules, at uint64, err error) {
	err = e.with(loader.Read, "show", func(n *loader.Namespace) error {
		resolve := want.resolve
		if search {
			resolve = want.search
		}
		if err := resolve(n); err != nil {
			return err
		}
		if want.isSingle() {
			want.brief, want.active = false, true
		}
		at = maps.Now()
		found, unread := findRules(n, *want)
		if len(found) == 0 && unread == nil {
			unread = e.checkThere(*want, n)
		}
		for i := range found {
			found[i].Confirm = e.suggest("confirm")
		}
		if len(found) > 0 || unread == nil {
			rules = found
		}
		return unread
	})
	return rules, at, err
}

// search finds out what the only argument of show means: a device, a direction, an address,
// a network, a pattern of devices, or the name or plan of rules.
func (want *filterRules) search(n *loader.Namespace) error {
	what := want.device
	if there, err := want.isDevice(n); there || err != nil {
		return err
	}
	want.device = ""
	if d, err := policy.ParseDirection(what); err == nil {
		want.direction = &d
		return nil
	}
	if what == policy.Any {
		want.networks = policy.Everything[:]
		return nil
	}
	if address, err := netip.ParseAddr(what); err == nil && address.Zone() == "" && !address.Is4In6() {
		want.address = address
		return nil
	}
	if _, err := netip.ParsePrefix(what); err == nil {
		prefix, err := policy.ParsePrefix(what)
		if err != nil {
			return inputError(err)
		}
		want.network = &prefix
		return nil
	}
	if policyfile.CheckDevice(what) == nil && strings.ContainsAny(what, `*?[\`) {
		if !policyfile.IsPattern(what) {
			want.device = policyfile.Unescape(what)
			return nil
		}
		of := filterRules{device: what, pattern: true}
		if there, err := of.matchesAny(n); there || err != nil {
			want.device, want.pattern = what, there
			return err
		}
	}
	want.label = what
	return nil
}

// isDevice reports whether the filter names one device exactly: one that is there, or had rules.
func (want filterRules) isDevice(n *loader.Namespace) (bool, error) {
	if _, err := netinfo.DeviceByName(want.device); !errors.Is(err, netinfo.ErrNoDevice) {
		return err == nil, err
	}
	hooks, err := filterRules{device: want.device}.hooks(n)
	loader.CloseHooks(hooks)
	// If they cannot be read, the caller asks for them again and gets the error.
	return len(hooks) > 0 || err != nil || slices.Contains(n.Collected(), want.device), nil
}

// matchesAny reports whether a pattern matches any device: one that is there, or had rules.
func (want filterRules) matchesAny(n *loader.Namespace) (bool, error) {
	devices, err := netinfo.Devices()
	if err != nil || slices.ContainsFunc(devices, func(d netinfo.Device) bool { return want.matchesDevice(d.Name) }) {
		return err == nil, err
	}
	hooks, err := want.hooks(n)
	loader.CloseHooks(hooks)
	return len(hooks) > 0 || err != nil, nil // the caller asks for them again and gets the error
}

// checkThere reports as an error that a filter that no rule passes names what does not exist.
func (e *env) checkThere(want filterRules, n *loader.Namespace) error {
	name := plain.Line(want.label)
	switch {
	case want.label == "" && (want.device == "" || want.pattern):
		if want.plan != "" && want.device == "" {
			return inputf("no rule follows a plan %s; %s lists all rules", plain.Line(want.plan), e.suggest("show"))
		}
		return nil
	case want.label == "":
		if _, err := device(want.device); err != nil {
			return err
		}
		if want.networks != nil {
			return e.noRule(want)
		}
		return nil
	case strings.ContainsAny(want.label, `*?[\`):
		if err := policyfile.CheckDevice(want.label); err != nil {
			return inputError(err)
		}
		return inputf("there is no device that matches %s, and no rule with such a name or plan; %s lists all rules", name, e.suggest("show"))
	}
	return inputf("there is no device %s, and no rule with that name or plan; %s lists all rules", name, e.suggest("show"))
}

func (e *env) noRule(want filterRules) error {
	return inputf("%s %s has no rule for %s; %s lists its rules",
		plain.Line(want.device), want.direction, want.networks, e.suggest("show", want.device))
}

// findRules are the rules that pass a filter; never nil, as JSON would
// show that. With the error come those that could be read.
func findRules(n *loader.Namespace, want filterRules) (rules report.Rules, err error) {
	hooks, unread := want.hooks(n)
	defer loader.CloseHooks(hooks)
	rules, err = want.find(hooks)
	if want.network != nil && len(rules) == 0 && err == nil {
		want.wider = true
		rules, err = want.find(hooks)
	}
	return rules, errors.Join(err, unread)
}

// find are the rules of hooks that pass a filter.
func (want filterRules) find(hooks []*loader.Hook) (report.Rules, error) {
	rules := report.Rules{}
	var entries []maps.Entry // of rules, and the hooks that they are of
	var of []*loader.Hook
	best := leastRank
	for _, h := range hooks {
		affected := map[uint32][]maps.Affected{}
		if want.affected {
			var err error
			if affected, err = h.Set.Affected(); err != nil {
				return rules, err
			}
		}
		for i, entry := range want.entries(h.Set) {
			rank := want.rank(entry)
			if rank < best {
				continue
			}
			if rank > best {
				best, rules, entries, of = rank, rules[:0], entries[:0], of[:0]
			}
			r := row(h, entry, affected[entry.ID])
			if !want.brief {
				r.Sentence = entry.Sentence(h.Name(), h.Direction, h.Match())
			}
			if want.address.IsValid() {
				decides := i == 0
				r.Decides = &decides
			}
			rules = append(rules, r)
			if want.buckets || want.active {
				entries, of = append(entries, entry), append(of, h)
			}
		}
	}
	if len(entries) > 0 {
		for i := range rules {
			rules[i].ActiveBuckets = new(uint64)
			if want.buckets {
				rules[i].Buckets = []report.Bucket{}
			}
		}
		for i, entry := range entries {
			if b := (maps.Bucket{Subnet: entry.Prefix, LevelBytes: rules[i].LevelBytes}); want.buckets && entry.Each.Kind == policy.EachAll && b.LevelBytes > 0 {
				rules[i].Buckets = append(rules[i].Buckets, bucketOf(of[i], entry, b))
			}
		}
		for i, b := range hooks[0].Set.BucketsOf(entries, maps.Now()) { // all hooks share the table
			*rules[i].ActiveBuckets++
			if want.buckets {
				rules[i].Buckets = append(rules[i].Buckets, bucketOf(of[i], entries[i], b))
			}
		}
	}
	return rules, nil
}

// leastRank is that of a rule which passes a filter; one that passes it better hides the others.
const leastRank = 1

// rank is how well a rule passes a filter by its label and network: less than leastRank if it does not.
func (want filterRules) rank(e maps.Entry) int {
	if want.plan != "" && e.Label.Plan != want.plan {
		return 0
	}
	if want.label == "" {
		return leastRank
	}
	contains := func(text string) bool { return strings.Contains(strings.ToLower(text), strings.ToLower(want.label)) }
	best := 0
	if contains(e.Label.Note) {
		best = leastRank
	}
	for _, name := range []string{e.Label.Name, e.Label.Plan} {
		switch {
		case name == "":
		case name == want.label:
			best = max(best, leastRank+3)
		case policyfile.IsPattern(want.label) && policyfile.Matches(want.label, name):
			best = max(best, leastRank+2)
		case contains(name):
			best = max(best, leastRank+1)
		}
	}
	return best
}

// entries are the rules of a set that pass a filter by their network.
func (want filterRules) entries(s *maps.Set) (entries []maps.Entry) {
	switch {
	case want.networks != nil:
		for _, p := range want.networks {
			if entry, ok := s.Find(p); ok {
				entries = append(entries, entry)
			}
		}
		return entries
	case want.address.IsValid():
		return containing(s, netip.PrefixFrom(want.address, want.address.BitLen()))
	case want.wider:
		narrowest := containing(s, *want.network)
		return narrowest[:min(1, len(narrowest))]
	case want.network != nil:
		return slices.DeleteFunc(s.Rules(), func(e maps.Entry) bool {
			return e.Prefix.Bits() < want.network.Bits() || !e.Prefix.Overlaps(*want.network)
		})
	}
	return s.Rules()
}

// containing are the rules whose network contains all of p, the narrowest first.
func containing(s *maps.Set, p netip.Prefix) (entries []maps.Entry) {
	for bits := p.Bits(); bits >= 0; bits-- {
		if wider, err := p.Addr().Prefix(bits); err == nil {
			if entry, ok := s.Find(wider); ok {
				entries = append(entries, entry)
			}
		}
	}
	return entries
}

// resolve finds out whether the device of a filter is a pattern. A name wins over a
// pattern, and over one with escapes: that of a device which is there, or which had it and still has rules.
func (want *filterRules) resolve(n *loader.Namespace) error {
	if !strings.ContainsAny(want.device, `*?[\`) {
		return nil
	}
	if there, err := want.isDevice(n); there || err != nil {
		return err
	}
	if err := policyfile.CheckDevice(want.device); err != nil {
		return inputError(err)
	}
	if want.pattern = policyfile.IsPattern(want.device); !want.pattern {
		want.device = policyfile.Unescape(want.device)
	}
	return nil
}

// hooksToChange resolves a filter that must name devices, and finds their hooks. It returns the errors of hooks.
func (want *filterRules) hooksToChange(n *loader.Namespace) ([]*loader.Hook, error) {
	if want.device == "" {
		return nil, noDevice("") // and not all hooks
	}
	if err := want.resolve(n); err != nil {
		return nil, err
	}
	return want.hooks(n)
}

func (want filterRules) matches(device string, d policy.Direction) bool {
	return (want.direction == nil || *want.direction == d) && want.matchesDevice(device)
}

func (want filterRules) matchesDevice(name string) bool {
	return want.device == "" || name == want.device || want.pattern && policyfile.Matches(want.device, name)
}

// hooks are those that pass the filter. With the error come those that could be read.
func (want filterRules) hooks(n *loader.Namespace) ([]*loader.Hook, error) {
	if want.device == "" && want.direction == nil {
		return n.Hooks()
	}
	if want.device == "" || want.pattern {
		hooks, err := n.Hooks()
		hooks = slices.DeleteFunc(hooks, func(h *loader.Hook) bool {
			matches := want.matches(h.Name(), h.Direction)
			if !matches {
				h.Close()
			}
			return !matches
		})
		others, err := otherLayouts(err)
		return hooks, withOthers(err, slices.DeleteFunc(others, func(other *loader.OtherLayoutError) bool {
			return !want.matches(cmp.Or(other.Now, other.Device), other.Direction)
		}))
	}
	directions := []policy.Direction{policy.Egress, policy.Ingress}
	if want.direction != nil {
		directions = []policy.Direction{*want.direction}
	}
	var hooks []*loader.Hook
	var unread []error
	for _, d := range directions {
		h, err := n.Find(want.device, d)
		if err != nil {
			unread = append(unread, err)
		} else if h != nil {
			hooks = append(hooks, h)
		}
	}
	others, err := otherLayouts(errors.Join(unread...))
	return hooks, withOthers(err, others)
}

// withOthers is the inverse of otherLayouts: they become one error.
func withOthers(err error, others loader.OtherLayouts) error {
	if len(others) == 0 {
		return err
	}
	return errors.Join(err, others)
}

// otherLayouts separates errors about hooks of another layout from the others that err joins.
func otherLayouts(err error) (others loader.OtherLayouts, rest error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		var other *loader.OtherLayoutError
		if errors.As(err, &other) {
			return loader.OtherLayouts{other}, nil
		}
		return nil, err
	}
	for _, err := range joined.Unwrap() {
		of, left := otherLayouts(err)
		others, rest = append(others, of...), errors.Join(rest, left)
	}
	return others, rest
}

// describe is all that is known of a rule.
func describe(h *loader.Hook, entry maps.Entry) report.Rule {
	r := row(h, entry, nil)
	r.Sentence = entry.Sentence(h.Name(), h.Direction, h.Match())
	return r
}

// row is a rule without its sentence; affected may be nil.
func row(h *loader.Hook, entry maps.Entry, affected []maps.Affected) report.Rule {
	level := model.Bytes(h.Set.SharedLevel(entry, maps.Now()))
	r := report.NewRule(h.Name(), h.Direction, h.Match(), entry.Rule, h.Set.Counters(entry.ID), level)
	r.Attached, r.State, r.Hook = h.State.InForce(), h.Status(), string(h.Mode)
	if change, until := h.Set.Change(); change == maps.Pending {
		r.RevertsInNS = ahead(until)
	}
	if shadow, ok := h.Set.Shadow(entry); ok {
		r.Shadow = report.NewShadow(shadow.Rule, h.Set.Counters(shadow.ID), affected, h.Set.Size().Affected)
	}
	return r
}

func bucketOf(h *loader.Hook, entry maps.Entry, b maps.Bucket) report.Bucket {
	out := report.Bucket{Key: b.Flow.String(), LevelBytes: b.LevelBytes}
	if b.Subnet.IsValid() {
		out.Key = report.SubnetName(b.Subnet)
	}
	packet := model.Packet{Bytes: model.Counted(h.Device.FullFrame(), entry.Framing)}
	o := model.NewLimit(entry.Rule).Decide(model.State{Level: b.LevelBytes << model.UnitBits, FIFO: true}, packet)
	if entry.Excess == policy.Delay && !o.Excess {
		out.WaitNS = &o.Wait
	}
	return out
}
