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
	Devices []Device // all of the namespace, as they may be stacked
	Hooks   []Hook   // all that have rules, and those that were asked about
	Pools   []Rule   // all of the namespace
	PPPoE   []string // the devices that carry PPPoE sessions
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
	// Kept are the directions of devices without a rule in force that are kept for a rollback.
	Kept []string
	// Left is what is pinned for other network namespaces that are not known to exist.
	Left []string
	// Elsewhere are the directions of devices with programs of shapectl that have no pins here.
	Elsewhere   []string
	KnowsOthers bool   // the programs may be of other namespaces, which have pins
	Only        string // the device that was asked about, "" for all that have rules
	Netns       string // the name of the network namespace in commands, "" for the one this is

	byIndex map[int]*Device                 // of Devices, for Judge
	tree    *policy.Tree                    // of Pools
	noRoom  map[string]string               // the pool without room for the guarantees of a policy.Claim, by claimant
	queues  map[policy.Within][]policy.Rule // of the pools that delay packets: by name, itself and those above
	sharers map[uint32]int                  // that are active, by the id of the rule or pool
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
	IPv4, IPv6 bool  // it has such addresses, valid beyond its link
	Unreadable error // why programs cannot read its packets
	Unfed      bool  // it is an ifb, and nothing redirects packets to it
}

// A Hook is a direction of a device.
type Hook struct {
	Name      string
	Index     int // of the device, 0 where it is not here
	Direction policy.Direction
	Limits    *Limits // nil where there are no rules
	Other     bool    // there are rules of another layout, which cannot be read
	// Chain is what is attached; nil if that is not known.
	Chain []netinfo.ChainEntry
	// Queue is nil where no rule delays packets, and if it is not known.
	Queue *Queue
	// HasOurFQ: on egress, the device has the fq qdisc of --setup-fq, which 'shapectl flush' removes.
	HasOurFQ bool
}

// Limits are the rules of a hook.
type Limits struct {
	State      loader.State
	Mode       loader.Mode
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
	findings := []report.Finding{}
	for _, check := range systemChecks {
		findings = append(findings, check(f.System)...)
	}
	findings = append(findings, checkChange(f)...)
	findings = append(findings, checkKept(f)...)
	findings = append(findings, checkLeft(f)...)
	findings = append(findings, checkElsewhere(f)...)
	for _, check := range poolChecks {
		findings = append(findings, check(f)...)
	}
	findings = append(findings, checkHosts(f)...)
	findings = append(findings, checkPolicy(f)...)
	for _, u := range f.Unread {
		advice := "run as root"
		if errors.Is(u.Err, maps.ErrOtherLayout) {
			advice = "use that version to see them; " + plain.Suggest(f.Netns, "flush --all") + " deletes them"
		}
		findings = append(findings, report.Finding{
			Status: report.Warning, Check: "access", Device: u.Device, Direction: u.Direction,
			Finding: "cannot be read, so findings may be missing: " + plain.OneLine(u.Err), Advice: advice,
		})
	}
	if len(f.Hooks) == 0 && len(f.Unread) == 0 {
		findings = append(findings, systemFinding(report.OK, "rules", "there are none", plain.Suggest(f.Netns, "doctor DEV")+" checks a device for its first rule")...)
	}
	for _, s := range f.Hooks {
		if !f.judged(s.Name) {
			continue
		}
		d := f.byIndex[s.Index]
		for _, check := range hookChecks {
			findings = append(findings, check(f, s, d)...)
		}
	}
	return findings
}

var systemChecks = []func(System) []report.Finding{
	checkKernel, checkPermissions, checkPrograms, checkHook, checkBPFFS,
}

// Each takes the device of the hook, nil where it is not here.
var hookChecks = []func(Facts, Hook, *Device) []report.Finding{
	checkState, checkBuild, checkQueue, checkLinkType, checkPPPoE, checkNotIP, checkChain, checkXDP, checkHardware, checkMerged,
	checkCapacity, checkColours, checkBurst, checkGuarantees, checkRenamed, checkWaiting, checkSharers, checkStacked, checkIfb, checkFamilies, checkContended, checkSpilled, checkUnmatched,
}

func (f Facts) judged(name string) bool { return f.Only == "" || f.Only == name }

// limits are the rules in force on a direction of a device, nil if there are none.
func (f Facts) limits(d *Device, direction policy.Direction) *Limits {
	for _, s := range f.Hooks {
		if s.Index == d.Index && s.Direction == direction && s.inForce() {
			return s.Limits
		}
	}
	return nil
}

func (s Hook) inForce() bool {
	return s.Limits != nil && s.Limits.State == loader.Attached
}

// limited are the rules that have a rate; l may be nil.
func (l *Limits) limited() []Rule {
	if l == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(l.Rules), func(r Rule) bool { return r.Rate == policy.Unlimited })
}

// metered are the rules that have a rate or a pool; l may be nil.
func (l *Limits) metered() []Rule {
	if l == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(l.Rules), func(r Rule) bool { return r.Rate == policy.Unlimited && r.Within == "" })
}

func (s Hook) finding(status report.Status, check, finding, advice string) []report.Finding {
	return []report.Finding{{
		Status: status, Check: check, Device: s.Name, Direction: s.Direction.String(), Finding: finding, Advice: advice,
	}}
}

func prefixes(rules []Rule) string {
	var names []string
	for _, r := range rules {
		names = append(names, r.Prefix.String())
	}
	return plain.List(names)
}
