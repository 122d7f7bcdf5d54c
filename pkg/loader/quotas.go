package loader

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	stdmaps "maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/pkg/maps"
)

// StateDir is the state directory of the units.
const StateDir = "/var/lib/shapectl"

// mostUsed is how many rules, pools and keys the file of used quotas has at most: as many as have a bucket, and some that are gone.
const mostUsed = mostBuckets + mostBuckets/4

// usedFile has what is used of the quotas of this network namespace, a line for each rule and pool; "" for none. Rules in another
// bpffs are others. A namespace without a name is another one after a reboot.
func usedFile(o Options) string {
	dir := o.State
	if dir == "" {
		if dir = StateDir; cmp.Or(o.BPFFS, bpffs.Default) != bpffs.Default {
			return ""
		}
	}
	switch name, own := netns.Named(); {
	case name != "":
		return filepath.Join(dir, "quotas-"+name+".json")
	case own || o.State != "":
		return filepath.Join(dir, "quotas.json")
	}
	return ""
}

// parseUsed reads the text of such a file.
func parseUsed(path string, text []byte, err error) (map[string]maps.Used, error) {
	used := map[string]maps.Used{}
	if errors.Is(err, fs.ErrNotExist) {
		return used, nil
	}
	for line := range bytes.Lines(text) {
		var u maps.Used
		failed := json.Unmarshal(line, &u)
		if failed == nil && !u.Period.Valid() {
			failed = fmt.Errorf("%s: the period %q is unknown", u.Of, u.Period)
		}
		if failed == nil {
			// Older builds wrote "pool NAME". So does this one of a device called pool.
			if name, is := strings.CutPrefix(u.Of, "pool "); is && !strings.HasPrefix(name, "egress ") && !strings.HasPrefix(name, "ingress ") {
				u.Of = "pool:" + name
			}
			used[u.Of] = u
		}
		err = cmp.Or(err, failed)
	}
	if err != nil {
		err = fmt.Errorf("what was used of some quotas cannot be read from %s: %w", path, err)
	}
	return used, err
}

// earlier is what was used of the quota of a rule or pool when its namespace last had it.
func (p *pins) earlier(place string) (u maps.Used, known bool) {
	if p.used == nil {
		if path := usedFile(p.options); path != "" {
			text, err := input.File(path)
			if p.used, err = parseUsed(path, text, err); err != nil {
				p.trouble = errors.Join(p.trouble, fmt.Errorf("%w; these begin at 0", err))
			}
		}
		if p.used == nil {
			p.used = map[string]maps.Used{}
		}
	}
	u, known = p.used[place]
	return u, known
}

// keepUsed is Namespace.KeepUsed.
func (p *pins) keepUsed() error {
	if p.store == nil || !p.store.Size().Also {
		return nil
	}
	return keepUsed(p.options, p.usedNow)
}

// usedNow is what is used of the quotas of a store, under the names that devices have now.
func (p *pins) usedNow() ([]maps.Used, error) {
	devices, err := netinfo.Devices()
	p.store.Names = map[int]string{}
	for _, dev := range devices {
		p.store.Names[dev.Index] = dev.Name
	}
	for _, set := range p.sets() {
		if netinfo.IsCgroup(set.Ifindex()) { // which keep their names
			p.store.Names[set.Ifindex()] = set.Device()
		}
	}
	return p.store.Used(), err
}

// keepUsed writes what read returns. The file keeps what was used of quotas that have ended, as long as it counts.
func keepUsed(o Options, read func() ([]maps.Used, error)) error {
	path := usedFile(o)
	if path == "" {
		return nil
	}
	var broken, unread error
	err := input.Update(path, func(have []byte, failed error) []byte {
		var all []maps.Used
		if all, unread = read(); unread != nil {
			return have
		}
		var before map[string]maps.Used
		before, broken = parseUsed(path, have, failed)
		all = merge(before, all)
		slices.SortStableFunc(all, func(a, b maps.Used) int { return cmp.Or(b.Time.Compare(a.Time), strings.Compare(a.Of, b.Of)) })
		var text bytes.Buffer
		lines, count := json.NewEncoder(&text), 0
		for _, u := range all {
			if count += 1 + len(u.Keys); count <= mostUsed && u.Bytes+u.Ahead+uint64(len(u.Keys)) > 0 {
				lines.Encode(u)
			}
		}
		return text.Bytes()
	})
	if err != nil {
		err = fmt.Errorf("keep what is used of quotas: %w", err)
	}
	return errors.Join(broken, unread, err)
}

