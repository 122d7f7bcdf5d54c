package events

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A quotaOf is the quota of a rule or pool.
type quotaOf struct {
	at     hook
	prefix netip.Prefix
	name   string
	entry  maps.Entry // of the quota
}

// A quotaUser is who has a quota: a rule or pool, or one of its hosts, subnets or flows.
type quotaUser struct {
	at     hook
	prefix netip.Prefix
	key    string // "" for all
}

// quotas are what was told of users: each how far its quota was used.
type quotas struct {
	told map[quotaUser]toldOf // not of others
	next time.Time            // not before
}

// A toldOf is the kind of the last event of a user, and when the period then ended, by maps.Now.
type toldOf struct {
	kind string
	ends uint64
}

// A quota that comes back steadily may be used again at once, and one of a cluster may get a larger part. So it is told again once
// this much less is used.
const forget = 10 // percent

var quotaKinds = []string{report.QuotaNearlyUsed, report.QuotaUsedUp, report.QuotaRestored}

// lookAtQuotas tells which quotas are nearly used, used up, or no longer so. The first time it only takes note of them.
func (s *session) lookAtQuotas() {
	begun, r := time.Now(), &s.rules
	if s.store == nil || begun.Before(s.quotas.next) || s.store.Stamp() != r.stamp || !slices.ContainsFunc(quotaKinds, s.wants) {
		return
	}
	was, now := s.quotas.told, maps.Now()
	s.quotas.told = map[quotaUser]toldOf{}
	var each []quotaOf
	var entries []maps.Entry
	var ends []uint64 // of each: there may be many hosts
	look := func(i int, key string, used uint64) {
		use := maps.NewQuota(entries[i].Capacity, used)
		use.EndsNS = ends[i]
		s.lookAtQuota(each[i], key, use, was)
	}
	at, seen := map[quotaUser]int{}, map[quotaUser]bool{} // the places of quotas among each, and who uses them
	for _, q := range r.quotas {
		if q.entry.Each.Kind != policy.EachAll {
			at[quotaUser{q.at, q.prefix, ""}] = len(each)
			each, entries, ends = append(each, q), append(entries, q.entry), append(ends, s.store.QuotaOf(q.entry, now).EndsNS)
			continue
		}
		s.lookAtQuota(q, "", s.store.QuotaOf(q.entry, now), was)
	}
	for i, b := range s.store.Buckets(entries, maps.Now) {
		key := b.Flow.String()
		if b.Subnet.IsValid() {
			key = policy.NetworkText(b.Subnet)
		}
		seen[quotaUser{each[i].at, each[i].prefix, key}] = true
		look(i, key, b.LevelBytes)
	}
	for user := range was { // without a bucket, nothing is used
		if i, has := at[quotaUser{user.at, user.prefix, ""}]; has && !seen[user] {
			look(i, user.key, 0)
		}
	}
	s.quotas.next = begun.Add(rest * time.Since(begun))
}

// lookAtQuota tells of one user, of whom was is what was told before; nil for the first time.
func (s *session) lookAtQuota(q quotaOf, key string, use maps.Quota, was map[quotaUser]toldOf) {
	user, also := quotaUser{q.at, q.prefix, key}, q.entry.Also
	percent := 100 * float64(use.UsedBytes) / float64(also.Quota.Bytes)
	told, ends := was[user].kind, maps.Now()+use.EndsNS
	since := was[user].ends
	anew := ends > since+uint64(time.Minute) // a step of the wall clock moves the end, too
	tell := func(kind, says string) {
		if told, since = kind, ends; was == nil {
			return
		}
		if key != "" {
			says = key + " " + says
		}
		e := s.eventOf(q.at, kind, fmt.Sprintf(says, report.Bytes(use.UsedBytes), report.Bytes(also.Quota.Bytes)), q.prefix, q.name)
		e.Key, e.Address, e.LevelBytes, e.CapacityBytes = key, key, &use.UsedBytes, new(also.Quota.Bytes+also.Grace)
		e.NewPeriod = kind == report.QuotaRestored && anew
		s.tell(e)
	}
	rolling, slack := also.Quota.Period.Rolling() > 0, 0.0
	if rolling || s.rules.clustered[q.prefix] != "" {
		slack = forget
	}
	freed := told == report.QuotaUsedUp && !use.UsedUp() && (slack == 0 || percent < 100-slack)
	if freed || told != "" && percent < 80-slack {
		says := "has more left of its quota again: %s of %s are used"
		if anew {
			says = "begins its quota anew: %s of %s are used"
		}
		if freed {
			says += "; the full rate is in force again"
		}
		if !rolling {
			tell(report.QuotaRestored, says)
		}
		if told = ""; percent >= 80-slack {
			told = report.QuotaNearlyUsed
		}
	}
	if told == "" && percent >= 80 {
		tell(report.QuotaNearlyUsed, "used %s of its quota of %s")
	}
	if told == report.QuotaNearlyUsed && use.UsedUp() {
		then := also.Then.String() + " is in force"
		if also.Then == policy.ThenDrop {
			then = "packets are dropped"
		}
		tell(report.QuotaUsedUp, "used up its quota: %s of %s; "+then)
	}
	if told != "" {
		s.quotas.told[user] = toldOf{told, since}
	}
}
