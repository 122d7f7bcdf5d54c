package maps

import (
	"bytes"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/pkg/policy"
)

// calendarOf is the number of the calendar of a quota plus one, which it makes if there is none; 0 for other limits.
func (s *Store) calendarOf(r policy.Rule) (number uint32, err error) {
	if r.Unit != policy.InQuota || r.Also.Quota.Period.Rolling() > 0 {
		return 0, nil
	}
	name := string(r.Also.Quota.Period) + " " + string(r.Also.Zone)
	for i := range s.calendars {
		if nameOf(&s.calendars[i]) == name {
			return uint32(i) + 1, nil
		}
	}
	used := s.calendarsInUse() // which takes a while for many rules
	free := slices.Index(used[:], false)
	if free < 0 {
		return 0, fmt.Errorf("quotas have more than %d different periods and time zones, with those of the last change; give some the same", len(s.calendars))
	}
	c := &s.calendars[free]
	c.Name = [len(c.Name)]uint8{}
	copy(c.Name[:len(c.Name)-1], name)
	return uint32(free) + 1, s.fill(c)
}

func nameOf(c *bpf.AbiCalendar) string {
	name, _, _ := bytes.Cut(c.Name[:], []byte{0})
	return string(name)
}

// calendarsInUse are those that a limit has.
func (s *Store) calendarsInUse() (used [bpf.AbiLayoutCALENDARS]bool) {
	for id := range min(s.change.Ids, s.room()) {
		for _, cold := range s.rule(id).Cold {
			if cold.Calendar > 0 {
				used[cold.Calendar-1] = true
			}
		}
	}
	return used
}

// A Period is a period of quotas in a time zone.
type Period struct {
	Name  string // "month Europe/Berlin"
	Known int    // how many later ones programs know
	Err   error  // nil unless the host does not know the time zone
}

// Periods are those of all quotas.
func (s *Store) Periods() (all []Period) {
	wall := s.wall(s.now())
	for i, used := range s.calendarsInUse() {
		if !used {
			continue
		}
		c := &s.calendars[i]
		p := Period{Name: strings.TrimSpace(nameOf(c)), Known: sort.Search(len(c.Begins), func(i int) bool { return c.Begins[len(c.Begins)-1-i] <= wall })}
		_, zone, _ := strings.Cut(nameOf(c), " ")
		_, p.Err = policy.Zone(zone).Location()
		all = append(all, p)
	}
	return all
}

// RenewCalendars computes when periods begin, by the host's clock and time zone. Programs know of a hundred periods from now on.
func (s *Store) RenewCalendars() (err error) {
	for i := range s.calendars {
		if c := &s.calendars[i]; c.Name[0] != 0 && err == nil {
			err = s.fill(c)
		}
	}
	return err
}

// fill writes when the periods of a calendar begin, from the one before now on.
func (cs *clocks) fill(c *bpf.AbiCalendar) error {
	period, zone, _ := strings.Cut(nameOf(c), " ")
	in, err := policy.Zone(zone).Location()
	if err != nil {
		return err
	}
	now, ahead := cs.date(cs.now())
	for i := range c.Begins {
		atomic.StoreUint64(&c.Begins[i], uint64(policy.Period(period).Begins(now.In(in), i-1).UnixNano())+ahead)
	}
	return nil
}

// date is the time of the host's clock at now, which is not long ago, and how far (ns) TAI is ahead of it.
func (cs *clocks) date(now uint64) (at time.Time, ahead uint64) {
	wall := cs.wall(now)
	if !cs.virtual {
		ahead = wall - uint64(time.Now().UnixNano()-int64(Now()-now))
		ahead = (ahead + uint64(time.Second)/2) / uint64(time.Second) * uint64(time.Second)
	}
	wall -= ahead
	return time.Unix(int64(wall/1e9), int64(wall%1e9)), ahead // also after the year 2262
}

// wall is CLOCK_TAI at now, which is not long ago.
func (cs *clocks) wall(now uint64) uint64 {
	if cs.virtual {
		return now
	}
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_TAI, &ts)
	return uint64(ts.Nano()) - (Now() - now)
}

const tickMask = 1<<model.TickBits - 1

