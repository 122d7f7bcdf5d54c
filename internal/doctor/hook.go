package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func checkState(f Facts, s Hook, d *Device) []report.Finding {
	if s.Other {
		state := "attached"
		if lastOfOurs(s.Chain) < 0 {
			state = "not attached"
		}
		return s.finding(report.Warning, "state", "rules of another version of shapectl, which this one can neither read nor change, are "+state,
			"use that version to see them; "+s.flush(f.Netns)+" deletes them")
	}
	if s.Limits == nil {
		return s.finding(report.OK, "state", "no rules here; the other checks are for a first one", "")
	}
	l := s.Limits
	switch l.State {
	case loader.Attached:
		if l.Was != s.Name {
			return s.state(report.Note,
				fmt.Sprintf(" in force by %s; the device was %s when they were set, and was renamed", l.Mode, l.Was), "")
		}
		return s.state(report.OK, fmt.Sprintf(" in force by %s", l.Mode), "")
	case loader.Moved:
		return s.state(report.Warning,
			" out of reach: the device has moved to another network namespace, where they still limit it",
			fmt.Sprintf("%s here, then set them there", s.flush(f.Netns)))
	case loader.Gone:
		if slices.ContainsFunc(f.Devices, func(d Device) bool { return d.Name == l.Was }) { // made again
			return s.state(report.Failed,
				" not in force: the device was deleted and created again; the new one has no limits",
				"set them again; the next command that changes a rule removes the old ones")
		}
		return s.state(report.Failed, " not in force: the device was deleted or moved away",
			"the next command that changes a rule removes them; "+plain.Suggest(f.Netns, "serve")+" applies the policy in force to a new device")
	}
	return s.state(report.Failed, " not in force: something else detached shapectl's program from the device",
		"set one of them again to attach all, or "+s.flush(f.Netns))
}

// state is a finding of the rules.
func (s Hook) state(status report.Status, of, advice string) []report.Finding {
	findings := s.finding(status, "state", "", advice)
	findings[0].OfRules(len(s.Limits.Rules), of)
	return findings
}

func checkChange(f Facts) []report.Finding {
	switch f.Change {
	case maps.Pending:
		return systemFinding(report.Note, report.Change,
			fmt.Sprintf("%sreverts in %v", report.LastNotConfirmed(f.MadeBy), time.Duration(f.Until).Round(time.Second)),
			plain.Suggest(f.Netns, "confirm")+" if all is well, else "+plain.Suggest(f.Netns, "rollback"))
	case maps.Expired:
		return systemFinding(report.Note, report.Change, "the last change was not confirmed in time, and reverted", "")
	case maps.Committed:
		return systemFinding(report.OK, report.Change, plain.Suggest(f.Netns, "rollback")+" would undo the last change", "")
	}
	return nil
}

func checkBuild(_ Facts, s Hook, _ *Device) []report.Finding {
	if !s.inForce() || !s.Limits.OtherBuild {
		return nil
	}
	return s.finding(report.Note, "build", "the program of another build of shapectl is attached; limits are those of that build",
		"set any of its rules again to replace the program; the limit stays in force meanwhile")
}

func checkLinkType(_ Facts, s Hook, d *Device) []report.Finding {
	if d == nil || d.Unreadable == nil {
		return nil
	}
	return s.finding(report.Failed, "link type", d.Unreadable.Error()+", so no rule can be set",
		"set rules on the device below or above it")
}

func checkPPPoE(f Facts, s Hook, d *Device) []report.Finding {
	if d == nil || !slices.ContainsFunc(f.PPPoE, func(name string) bool { return f.passes(name, d) }) {
		return nil
	}
	status := report.Failed
	if s.Limits == nil {
		status = report.Note
	}
	sessions := f.names(func(o *Device) bool { return o.Kind == "ppp" })
	if len(sessions) == 0 {
		sessions = []string{"the PPP device"}
	}
	return s.finding(status, "pppoe", d.Name+" carries PPPoE: its packets are not IP there, and pass unlimited",
		"set the rules on "+plain.List(sessions))
}

// checkNotIP finds traffic that rules cannot see. A few frames, as of LLDP and spanning trees, are on many links.
func checkNotIP(_ Facts, s Hook, _ *Device) []report.Finding {
	const few, percent = 1e6, 1
	if s.Limits == nil {
		return nil
	}
	seen := s.Limits.OtherBytes
	for _, r := range s.Limits.Rules {
		seen += r.Counters.PassedBytes
	}
	if s.Limits.OtherBytes < few || s.Limits.OtherBytes*100 < seen*percent {
		return nil
	}
	return s.finding(report.Warning, "not-ip", fmt.Sprintf("%d frames with %s were not IP, and passed unlimited: no rule can match them, for example PPPoE",
		s.Limits.OtherFrames, report.Bytes(s.Limits.OtherBytes)), "limit PPPoE sessions where they end, on their PPP devices; tcpdump -i "+plain.Word(s.Name)+" 'not ip and not ip6 and not arp' shows the frames")
}

// passes reports whether packets of the device called name pass d: it is d, or on top of it.
func (f Facts) passes(name string, d *Device) bool {
	i := slices.IndexFunc(f.Devices, func(o Device) bool { return o.Name == name })
	if i < 0 {
		return false
	}
	o := &f.Devices[i]
	for o != nil && o.Index != d.Index {
		o = f.byIndex[o.Parent]
	}
	return o != nil
}