// merge is what counts of what was used before, and what is used now. A device that was renamed has its last name in all of it.
func merge(before map[string]maps.Used, now []maps.Used) []maps.Used {
	names := map[string]string{}
	note := func(u maps.Used) {
		if at := nameEnd(u.Of); u.Device != "" && at > 0 {
			names[u.Device] = u.Of[:at]
		}
	}
	merged := map[string]maps.Used{}
	put := func(u maps.Used) {
		if name, at := names[u.Device], nameEnd(u.Of); name != "" && at > 0 {
			u.Of = name + u.Of[at:]
		}
		merged[u.Of] = u
	}
	for _, u := range before {
		note(u)
	}
	for _, u := range now {
		if !u.Gone {
			note(u)
		}
	}
	for _, u := range before {
		if u.Lasts(time.Now()) {
			put(u)
		}
	}
	for _, gone := range []bool{true, false} { // a device that is here has its name
		for _, u := range now {
			if u.Gone == gone {
				put(u)
			}
		}
	}
	return slices.Collect(stdmaps.Values(merged))
}

// nameEnd is where the name of a device ends in "NAME DIRECTION NETWORK"; below 0 in other texts.
func nameEnd(of string) int {
	return strings.LastIndexByte(of[:max(0, strings.LastIndexByte(of, ' '))], ' ')
}

// endQuotas reports whether orders may end a quota, or make one of a device whose last one of that name has left it.
func (all orders) endQuotas(p *pins) bool {
	return slices.ContainsFunc(all, func(o *order) bool {
		if o.Set == nil && slices.ContainsFunc(p.sets(), func(s *maps.Set) bool { return s.Device() == o.dev.Name && s.Direction() == o.want.Direction }) {
			return true
		}
		for _, s := range o.steps {
			if has := s.Have; has != nil && has.Also.Quota.Bytes > 0 &&
				(s.Want == nil || s.Want.Also.Quota.Period != has.Also.Quota.Period || s.Want.Also.Zone != has.Also.Zone) {
				return true
			}
		}
		return o.flush
	})
}

// KeepUsed writes what is used of all quotas into a file, for a reboot.
func (n *Namespace) KeepUsed() error { return n.pins.keepUsed() }

// KeepUsed is Namespace.KeepUsed for a process that does so again and again. It holds up no command while it writes. The error wraps
// unix.EWOULDBLOCK if a command changes something for longer than Patience, which may hold up that one: it locks the file last.
func (k *Kept) KeepUsed(o Options) error {
	read := func() ([]maps.Used, error) {
		n, err := k.Read(o)
		if err != nil {
			return nil, err
		}
		defer n.Close()
		if n.pins.store != nil && n.pins.store.Size().Also {
			return n.pins.usedNow()
		}
		return nil, nil
	}
	if used, err := read(); used == nil {
		return err
	}
	return keepUsed(o, read)
}

// EndChange ends the last change, unless it is pending: Rollback would undo more than somebody means who has topped up a quota since.
func (n *Namespace) EndChange() error {
	if n.pins.state() != maps.Committed {
		return nil
	}
	return n.pins.endChange()
}

// RenewCalendars computes when the periods of quotas begin.
func (n *Namespace) RenewCalendars() error {
	if n.pins.store == nil {
		return nil
	}
	return n.pins.store.RenewCalendars()
}

// Trouble is what did not work with quotas, although rules are as they should be.
func (n *Namespace) Trouble() error { return n.pins.trouble }
