package maps

import (
	"sync/atomic"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
)

// A Grant is how much of its cluster's quota a pool may use on this host in each period.
type Grant struct {
	Bytes    uint64
	Instance uint32 // of the pool's quota: another one knows nothing of what was used before; 0 for no grant
}

// A ClusterQuota is the quota of a cluster, and what this host knows of it. The zero ClusterQuota is none.
type ClusterQuota struct {
	Grant
	Whole uint64 // bytes, of all hosts together
	Used  uint64 // bytes, on this host in this period
	Day   uint32 // on which the period began, in days since 1970
}

// ClusterQuota is the quota of a pool that has a cluster.
func (s *Set) ClusterQuota(e Entry, now uint64) (q ClusterQuota) {
	for _, other := range s.Store.Others(e) {
		if v := s.Store.current(other.ID); isGranted(v) {
			q = ClusterQuota{Grant{v.Limit >> model.QuotaBits, v.Salt}, other.Capacity, s.Store.QuotaOf(other, now).UsedBytes, 0}
			if in, err := e.Also.Zone.Location(); err == nil {
				began, _ := s.Store.begins(v.Calendar, now)
				_, ahead := s.Store.date(now)
				year, month, day := time.Unix(0, int64(began-ahead)).In(in).Date()
				q.Day = uint32(max(0, time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Unix()/86400))
			}
		}
	}
	return q
}

// grant puts a grant in force. A pending change of the pool has the same one, if it has the same cluster.
func (s *index) grant(pool uint32, g Grant) {
	for _, id := range s.companionsOf(pool) {
		for v := range s.versions(id) {
			if isGranted(v) && v.Members == s.current(id).Members && v.Salt == g.Instance {
				atomic.StoreUint64(&v.Limit, g.Bytes<<model.QuotaBits)
			}
		}
	}
}

// isGranted reports whether a version of a limit is a quota that a cluster grants.
func isGranted(v params.Version) bool { return v.Calendar > 0 && v.AbiColdParams.Members != 0 }

// keepGranted gives the next version of a quota what the cluster has granted: nothing if that is another one.
func keepGranted(old, next params.Version) {
	if isGranted(next) {
		next.Limit = 0
		if old.Present() && isGranted(old) && old.Members == next.Members {
			next.Limit = old.Limit
		}
	}
}