// begins is when the present period of a calendar began, and the time when a tick began, both in ns of CLOCK_TAI; 0 if it is not known.
func (cs *clocks) begins(calendar uint32, now uint64) (began, wall uint64) {
	c := &cs.calendars[calendar-1]
	wall = cs.wall(now &^ tickMask)
	if at := sort.Search(len(c.Begins), func(i int) bool { return atomic.LoadUint64(&c.Begins[i]) > wall }); at > 0 {
		began = c.Begins[at-1]
	}
	return began, wall
}

// began is the tick with which the present period of a calendar began: period_began of bpf/look.h.
func (cs *clocks) began(calendar uint32, now uint64) uint32 {
	began, wall := cs.begins(calendar, now)
	if began == 0 {
		return model.Tick(now) - 1<<30
	}
	return model.Tick(now&^tickMask - (wall - began) + tickMask)
}

// ends is how long (ns) the present period of a calendar lasts from now on.
func (cs *clocks) ends(calendar uint32, now uint64) uint64 {
	c, wall := &cs.calendars[calendar-1], cs.wall(now)
	next := sort.Search(len(c.Begins), func(i int) bool { return atomic.LoadUint64(&c.Begins[i]) > wall })
	if next == len(c.Begins) {
		return math.MaxInt64
	}
	return c.Begins[next] - wall
}

// quotaMeter is the meter of a quota: a bucket that was last charged before the period began is empty.
func (cs *clocks) quotaMeter(v params.Version, now uint64) model.Meter {
	m := v.Meter()
	m.Edited, m.Fresh, m.Until = true, cs.began(v.Calendar, now), 0
	return m
}

// A Quota is how much of a quota is used.
type Quota struct {
	UsedBytes  uint64
	AheadBytes uint64 // by top-ups beyond what was used, until the period ends
	LeftBytes  uint64 // with the grace, and what is ahead
	EndsNS     uint64 // until the period ends; 0 if the quota comes back steadily
}

// NewQuota tells how much is left of so many bytes, of which some are used.
func NewQuota(bytes, used uint64) Quota {
	return Quota{UsedBytes: used, LeftBytes: bytes - min(bytes, used)}
}

// UsedUp reports whether the limit after the quota is in force. What is left then is less than a packet, which may be one of GSO.
func (q Quota) UsedUp() bool {
	return q.UsedBytes > 0 && q.LeftBytes < max(model.SharedBytes, min(1<<16, (q.UsedBytes+q.LeftBytes)/100))
}

// QuotaOf is what is used of a quota, one of Others, by all packets, or by those whose key has no slot.
func (s *Store) QuotaOf(e Entry, now uint64) Quota {
	return s.quota(e, load(&s.rule(e.ID).Shared), now)
}

// QuotaOfHost is what is used of a quota, one of Others, by a host that has one of its own.
func (s *Store) QuotaOfHost(e Entry, host netip.Addr, now uint64) Quota {
	o := s.otherOf(e, policy.MatchSrc, Flow{Src: host, Dst: host}, now)
	q := NewQuota(e.Capacity, model.BytesOf(e.Unit, o.Level))
	q.EndsNS = o.Ends
	return q
}

func (cs *clocks) quota(e Entry, b model.Bucket, now uint64) (q Quota) {
	v := cs.current(e.ID)
	m := cs.meterAt(v, now)
	q = NewQuota(v.Limit>>model.QuotaBits, model.BytesOf(e.Unit, m.Level(b, now)))
	if v.Calendar > 0 {
		q.AheadBytes, q.EndsNS = aheadOf(m, b, now)>>model.QuotaBits, cs.ends(v.Calendar, now)
		q.LeftBytes += q.AheadBytes
	}
	return q
}

// aheadOf is what a bucket has ahead of a quota by the calendar, in units: its TAT is behind the clock, which stands still.
func aheadOf(m model.Meter, b model.Bucket, now uint64) uint64 {
	ahead := m.Clock(now) - b.TAT
	if ahead >= 1<<bpf.AbiLayoutAHEAD_BITS || isOver(m, b) {
		return 0
	}
	return ahead
}

// isOver reports whether a bucket was last charged before the period began.
func isOver(m model.Meter, b model.Bucket) bool { return int32(b.Tick-m.Fresh) < 0 }