func checkChain(f Facts, s Hook, d *Device) []report.Finding {
	if d == nil || s.Chain == nil || s.Limits != nil && !s.inForce() {
		return nil
	}
	chain := foreign(s.Chain)
	if len(chain) == 0 {
		return s.finding(report.OK, "chain", "nothing else is attached to this hook of traffic control", "")
	}
	if s.Limits == nil {
		return s.finding(report.Note, "chain", "attached already: "+describe(chain), "")
	}
	last := lastOfOurs(s.Chain)
	var findings []report.Finding
	if before := foreign(s.Chain[:last+1]); len(before) > 0 {
		findings = s.finding(report.Warning, "chain",
			describe(before)+" before the limit: packets that it drops, redirects, or passes by ending the chain (TC_ACT_OK) are neither limited nor counted",
			s.comeFirst(f.Netns, before))
	}
	after := behind(s.Chain)
	if delaying := f.delaying(s); len(after) > 0 && len(delaying) > 0 && s.Direction == policy.Ingress {
		return append(findings, s.finding(report.Warning, "chain",
			fmt.Sprintf("%s after the limit: it does not see the packets of %s, which enter through an ifb device behind it: a filter there does not stop them",
				describe(after), prefixes(delaying)), "filter before the limit, or where packets are routed; or do not use excess delay")...)
	}
	if len(after) > 0 {
		findings = append(findings, s.finding(report.Note, "chain",
			describe(after)+" after the limit: it sees the packets that pass, and those that it drops or redirects were charged already", "")...)
	}
	return findings
}

// flush is the command that deletes the rules.
func (s Hook) flush(netns string) string {
	return plain.Suggest(netns, "flush", s.Name, s.Direction.String())
}

// comeFirst says how to attach before the present first program or filter.
func (s Hook) comeFirst(netns string, before []netinfo.ChainEntry) string {
	again := fmt.Sprintf("%s and set the rules again", s.flush(netns))
	switch {
	case slices.ContainsFunc(before, ours):
		return "flush them there, or the lower of the two rates decides"
	case s.Limits.Mode == loader.TCX:
		return again + " to attach them first"
	case before[0].At == "tcx":
		return "attach by tcx, too: unset SHAPECTL_HOOK, " + again
	}
	return "add that filter again with a higher priority number than shapectl's, or attach by tcx"
}

// ours reports whether an entry of which this namespace does not know is shapectl's all the same.
func ours(e netinfo.ChainEntry) bool { return strings.HasPrefix(e.Name, "shapectl") }

func lastOfOurs(chain []netinfo.ChainEntry) int {
	for i, e := range slices.Backward(chain) {
		if e.Ours {
			return i
		}
	}
	return -1
}

// foreign are those that are not ours. The kernel lists some filters more than
// once, for their tables.
func foreign(chain []netinfo.ChainEntry) []netinfo.ChainEntry {
	theirs := slices.DeleteFunc(slices.Clone(chain), func(e netinfo.ChainEntry) bool { return e.Ours })
	return slices.Compact(theirs)
}

func behind(chain []netinfo.ChainEntry) []netinfo.ChainEntry {
	return foreign(chain[lastOfOurs(chain)+1:])
}

// Behind says what comes after the program of shapectl on a direction of a device; "" if nothing does.
func Behind(n *loader.Namespace, index int, d policy.Direction) (string, error) {
	chain, err := chainOf(n, index, d)
	return describe(behind(chain)), err
}

func chainOf(n *loader.Namespace, index int, d policy.Direction) ([]netinfo.ChainEntry, error) {
	ours, err := n.Programs(index, d)
	if err != nil {
		return nil, err
	}
	return netinfo.Chain(index, d, ours)
}

func describe(chain []netinfo.ChainEntry) string {
	names := make([]string, len(chain))
	for i, e := range chain {
		switch {
		case ours(e):
			names[i] = fmt.Sprintf("%s (%s, set from another network namespace or another bpffs)", e.Name, e.At)
		case e.ID != 0 && e.Name != "":
			names[i] = fmt.Sprintf("program %s (%s, id %d)", e.Name, e.At, e.ID)
		case e.ID != 0:
			names[i] = fmt.Sprintf("program %d (%s)", e.ID, e.At)
		default:
			names[i] = fmt.Sprintf("%s (%s)", e.Name, e.At)
		}
	}
	return plain.List(names)
}

func checkXDP(_ Facts, s Hook, d *Device) []report.Finding {
	if d == nil || d.XDP == "" || s.Direction != policy.Ingress {
		return nil
	}
	return s.finding(report.Note, "xdp",
		fmt.Sprintf("an XDP program (%s) runs first: packets that it drops, sends back or redirects, also to AF_XDP sockets, are neither limited nor counted", d.XDP),
		"if it redirects, set rules where those packets leave")
}

func checkHardware(_ Facts, s Hook, d *Device) []report.Finding {
	if d == nil || !d.Offloads.HardwareTC {
		return nil
	}
	return s.finding(report.Note, "offload",
		"hw-tc-offload is on: packets that hardware handles by offloaded filters or flow tables bypass the limit",
		fmt.Sprintf("if any are in use, ethtool -K %s hw-tc-offload off", plain.Word(s.Name)))
}
