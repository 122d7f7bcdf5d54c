package doctor

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func (f *Facts) checkState(s *Hook, _ *Device) {
	state := func(status report.Status, of, advice string) {
		f.sayOfRules(len(s.Limits.Rules), s, status, "state", of, advice)
	}
	l := s.Limits
	switch {
	case s.Other:
		attached := "attached"
		if lastOfOurs(s.Path) < 0 {
			attached = "not attached"
		}
		f.say(s, report.Warning, "state", "rules that this shapectl can neither read nor change are "+attached,
			f.flush(s)+" deletes them")
	case l == nil:
		f.say(s, report.OK, "state", "no rules here; the other checks are for a first one", "")
	case l.State == loader.Attached && l.Unpinned:
		state(report.Warning, " in force by "+string(l.Mode)+", but something deleted the pin of the program that is attached", "set one of them again to pin it; the limit stays in force meanwhile")
	case l.State == loader.Attached && l.Was != s.Name:
		state(report.Note, fmt.Sprintf(" in force by %s; the device was %s when they were set, and was renamed", l.Mode, l.Was), "")
	case l.State == loader.Attached:
		state(report.OK, fmt.Sprintf(" in force by %s", l.Mode), "")
	case l.State == loader.Moved:
		state(report.Warning, " out of reach: the device has moved to another network namespace, where they still limit it", f.flush(s)+" here, then set them there")
	case l.State == loader.Gone && f.index(l.Was) != 0: // made again
		state(report.Failed, " not in force: the device was deleted and created again; the new one has no limits",
			"set them again; the next command that changes a rule removes the old ones")
	case l.State == loader.Gone:
		state(report.Failed, " not in force: the device was deleted or moved away",
			"the next command that changes a rule removes them; "+f.suggest("serve")+" applies the policy in force to a new device")
	case f.Lost != "":
		state(report.Failed, " not in force: the programs are gone", "")
	default:
		state(report.Failed, " not in force: something else detached shapectl's program from the device", "set one of them again to attach all, or "+f.flush(s))
	}
	if s.inForce() && l.OtherBuild {
		f.say(s, report.Note, "build", "the program of another build of shapectl is attached; limits are those of that build",
			"set any of its rules again to replace the program; the limit stays in force meanwhile")
	}
}

// checkDevice finds devices whose packets bypass programs, or cannot be read.
func (f *Facts) checkDevice(s *Hook, d *Device) {
	if d != nil && d.Unreadable != nil {
		f.say(s, report.Failed, "link type", d.Unreadable.Error()+", so no rule can be set", "set rules on the device below or above it")
	}
	isLine := func(p Rule) bool {
		return string(p.Label.Line) == s.Name && p.Label.Name == s.Name+" "+s.Direction.String()
	}
	if d != nil && d.Behind.Line != "" && slices.ContainsFunc(f.Pools, isLine) {
		f.say(s, report.Warning, "line", fmt.Sprintf("the default route leaves by %s: if that is the line, downloads leave %s and uploads enter it, so their rates are swapped", d.Behind.Line, s.Name),
			fmt.Sprintf("%s, and limit %s instead", f.suggest("line", s.Name, "off"), plain.Line(d.Behind.Line)))
	}
	if d != nil && d.Offloads.HardwareTC {
		f.say(s, report.Note, "offload", "hw-tc-offload is on: packets that hardware handles by offloaded filters or flow tables bypass the limit",
			fmt.Sprintf("if any are in use, ethtool -K %s hw-tc-offload off", plain.Word(s.Name)))
	}
}

// checkPath finds what packets pass beside the limit.
func (f *Facts) checkPath(s *Hook, d *Device) {
	if d == nil || s.Path == nil || s.Limits != nil && !s.inForce() {
		return
	}
	found := s.Beside(f.Netns, f.delaying(s))
	if found == nil {
		f.say(s, report.OK, "chain", "nothing else is attached to this hook of traffic control", "")
	}
	f.findings = append(f.findings, found...)
}

