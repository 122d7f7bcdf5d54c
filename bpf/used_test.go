package bpf_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
)

var quotaSize = maps.Size{Rules: 16, Buckets: 1 << 8, Labels: 16, Also: true}

// ofFlow is a frame of 100 bytes, always of the same flow of a host.
func ofFlow(host int) []byte {
	frame := udp(addr(near4), farHost(host), 58)
	frame[34] = 0
	return frame
}

// passes returns how many bytes of a host pass in frames of equal size.
func (r *rig) passes(host int, now uint64) (bytes uint64) {
	frame := ofFlow(host)
	for {
		if verdict, _ := send(r.TB, r.program(), frame, meta{now: now}); verdict != next {
			return bytes
		}
		bytes += uint64(len(frame))
	}
}

// A quota of a new store, such as after a reboot, goes on from what was used: until the period ends, or as far as it has not come
// back. What was used in another period, of another bucket scope or by another rule does not count.
func TestQuotaGoesOn(t *testing.T) {
	const size, frame, day = 100_000, 100, uint64(24 * time.Hour)
	first := uint64(time.Date(2027, 3, 10, 12, 0, 0, 0, time.UTC).UnixNano())
	for _, c := range []struct {
		each, after string // the bucket scope before and after
		period      string
		later       uint64
		used        uint64
	}{
		{"all", "all", "month", 21 * day, 40_000}, {"host", "host", "month", 21 * day, 40_000}, {"/24", "/24", "day", 10, 40_000},
		{"host", "host", "month", 22 * day, 0}, {"host", "/24", "month", day, 0}, {"host", "host", "10d", 2 * day, 20_000},
		{"flow", "flow", "10d", 0, 40_000}, {"all", "all", "10d", 4 * day, 0}, {"host", "host", "day", day, 0},
	} {
		t.Run(fmt.Sprintf("%s %s %s %d", c.each, c.after, c.period, c.later), func(t *testing.T) {
			rule := func(each string) []string {
				return []string{"each", each, "quota", "100000b/" + c.period, "quota-zone", "UTC", "then", "drop"}
			}
			old := newRig(t, quotaSize, egress())
			old.put(limited(t, rule(c.each)...), first)
			for range 40_000 / frame {
				send(t, old.program(), ofFlow(1), meta{now: first})
			}
			all := old.set.Store.Used()
			if len(all) != 1 || !all[0].Lasts(time.Unix(0, int64(first))) {
				t.Fatalf("used %+v", all)
			}
			r, now := newRig(t, quotaSize, egress()), first+c.later
			r.set.Store.Earlier = func(place string) (maps.Used, bool) { return all[0], place == all[0].Of }
			r.put(limited(t, rule(c.after)...), now)
			if n := r.passes(1, now); n+c.used > size || n+c.used+2*frame < size {
				t.Errorf("%d bytes pass, where %d of %d are used", n, c.used, size)
			}
			if n := r.passes(2, now); c.after == "host" && n+frame < size {
				t.Errorf("%d bytes of a host pass that had used nothing", n)
			}
		})
	}
}

