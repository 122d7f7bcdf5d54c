package cluster

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/gomodule/redigo/redis"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A record is a member in store.lua, and stateRecord the state of a cluster, in the order of their fields.
type record struct {
	Version, Order, Proven, Claim, Safe, Rate, Weight, Floor, Share, Wants, Demand, Speaks float64
	Turn, Seq, Counted, Lost, Lease, Use, Clock                                            float64
	Quota, Day, Instance, Earlier, Used, Limit                                             float64
}

type stateRecord struct {
	Version, Epoch, Order, Lapsed, Early, Silent, Scanned, ScannedLapsed, ScannedSilent float64
	Oldest, OldestProven, Asked, Changed, Members, Rate, Claims, Safes                  float64
	Level, Spare, Fixed, Pressed, Equal, Wanted, Known, Seen, Moved, Unseen             float64
	Day, Spent, SpentKnown, SpentSeen                                                   float64
}

// forgettable is the age at which a member counts as silent, even if no other one has said so. store.lua has the same.
const forgettable = time.Minute

// Clusters are the names of all clusters in the store.
func (s *Store) Clusters(ctx context.Context) (names []string, err error) {
	prefix := s.key("")
	for next := "0"; ; {
		page, err := redis.Values(s.do(ctx, "SCAN", next, "MATCH", prefix+"*", "COUNT", 1000))
		var keys []string
		if err == nil {
			_, err = redis.Scan(page, &next, &keys)
		}
		if err != nil {
			return nil, s.explain(err)
		}
		for _, key := range keys {
			names = append(names, strings.TrimPrefix(key, prefix))
		}
		if next == "0" {
			break
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// decodeRecord is decode for a record, whose numbers store.lua keeps within bounds.
func decodeRecord(b string, v any) error {
	for i := 0; i+8 <= len(b); i += 8 {
		if n := math.Float64frombits(binary.LittleEndian.Uint64([]byte(b[i:]))); !(n >= -1 && n <= none) {
			return errors.New("a record with numbers that shapectl does not write; delete it in the store")
		}
	}
	return decode(b, v)
}

// View reads a cluster; nil if the store does not know it.
func (s *Store) View(ctx context.Context, cluster string) (*report.ClusterStatus, error) {
	fields, err := redis.StringMap(s.do(ctx, "HGETALL", s.key(cluster)))
	var clock []float64 // s, µs
	if err == nil {
		clock, err = redis.Float64s(s.do(ctx, "TIME"))
	}
	if err != nil {
		return nil, fmt.Errorf("cluster %q: %w", cluster, s.explain(err))
	}
	text, known := fields[""]
	if !known {
		return nil, nil
	}
	_, state, _ := strings.Cut(text, "\x00")
	var c stateRecord
	if err := decodeRecord(state, &c); err != nil {
		return nil, fmt.Errorf("cluster %q: %w", cluster, err)
	}
	if c.Version > Version {
		return nil, fmt.Errorf("cluster %q has records of version %.0f, and this build knows up to %d; install a newer build", cluster, c.Version, Version)
	}
	v := &report.ClusterStatus{
		Cluster: cluster, Version: int(c.Version), Quiet: c.Lapsed == 0, RateBits: uint64(c.Rate),
		MissingBits: uint64(max(0, c.Known-c.Seen)), Members: []report.ClusterMember{},
	}
	for name, text := range fields {
		host, pool := splitMember(name)
		if host == "" { // the state, or one that left
			continue
		}
		var r record
		if err := decodeRecord(text, &r); err != nil {
			return nil, fmt.Errorf("cluster %q, member %q: %w", cluster, name, err)
		}
		age := time.Duration(max(0, clock[0]-r.Clock)) * time.Second
		m := report.ClusterMember{
			Host: host, Pool: pool, State: report.Live, AgeNS: uint64(age), RateBits: uint64(r.Rate), Weight: uint64(r.Weight),
			FloorBits: history.NotZero(uint64(r.Floor)), ShareBits: history.NotZero(uint64(r.Share)), DemandBits: uint64(r.Demand), UseBits: uint64(r.Use),
			LeaseBits: max(uint64(max(0, r.Lease)), uint64(policy.MinRate)), SafeBits: uint64(r.Safe), ClaimBits: uint64(r.Claim),
		}
		if r.Quota != 0 {
			if r.Day != c.Day { // it has not asked in this period
				r.Earlier, r.Used = 0, 0
			}
			used, granted := uint64(max(0, r.Earlier+r.Used)), uint64(max(0, r.Earlier+r.Limit))
			m.UsedBytes, m.GrantedBytes = &used, &granted
			v.QuotaBytes, v.QuotaGrantedBytes = max(v.QuotaBytes, uint64(r.Quota)), uint64(c.Spent+max(0, c.SpentKnown-c.SpentSeen))
		}
		if r.Order <= c.Lapsed || age >= forgettable {
			m.State, m.ClaimBits = report.Silent, m.SafeBits
		} else {
			v.UseBits += m.UseBits
		}
		v.LeasedBits += m.ClaimBits
		v.Members = append(v.Members, m)
	}
	slices.SortFunc(v.Members, func(a, b report.ClusterMember) int {
		return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.Pool, b.Pool))
	})
	return v, nil
}

// ErrLive means that a host was not forgotten, because it is live.
var ErrLive = errors.New("the host is live")

// Forget removes a member that will not come back, so that its safe share goes to the others. Without a host, it frees what
// is reserved for hosts that have not come back since the store was emptied: missing, as View said. The error may wrap ErrLive.
func (s *Store) Forget(ctx context.Context, cluster, host, pool string, missing uint64) error {
	answers, err := s.Renew(ctx, []Call{{Cluster: cluster, Member: Member(host, pool), Request: Request{Safe: float64(missing)}}})
	switch {
	case err != nil:
		return err
	case answers[0].Status == Live:
		return ErrLive
	case answers[0].Status != OK:
		return errRecords
	}
	return nil
}

var errRecords = errors.New("its records in the store are broken, or of a newer version")