// Beside says what packets of a hook pass beside its limit, and what that may do to it. delaying are the rules that delay packets.
func (s *Hook) Beside(netns string, delaying []Rule) (found report.Findings) {
	say := func(status report.Status, check, finding, advice string) {
		found = append(found, report.Finding{Status: status, Check: check, Device: s.Name, Direction: s.Direction.String(), Finding: finding, Advice: advice})
	}
	path := foreign(s.Path)
	if len(path) > 0 && path[0].At == "xdp" {
		say(report.Note, "xdp", fmt.Sprintf("an XDP program (%s) runs first: packets that it drops, sends back or redirects, also to AF_XDP sockets, are neither limited nor counted", path[0].Name),
			"if it redirects, set rules where those packets leave")
	}
	tc := func(path []netinfo.ChainEntry) []netinfo.ChainEntry {
		return slices.DeleteFunc(foreign(path), func(e netinfo.ChainEntry) bool { return e.At == "xdp" || e.At == "qdisc" })
	}
	last := lastOfOurs(s.Path)
	before, after := tc(s.Path[:last+1]), tc(s.Path[last+1:])
	if s.Limits == nil {
		if len(after) > 0 {
			say(report.Note, "chain", "attached already: "+describe(after), "")
		}
		return found
	}
	if len(before) > 0 {
		say(report.Warning, "chain", "before the limit, packets pass "+describe(before)+": those that it drops, redirects, or passes by ending the chain (TC_ACT_OK) are neither limited nor counted",
			s.comeFirst(netns, before))
	}
	switch {
	case len(after) == 0:
	case len(delaying) > 0 && s.Direction == policy.Ingress:
		say(report.Warning, "chain", fmt.Sprintf("after the limit, packets pass %s, but not those of %s, which enter through an ifb device behind it: a filter there does not stop them",
			describe(after), prefixes(delaying)), "filter before the limit, or where packets are routed; or do not use excess delay")
	default:
		say(report.Note, "chain", "after the limit, packets pass "+describe(after)+": those that it drops or redirects were charged already", "")
	}
	for _, e := range path {
		if e.At == "qdisc" && e.Limits {
			say(report.Warning, "qdisc", "the qdisc "+e.Name+" limits packets, too: the lower rate decides, and packets queue there",
				"keep one of the two limits; 'tc qdisc del dev "+plain.Word(s.Name)+" root' removes the qdisc")
		}
	}
	return found
}

// comeFirst says how to attach before the present first program or filter.
func (s *Hook) comeFirst(netns string, before []netinfo.ChainEntry) string {
	again := plain.Suggest(netns, "flush", s.Name, s.Direction.String()) + " and set the rules again"
	switch {
	case slices.ContainsFunc(before, netinfo.ChainEntry.IsShapectl):
		return "flush them there, or the lower of the two rates decides"
	case s.Limits.Mode == loader.TCX:
		return again + " to attach them first"
	case before[0].At == "tcx":
		return "attach by tcx, too: unset SHAPECTL_HOOK, " + again
	}
	return "add that filter again with a higher priority number than shapectl's, or attach by tcx"
}

func lastOfOurs(path []netinfo.ChainEntry) int {
	for i, e := range slices.Backward(path) {
		if e.Ours {
			return i
		}
	}
	return -1
}

// foreign are those that are not ours.
func foreign(path []netinfo.ChainEntry) []netinfo.ChainEntry {
	return slices.DeleteFunc(slices.Clone(path), func(e netinfo.ChainEntry) bool { return e.Ours })
}

// PathOf is what packets of a direction of a device pass; with an error, it is nil.
func PathOf(n *loader.Namespace, dev netinfo.Device, d policy.Direction) ([]netinfo.ChainEntry, error) {
	ours, err := n.Programs(dev.Index, d)
	if err != nil {
		return nil, err
	}
	path, err := netinfo.Path(dev, d, ours)
	if err != nil {
		return nil, err
	}
	return append([]netinfo.ChainEntry{}, path...), nil
}

// Behind says what comes after the program of shapectl on a direction of a device; "" if nothing does.
func Behind(n *loader.Namespace, index int, d policy.Direction) (string, error) {
	ours, err := n.Programs(index, d)
	if err != nil {
		return "", err
	}
	chain, err := netinfo.Chain(index, d, ours)
	return describe(foreign(chain[lastOfOurs(chain)+1:])), err
}

func describe(path []netinfo.ChainEntry) string {
	names := make([]string, len(path))
	for i, e := range path {
		switch {
		case e.IsShapectl():
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