// More than what is used is ahead until the period ends, by the byte: of a quota by the calendar that all packets share. It stays if
// the quota gets another size, and for a new store.
func TestAhead(t *testing.T) {
	const size, frame, day = 100_000, 100, uint64(24 * time.Hour)
	now := uint64(time.Date(2027, 3, 10, 12, 0, 0, 0, time.UTC).UnixNano())
	rule := limited(t, "quota", "100000b/day", "quota-zone", "UTC", "then", "drop")
	r := newRig(t, quotaSize, egress())
	e := r.put(rule, now)
	topUp := func(bytes uint64, want maps.Quota) {
		t.Helper()
		quota, _ := r.set.Store.Quota(e)
		r.at(now)
		if got := r.set.Store.TopUp(quota, maps.Key{}, bytes); got.UsedBytes != want.UsedBytes || got.AheadBytes != want.AheadBytes || got.LeftBytes != want.LeftBytes {
			t.Errorf("after a top-up of %d bytes: %+v, want %+v", bytes, got, want)
		}
	}
	passes := func(want uint64) {
		t.Helper()
		if got := r.passes(1, now); got != want {
			t.Errorf("%d bytes pass, want %d", got, want)
		}
	}
	topUp(50_000, maps.Quota{AheadBytes: 50_000, LeftBytes: 150_000})
	passes(150_000)
	topUp(30_000, maps.Quota{UsedBytes: 70_000, LeftBytes: 30_000})
	passes(30_000)
	topUp(120_000, maps.Quota{AheadBytes: 20_000, LeftBytes: 120_000})
	topUp(10_000, maps.Quota{AheadBytes: 30_000, LeftBytes: 130_000})
	topUp(maps.All, maps.Quota{LeftBytes: size})
	topUp(30_000, maps.Quota{AheadBytes: 30_000, LeftBytes: 130_000})
	send(t, r.program(), ofFlow(1), meta{now: now})
	topUp(0, maps.Quota{AheadBytes: 30_000 - frame, LeftBytes: 130_000 - frame})
	old := r
	all := old.set.Store.Used()
	r = newRig(t, quotaSize, egress())
	r.set.Store.Earlier = func(string) (maps.Used, bool) { return all[0], true }
	e = r.put(rule, now)
	passes(130_000 - frame)
	r = old
	rule.Also.Quota.Bytes = 2 * size
	r.put(rule, now)
	passes(230_000 - frame)
	rule.Also.Quota.Bytes = size
	e = r.put(rule, now)
	topUp(250_000, maps.Quota{UsedBytes: 0, AheadBytes: 50_000, LeftBytes: 150_000})
	now += day
	passes(size)
	now += day // the bucket was charged before
	topUp(20_000, maps.Quota{AheadBytes: 20_000, LeftBytes: 120_000})
	passes(120_000)
	topUp(1<<60, maps.Quota{AheadBytes: maps.MostAhead, LeftBytes: maps.MostAhead + size})
	topUp(maps.All, maps.Quota{LeftBytes: size})
	topUp(20_000, maps.Quota{AheadBytes: 20_000, LeftBytes: 120_000})
	quota, _ := r.set.Store.Quota(e)
	for _, want := range []maps.Quota{{AheadBytes: 5_000, LeftBytes: 105_000}, {UsedBytes: 10_000, LeftBytes: 90_000}, {UsedBytes: 25_000, LeftBytes: 75_000}} {
		if r.set.Store.TakeBack(quota, maps.Key{}, 15_000); r.set.Store.QuotaOf(quota, now).LeftBytes != want.LeftBytes {
			t.Errorf("after 15000 bytes were taken back: %+v, want %+v", r.set.Store.QuotaOf(quota, now), want)
		}
	}
	passes(75_000)

	for _, options := range [][]string{{"quota", "100000b/10d"}, {"each", "host", "quota", "100000b/day"}} {
		r = newRig(t, quotaSize, egress())
		e = r.put(limited(t, append(options, "then", "drop")...), now)
		topUp(50_000, maps.Quota{LeftBytes: size})
		passes(size)
	}
}

// While packets use a quota, bytes that are given back pass, and no others.
func TestTopUp(t *testing.T) {
	const size, back, times = 1_000_000, 300_000, 5
	for _, c := range [][2]string{{"all", "30d"}, {"host", "30d"}, {"all", "month"}} {
		each, ahead := c[0], uint64(0)
		t.Run(c[0]+" "+c[1], func(t *testing.T) {
			now := uint64(1e9)
			r := newRig(t, quotaSize, egress())
			e := r.put(limited(t, "each", each, "quota", "1000000b/"+c[1], "quota-zone", "UTC", "then", "drop"), now)
			store := r.set.Store
			quota, _ := store.Quota(e)
			key := maps.Key{}
			if each == "host" {
				key = maps.KeyOf(quota, farHost(1))
			}
			if quota.TakesAhead() {
				ahead = size
			}
			if used := store.TopUp(quota, key, size); used.UsedBytes != 0 || used.AheadBytes != ahead {
				t.Errorf("%d bytes of an unused quota are used, and %d ahead", used.UsedBytes, used.AheadBytes)
			}
			p, frame := r.program(), udp(addr(near4), farHost(1), 958)
			var senders sync.WaitGroup
			end := make(chan struct{})
			var passed [2]uint64
			for i := range passed {
				senders.Go(func() {
					for {
						select {
						case <-end:
							return
						default:
						}
						if verdict, _ := send(t, p, frame, meta{now: now}); verdict == next {
							passed[i] += uint64(len(frame))
						}
					}
				})
			}
			for i := range uint64(times) {
				testenv.Eventually(t, "the quota to be used up", func() bool {
					return store.TopUp(quota, key, 0).LeftBytes < uint64(len(frame))
				})
				store.TopUp(quota, key, back+i*ahead)
			}
			testenv.Eventually(t, "the quota to be used up", func() bool {
				return store.TopUp(quota, key, 0).LeftBytes < uint64(len(frame))
			})
			close(end)
			senders.Wait()
			if n, want := passed[0]+passed[1], size+times*back+(1+0+1+2+3+4)*ahead; n > want+(times+1)*uint64(len(frame)) || n+(times+1)*uint64(len(frame)) < want {
				t.Errorf("%d bytes passed, want %d", n, want)
			}
			if store.TopUpAll(quota); store.TopUp(quota, key, 0).UsedBytes != 0 {
				t.Error("something is used after all was given back")
			}
		})
	}
}
