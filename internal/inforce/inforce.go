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
	return all.Bytes()
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
func (l Lack) Networks() string {
	var names []string
	for _, p := range l.Missing {
		names = append(names, p.String())
	}
	return plain.List(names)
}

// A Reader finds what is lacking again and again. It parses a policy once.
type Reader struct {
	packed Packed
	file   *policyfile.File
	Path   string // of the policy in force; "" if none is known
}

// Lacks are the lacks of the calling thread's namespace, by device and direction. Addresses of hosts do not count: they come
// and go.
func (r *Reader) Lacks(n *loader.Namespace) (lacks []Lack, err error) {
	if err := r.read(n); err != nil {
		return nil, err
	}
	return r.lacks(n)
}

// Lacking are the lacks of a policy while none is in force, such as after a flush.
func Lacking(p lastgood.Policy, n *loader.Namespace) (lacks []Lack, err error) {
	return (&Reader{file: p.File}).lacks(n)
}

func (r *Reader) lacks(n *loader.Namespace) (lacks []Lack, err error) {
	devices, err := netinfo.Devices()
	if err != nil {
		return nil, err
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
		for _, t := range r.tables(d) {
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
			if _, here, err := netinfo.DeviceByIndex(d.Index); here || err != nil { // it may have gone meanwhile
				lacks = append(lacks, l)
			}
		}
	}
	return lacks, nil
}

// read parses the policy in force, if it is another one than before.
func (r *Reader) read(n *loader.Namespace) error {
	policies, err := n.Policies()
	packed := Packed(policies.Now)
	if err != nil || bytes.Equal(packed, r.packed) {
		return err
	}
	*r = Reader{}
	if len(packed) == 0 {
		return nil
	}
	path, text, err := packed.Unpack()
	if err != nil {
		return err
	}
	f, err := policyfile.Parse(path, text)
	if err != nil {
		return err
	}
	*r = Reader{slices.Clone(packed), f, path}
	return nil
}

// tables are what the policy has for a device.
func (r *Reader) tables(d netinfo.Device) []policy.Table {
	if r.file == nil {
		return nil
	}
	tables, err := r.file.For(policyfile.Device{Name: d.Name, L2Bytes: d.L2Bytes})
	if err != nil {
		return nil // several patterns match it, so no command gives it rules
	}
	return tables
}
