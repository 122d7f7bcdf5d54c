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

// While packets use a quota, bytes that are given back pass, and no others. No more is given back than is used.
func TestTopUp(t *testing.T) {
	const size, back, times = 1_000_000, 300_000, 5
	for _, each := range []string{"all", "host"} {
		t.Run(each, func(t *testing.T) {
			now := uint64(1e9)
			r := newRig(t, quotaSize, egress())
			e := r.put(limited(t, "each", each, "quota", "1000000b/30d", "then", "drop"), now)
			store := r.set.Store
			quota, _ := store.Quota(e)
			key := maps.Key{}
			if each == "host" {
				key = maps.KeyOf(quota, farHost(1))
			}
			if used := store.TopUp(quota, key, back); used.UsedBytes != 0 {
				t.Errorf("%d bytes of an unused quota are used", used.UsedBytes)
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
			for range times {
				testenv.Eventually(t, "the quota to be used up", func() bool {
					return store.TopUp(quota, key, 0).LeftBytes < uint64(len(frame))
				})
				store.TopUp(quota, key, back)
			}
			testenv.Eventually(t, "the quota to be used up", func() bool {
				return store.TopUp(quota, key, 0).LeftBytes < uint64(len(frame))
			})
			close(end)
			senders.Wait()
			if n, want := passed[0]+passed[1], uint64(size+times*back); n > want+(times+1)*uint64(len(frame)) || n+(times+1)*uint64(len(frame)) < want {
				t.Errorf("%d bytes passed, want %d", n, want)
			}
			for _, key := range store.Keys(quota) {
				if used := store.TopUp(quota, key, 1<<60); used.UsedBytes != 0 {
					t.Errorf("%d bytes are used after all were given back", used.UsedBytes)
				}
			}
		})
	}
}
