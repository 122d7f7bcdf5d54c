package maps

import (
	"cmp"
	"fmt"
	"hash/crc32"
	"math"
	"net/netip"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/grace"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Used is what is used of the quota of a rule or pool at a time, for another one that has the same place later.
type Used struct {
	Of     string            `json:"of"`               // "DEVICE DIRECTION NETWORK" or "pool:NAME", as no device has a name with a colon
	Device string            `json:"device,omitempty"` // the same for whatever name it has; "" for pools
	Gone   bool              `json:"-"`                // the device is: Of may have a name that it no longer had
	Period policy.Period     `json:"period"`
	Zone   policy.Zone       `json:"zone,omitempty"`
	Time   time.Time         `json:"time"`
	Bytes  uint64            `json:"used_bytes,omitempty"` // by all packets, or by those whose key had no slot
	Ahead  uint64            `json:"ahead_bytes,omitempty"`
	Keys   map[string]uint64 `json:"each_used_bytes,omitempty"`
}

// Lasts reports whether any of it still counts at a time.
func (u *Used) Lasts(now time.Time) bool {
	if over := u.Period.Rolling(); over > 0 {
		return now.Sub(u.Time) < over
	}
	in, err := u.Zone.Location()
	return err == nil && now.Before(u.Period.Begins(u.Time.In(in), 1))
}

// place is Used.Of for a rule or pool.
func (s *Set) place(r policy.Rule) string {
	if s.IsPools() {
		return "pool:" + r.Label.Name
	}
	return cmp.Or(s.Store.Names[s.Ifindex()], s.Device()) + " " + s.Direction().String() + " " + policy.CIDR(r.Prefix)
}

// Quota is the quota of a rule or pool, one of Others.
func (ls *limits) Quota(e Entry) (its Entry, has bool) {
	for _, its = range ls.Others(e) {
		if its.Unit == policy.InQuota {
			return its, true
		}
	}
	return Entry{}, false
}

// Used is what is used now of all quotas in force, also of none.
func (s *Store) Used() (all []Used) {
	now := s.now()
	at, _ := s.date(now &^ (1<<model.TickBits - 1))             // when packets last looked whether a period has begun
	store := crc32.ChecksumIEEE(fmt.Append(nil, s.hook.Secret)) // another one may give a device the same index
	var quotas []Entry
	for set, e := range s.EveryRule() {
		if q, has := s.Quota(e); has {
			use := s.QuotaOf(q, now)
			u := Used{Of: set.place(e.Rule), Period: e.Also.Quota.Period, Zone: e.Also.Zone, Time: at, Bytes: use.UsedBytes, Ahead: use.AheadBytes}
			if index := set.Ifindex(); !set.IsPools() {
				u.Device, u.Gone = fmt.Sprintf("%d-%08x", index, store), s.Names[index] == ""
			}
			all = append(all, u)
			quotas = append(quotas, q)
		}
	}
	for i, b := range s.Buckets(quotas, s.now) {
		u := &all[i]
		if u.Keys == nil {
			u.Keys = map[string]uint64{}
		}
		if b.Subnet.IsValid() {
			u.Keys[b.Subnet.String()] = b.LevelBytes
		} else {
			u.Keys[b.Flow.String()] = b.LevelBytes
		}
	}
	return all
}

// usedBefore gives slots to the keys of a new quota, which no packet sees yet, with what Earlier knows of it. It returns its shared
// bucket. A key for which there is no slot begins anew.
func (s *Set) usedBefore(id, salt uint32, place string, r policy.Rule, m model.Meter, now uint64) (shared model.Bucket) {
	shared = m.WithLevel(0, now)
	if s.Store.Earlier == nil {
		return shared
	}
	u, known := s.Store.Earlier(place)
	at, _ := s.Store.date(now)
	age := uint64(at.Sub(u.Time)) // may be below 0: clocks are set
	begun := r.Also.Quota.Period.Rolling() == 0 && int32(model.Tick(now-age)-m.Fresh) < 0
	if !known || begun || u.Period != r.Also.Quota.Period || u.Zone != r.Also.Zone {
		return shared
	}
	most := uint64(2*policy.MaxQuota) << model.QuotaBits // with the grace
	if r.Also.Quota.Period.Rolling() > 0 {
		most = 2 * m.Capacity // a bucket counts as empty after the time in which that drains
	}
	left := func(bytes uint64) uint64 {
		return m.Drained(min(bytes, most>>model.QuotaBits)<<model.QuotaBits, uint64(max(int64(age), 0))) &^ tatBusy
	}
	for text, bytes := range u.Keys {
		flow, err := ParseFlow(text)
		if r.Each.Kind != policy.EachFlow {
			subnet, failed := netip.ParsePrefix(text)
			flow, err = Flow{Src: subnet.Addr(), Dst: subnet.Addr()}, failed
			if r.Each.Kind == policy.EachAll || subnet.Bits() != eachBits(r.Each, subnet.Addr()) {
				continue // the rule had another bucket scope
			}
		}
		if level := left(bytes); err == nil && level > 0 {
			s.Store.allocateSlot(makeKey(id, r.Each, s.Side(), flow), salt, m.WithLevel(level, now), now)
		}
	}
	if u.Ahead > 0 && (Entry{Rule: r}).TakesAhead() {
		shared.TAT = m.Clock(now) - min(u.Ahead, MostAhead)<<model.QuotaBits
		return shared
	}
	return m.WithLevel(left(u.Bytes), now)
}

// allocateSlot gives a slot with a bucket to a key that no packet has, if there is one: get_slot of bpf/table.h. If this process is
// killed meanwhile, Unlock frees the slots that are locked; a bucket that was about to move begins anew.
func (bs *buckets) allocateSlot(key bpf.AbiKey, salt uint32, b model.Bucket, now uint64) {
	places := bs.places(key, salt)
	for _, lock := range []func(slot uint32, now uint64) bool{bs.lockEmpty, bs.lockMoved} {
		for _, p := range places {
			for n := p.line * lineSlots; n < (p.line+1)*lineSlots; n++ {
				if lock(n, now) {
					bs.giveSlot(n, key, p.fingerprint, b)
					return
				}
			}
		}
	}
}

// lockEmpty locks a slot if its bucket is empty.
func (bs *buckets) lockEmpty(n uint32, now uint64) bool {
	tat := &bs.slot(n).Tat
	before := atomic.LoadUint64(tat)
	return before&tatBusy == 0 && bs.isEmpty(n, now) && atomic.CompareAndSwapUint64(tat, before, before|tatBusy)
}

// lockMoved locks a slot if its bucket can move to its second line: lock_next and move_bucket of bpf/table.h.
func (bs *buckets) lockMoved(n uint32, now uint64) bool {
	slot := bs.slot(n)
	fingerprint := atomic.LoadUint32(&slot.Fingerprint)
	if !isFirst(fingerprint) {
		return false
	}
	second := bs.second(place{n / lineSlots, fingerprint})
	for to := second.line * lineSlots; to < (second.line+1)*lineSlots; to++ {
		if !bs.lockEmpty(to, now) {
			continue
		}
		tat := atomic.LoadUint64(&slot.Tat)
		if tat&tatBusy == 0 && atomic.CompareAndSwapUint64(&slot.Tat, tat, tat|tatBusy) {
			if atomic.LoadUint32(&slot.Fingerprint) == fingerprint {
				bs.giveSlot(to, bs.table().keys[n], second.fingerprint, model.Bucket{TAT: tat, Tick: atomic.LoadUint32(&slot.Tick)})
				return true
			}
			atomic.StoreUint64(&slot.Tat, tat)
		}
		atomic.AndUint64(&bs.slot(to).Tat, ^uint64(tatBusy))
	}
	return false
}

// giveSlot gives a locked slot to a key, and unlocks it.
func (bs *buckets) giveSlot(n uint32, key bpf.AbiKey, fingerprint uint32, b model.Bucket) {
	slot := bs.slot(n)
	bs.table().keys[n] = key
	atomic.StoreUint32(&slot.Fingerprint, fingerprint)
	atomic.StoreUint32(&slot.Tick, b.Tick)
	atomic.StoreUint64(&slot.Tat, b.TAT)
}

// Unlock frees the slots that a killed process has locked. Those that packets have locked are unlocked after a grace period.
func (s *Store) Unlock() {
	if s.hook.Also == 0 {
		return
	}
	locked := map[uint32]uint64{}
	for n := range uint32(len(s.table().lines)) * lineSlots {
		if tat := atomic.LoadUint64(&s.slot(n).Tat); tat&tatBusy != 0 {
			locked[n] = tat
		}
	}
	if len(locked) == 0 {
		return
	}
	grace.Wait(s.change, s.change.Epoch)
	for n, tat := range locked {
		if slot := s.slot(n); atomic.LoadUint64(&slot.Tat) == tat {
			atomic.StoreUint32(&slot.Fingerprint, 0)
			atomic.CompareAndSwapUint64(&slot.Tat, tat, 0)
		}
	}
}

// A Key is that of a host or subnet with a quota of its own.
type Key struct{ *bpf.AbiKey }

// KeyOf is the key of packets with a far address, for --each.
func KeyOf(quota Entry, far netip.Addr) Key {
	key := makeKey(quota.ID, quota.Each, policy.MatchSrc, Flow{Src: far, Dst: far})
	return Key{&key}
}

// HasBucket reports whether a key has a bucket, or would get one. Else it shares one, as the table is full.
func (s *Store) HasBucket(key Key) bool {
	return key.AbiKey == nil || s.canHaveSlot(*key.AbiKey, s.now())
}

// MostAhead is how many bytes may be ahead of a quota: a pebibyte.
const MostAhead = 1<<(bpf.AbiLayoutAHEAD_BITS-model.QuotaBits) - 1

// All makes a quota as it is when a period begins.
const All = math.MaxUint64

// TakesAhead reports whether TopUp can give more than what is used of a quota. One that comes back steadily has no period until whose
// end that could last, a slot without a level may go to another key, and a cluster would not know of it.
func (e Entry) TakesAhead() bool {
	return e.Each.Kind == policy.EachAll && e.Also.Quota.Period.Rolling() == 0 && e.Cluster.Name == ""
}

// TopUp gives back bytes of a quota, or All, and returns what is used then. What is more than that is ahead, up to MostAhead, if the
// quota TakesAhead. The zero Key is for the shared bucket.
func (s *Store) TopUp(quota Entry, key Key, bytes uint64) Quota {
	return s.topUp(quota, key, bytes, false)
}

// TakeBack takes back what TopUp gave, up to MostAhead.
func (s *Store) TakeBack(quota Entry, key Key, bytes uint64) Quota {
	return s.topUp(quota, key, min(bytes, MostAhead), true)
}

func (s *Store) topUp(quota Entry, key Key, bytes uint64, back bool) (used Quota) {
	none := &bpf.AbiBucket{}
	bucket := func() *bpf.AbiBucket {
		if key.AbiKey == nil {
			return &s.rule(quota.ID).Shared
		} else if n, has := s.slotOf(*key.AbiKey); has {
			return s.slot(n)
		}
		return none
	}
	for {
		b, now := bucket(), s.now()
		was, m := load(b), s.Meter(quota)
		used = s.quota(quota, was, now)
		if !back && bytes != All && !quota.TakesAhead() {
			bytes = min(bytes, used.UsedBytes)
		}
		if bytes == 0 || bytes == All && used.UsedBytes|used.AheadBytes == 0 {
			return used
		}
		empty := m.WithLevel(0, now)
		to := m.Clock(now) + m.Level(was, now) - used.AheadBytes<<model.QuotaBits
		switch {
		case bytes == All || !back && bytes == used.UsedBytes:
			to = empty.TAT
		case isOver(m, was): // an empty bucket may get another tick, one with something ahead may not
			if atomic.CompareAndSwapUint64(&b.Tat, was.TAT, empty.TAT) {
				atomic.CompareAndSwapUint32(&b.Tick, was.Tick, empty.Tick)
			}
			continue
		case back:
			to += min(bytes, MostAhead-min(MostAhead, used.UsedBytes)) << model.QuotaBits
		default:
			to -= min(bytes, MostAhead-used.AheadBytes+used.UsedBytes) << model.QuotaBits
		}
		// The slot must still be the key's, as for packets: after the TAT was read, and before the CAS.
		if was.TAT&tatBusy == 0 && bucket() == b && atomic.CompareAndSwapUint64(&b.Tat, was.TAT, to) {
			bytes = 0
		}
		runtime.Gosched()
	}
}

// TopUpAll is TopUp with All for all keys and the shared bucket.
func (s *Store) TopUpAll(quota Entry) Quota {
	m := s.Meter(quota)
	for n := range s.slots(func(id uint32) bool { return id == quota.ID }) {
		slot, key := s.slot(n), &s.table().keys[n]
		for {
			now := s.now()
			was := load(slot)
			if was.TAT&tatBusy != 0 || atomic.LoadUint32(&key.Id) != quota.ID || m.Level(was, now) == 0 ||
				atomic.CompareAndSwapUint64(&slot.Tat, was.TAT, m.WithLevel(0, now).TAT) {
				break
			}
		}
	}
	return s.TopUp(quota, Key{}, All)
}
