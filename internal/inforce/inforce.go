// Package inforce finds rules that should be in force and are not: of the policy in force, which is the one that was
// applied last, or that serve reads from a file; and those that something else has detached.
package inforce

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"

	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Packed policy is its text, and the path of its file, which is "-" for standard input.
type Packed []byte

// Pack packs a policy for its record; it is empty if it names no device.
func Pack(f *policyfile.File, path string, text []byte) Packed {
	if len(f.Devices()) == 0 {
		return Packed{}
	}
	if absolute, err := filepath.Abs(path); path != "-" && err == nil {
		path = absolute
	}
	var all bytes.Buffer
	w, _ := gzip.NewWriterLevel(&all, gzip.BestSpeed) // a valid level
	w.Write([]byte(path + "\x00"))                    // to memory
	w.Write(text)
	w.Close()
	recent.Lock()
	defer recent.Unlock()
	remember(all.Bytes(), lastgood.Policy{File: f, Path: path, Text: text})
	return all.Bytes()
}

// recent are the last policies that were packed or parsed, of which a pending change has two: several parts of serve need
// them, and they are large.
var recent struct {
	sync.Mutex
	policies []recorded
}

type recorded struct {
	Packed
	lastgood.Policy
}

func remember(packed Packed, p lastgood.Policy) {
	recent.policies = append([]recorded{{packed, p}}, recent.policies[:min(1, len(recent.policies))]...)
}

// Parse is the policy, which is parsed once and must not be changed.
func (p Packed) Parse() (lastgood.Policy, error) {
	recent.Lock()
	defer recent.Unlock()
	for _, r := range recent.policies {
		if bytes.Equal(r.Packed, p) {
			return r.Policy, nil
		}
	}
	path, text, err := p.Unpack()
	if err != nil {
		return lastgood.Policy{}, err
	}
	f, err := policyfile.Parse(path, text)
	if err != nil {
		return lastgood.Policy{}, err
	}
	parsed := lastgood.Policy{File: f, Path: path, Text: text}
	remember(slices.Clone(p), parsed)
	return parsed, nil
}

// Unpack is the reverse of Pack.
func (p Packed) Unpack() (path string, text []byte, err error) {
	r, err := gzip.NewReader(bytes.NewReader(p))
	if err != nil {
		return "", nil, err
	}
	all, err := io.ReadAll(r)
	name, text, _ := bytes.Cut(all, []byte{0})
	return string(name), text, err
}

// A Lack is a direction of a device without some of its rules.
type Lack struct {
	Device    string
	Direction policy.Direction
	Missing   []netip.Prefix // of the policy; all, if they are detached
	Of        int            // how many rules it should have
	Detached  bool           // the rules are there, and something else has detached shapectl's program
}

// Networks are those of the missing rules, the first few by name.
func (l Lack) Networks() string { return plain.List(policy.CIDRs(l.Missing)) }

// Lacks are the lacks of the calling thread's namespace, by device and direction, and the path of the policy in force. If none
// is, such as after a flush, instead counts. Addresses of hosts do not count: they come and go.
func Lacks(n *loader.Namespace, instead lastgood.Policy) (lacks []Lack, path string, err error) {
	policies, err := n.Policies()
	if err != nil {
		return nil, "", err
	}
	of := instead
	if len(policies.Now) > 0 {
		if of, err = Packed(policies.Now).Parse(); err != nil {
			return nil, "", err
		}
	}
	lacks, err = lacking(n, of.File)
	return lacks, of.Path, err
}

func lacking(n *loader.Namespace, f *policyfile.File) (lacks []Lack, err error) {
	devices, err := netinfo.Devices()
	if err != nil {
		return nil, err
	}
	if f != nil {
		devices = append(devices, netinfo.Cgroups(f.Cgroups())...)
	}
	hooks, err := n.Hooks()
	defer loader.CloseHooks(hooks)
	if err != nil {
		return nil, err
	}
	type side struct {
		device    int
		direction policy.Direction
	}
	at := map[side]*loader.Hook{}
	for _, h := range hooks {
		at[side{h.Device.Index, h.Direction}] = h
		if h.State == loader.Detached {
			l := Lack{Device: h.Device.Name, Direction: h.Direction, Detached: true}
			for _, rule := range h.Set.Policy() {
				l.Missing = append(l.Missing, rule.Prefix)
			}
			if l.Of = len(l.Missing); l.Of > 0 {
				lacks = append(lacks, l)
			}
		}
	}
	for _, d := range devices {
		for _, t := range tables(f, d) {
			h := at[side{d.Index, t.Direction}]
			if h != nil && h.State == loader.Detached {
				continue
			}
			l := Lack{Device: d.Name, Direction: t.Direction, Of: len(t.Rules)}
			for _, rule := range t.Rules {
				if h == nil || !h.Set.Has(rule.Prefix) {
					l.Missing = append(l.Missing, rule.Prefix)
				}
			}
			if l.Missing == nil {
				continue
			}
			if _, here, err := netinfo.DeviceAt(d.Name, d.Index); here || err != nil { // it may have gone meanwhile
				lacks = append(lacks, l)
			}
		}
	}
	return lacks, nil
}

// tables are what a policy has for a device.
func tables(f *policyfile.File, d netinfo.Device) []policy.Table {
	if f == nil {
		return nil
	}
	tables, err := f.For(policyfile.Device{Name: d.Name, L2Bytes: d.L2Bytes})
	if err != nil {
		return nil // several patterns match it, so no command gives it rules
	}
	return tables
}
