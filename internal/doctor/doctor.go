// Package doctor checks whether limits can be right: what the kernel and this process
// can do, and what may bypass a rule, count a packet twice, or change a limit. Gather
// collects facts and changes nothing. Judge, which needs no kernel, says what they mean.
package doctor

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Facts are about a system and a network namespace.
type Facts struct {
	System  System
	Devices []Device          // all of the namespace, as they may be stacked
	Hooks   []Hook            // all that have rules, and those that were asked about
	Pools   []Rule            // all of the namespace
	Cgroups map[string]string // the directories of those of Hooks, by name
	Unread  []Unread
	// Change is the state of the last change of many rules.
	Change maps.ChangeState
	Until  uint64 // ns until a pending one reverts
	MadeBy string // who made the pending one; "" if that is not known
	// Neighbours are the addresses of the hosts that rules and pools follow, by the index of the device.
	Neighbours map[int]map[policy.MAC][]netip.Addr
	// Unadapted: no process adapts the rates of pools to their line; false if that is not known.
	Unadapted bool
	// Lacks are rules that should be in force and are not, of the policy in Policy: "" if none is known.
	Lacks  []inforce.Lack
	Policy string
	// Unreadable is what is wrong with the policy that the units apply at boot; nil for nothing.
	Unreadable error
	// Periods are those of quotas. Unset: the clock by which they begin was never set.
	Periods []maps.Period
	Unset   bool
	// Kept are the directions of devices without a rule in force that are kept for a rollback.
	Kept []string
	// Left is what is pinned for other network namespaces that are not known to exist.
	Left []string
	// Elsewhere are the directions of devices with programs of shapectl that have no pins here.
	Elsewhere   []string
	Lost        string // see loader.Namespace
	KnowsOthers bool   // the programs may be of other namespaces, which have pins
	Only        string // the device that was asked about, "" for all that have rules
	Netns       string // the name of the network namespace in commands, "" for the one this is

	byIndex  map[int]*Device                 // of Devices, for Judge
	tree     *policy.Tree                    // of Pools
	noRoom   map[string]string               // the pool without room for the guarantees of a policy.Claim, by claimant
	queues   map[policy.Within][]policy.Rule // of the pools that delay packets: by name, itself and those above
	sharers  map[uint32]int                  // that are active, by the id of the rule or pool
	findings report.Findings
}

// System is what does not depend on a device.
type System struct {
	Kernel       string
	Capabilities uint64 // effective, a bit each
	Hook         loader.Mode
	HookErr      error // why there is none
	Probe        error // why programs do not load
	JIT          bool  // they are compiled
	BPFFS        loader.BPFFS
}

// A Device is a device with what only some checks need.
type Device struct {
	netinfo.Device
	Tunnel *netinfo.Tunnel // nil for a device that is none
	// Packets that enter it may be routed to another device.
	Forwards4, Forwards6 bool
	Offloads             netinfo.Offloads
	// The rest is known of the devices of Hooks only.
	IPv4, IPv6 bool           // it has such addresses, valid beyond its link
	Unreadable error          // why programs cannot read its packets
	Behind     netinfo.Behind // only its Line where that is another device
}

// A Hook is a direction of a device.
type Hook struct {
	Name      string
	Index     int // of the device, 0 where it is not here
	Direction policy.Direction
	Limits    *Limits // nil where there are no rules
	Other     bool    // there are rules of another layout, which cannot be read
	// Path is what packets pass; nil if that is not known.
	Path []netinfo.ChainEntry
	// Queue is nil where no rule delays packets, and if it is not known.
	Queue *Queue
	// HasOurFQ: on egress, the device has the fq qdisc of --setup-fq, which 'shapectl flush' removes.
	HasOurFQ bool
}

// Limits are the rules of a hook.
type Limits struct {
	State      loader.State
	Mode       loader.Mode
	Unpinned   bool   // the pin of the program is gone
	Was        string // the device's name when the first one was set
	OtherBuild bool
	Match      policy.Match
	Rules      []Rule
	Slots      maps.Slots // of the bucket table; only known if a rule has spilled packets

	// Frames that no rule limits, because they are neither IP nor ARP.
	OtherFrames, OtherBytes uint64
}

// A Rule is a rule with its counters.
type Rule struct {
	policy.Rule
	Counters maps.Counters
	Sharers  int        // that are active; of a rule or pool with fair shares
	Lease    maps.Lease // of a pool with a cluster
	Leased   bool       // it has not ended
}

// Unread is what could not be read.
type Unread struct {
	Device, Direction string // "" for all
	Err               error
}

// Judge says what the facts mean for limits.
func Judge(f Facts) report.Findings {
	f.byIndex = map[int]*Device{}
	for i := range f.Devices {
		f.byIndex[f.Devices[i].Index] = &f.Devices[i]
	}
	f.findPools()
	f.findings = report.Findings{}
	for _, check := range checks {
		check(&f)
	}
	for _, u := range f.Unread {
		advice := "run as root"
		if errors.Is(u.Err, maps.ErrOtherLayout) {
			advice = f.suggest("flush --all") + " deletes them"
			if !errors.Is(u.Err, maps.PinError("")) {
				advice = "use that version to see them; " + advice
			}
		}
		f.findings = append(f.findings, report.Finding{
			Status: report.Warning, Check: "access", Device: u.Device, Direction: u.Direction,
			Finding: "cannot be read, so findings may be missing: " + plain.OneLine(u.Err), Advice: advice,
		})
	}
	if len(f.Hooks) == 0 && len(f.Unread) == 0 {
		f.say(nil, report.OK, "rules", "there are none", f.suggest("doctor DEV")+" checks a device for its first rule")
	}
	for i := range f.Hooks {
		s := &f.Hooks[i]
		for _, check := range hookChecks {
			if f.judged(s.Name) {
				check(&f, s, f.byIndex[s.Index])
			}
		}
	}
	return f.findings
}

var checks = []func(*Facts){
	(*Facts).checkPermissions, (*Facts).checkPrograms, (*Facts).checkHook, (*Facts).checkBPFFS, (*Facts).checkChange,
	(*Facts).checkLeft, (*Facts).checkElsewhere, (*Facts).checkPools, (*Facts).checkChargedTwice, (*Facts).checkHosts, (*Facts).checkPolicy,
	(*Facts).checkPeriods,
}

// Each takes the device of the hook, nil where it is not here.
var hookChecks = []func(*Facts, *Hook, *Device){
	(*Facts).checkState, (*Facts).checkQueue, (*Facts).checkDevice, (*Facts).checkPath, (*Facts).checkCapacity, (*Facts).checkSpeedTest,
	(*Facts).checkPoolsOf, (*Facts).checkStacked, (*Facts).checkFamilies, (*Facts).checkCounters,
}

// say adds a finding about a hook, nil for the whole system.
func (f *Facts) say(s *Hook, status report.Status, check, finding, advice string) {
	found := report.Finding{Status: status, Check: check, Finding: finding, Advice: advice}
	if s != nil {
		found.Device, found.Direction = s.Name, s.Direction.String()
	}
	f.findings = append(f.findings, found)
}

// sayOfRules adds a finding about n rules, whose number it begins with.
func (f *Facts) sayOfRules(n int, s *Hook, status report.Status, check, of, advice string) {
	f.say(s, status, check, "", advice)
	f.findings[len(f.findings)-1].OfRules(n, of)
}

// suggest is a command line of shapectl.
func (f *Facts) suggest(verb string, args ...string) string {
	return plain.Suggest(f.Netns, verb, args...)
}

func (f *Facts) judged(name string) bool { return f.Only == "" || f.Only == name }

// flush is the command that deletes the rules of a hook.
func (f *Facts) flush(s *Hook) string { return f.suggest("flush", s.Name, s.Direction.String()) }

// limits are the rules in force on a direction of a device, nil if there are none.
func (f *Facts) limits(d *Device, direction policy.Direction) *Limits {
	for _, s := range f.Hooks {
		if s.Index == d.Index && s.Direction == direction && s.inForce() {
			return s.Limits
		}
	}
	return nil
}

func (s *Hook) inForce() bool { return s.Limits != nil && s.Limits.State == loader.Attached }

// limited are the rules that have a rate, and metered those that have a rate or a pool; l may be nil.
func (l *Limits) limited() []Rule {
	return slices.DeleteFunc(l.metered(), func(r Rule) bool { return r.Rate == policy.Unlimited })
}

func (l *Limits) metered() []Rule {
	if l == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(l.Rules), func(r Rule) bool { return !r.Limits() })
}

func prefixes(rules []Rule) string {
	var names []string
	for _, r := range rules {
		names = append(names, policy.CIDR(r.Prefix))
	}
	return plain.List(names)
}
