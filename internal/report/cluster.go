package report

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
)

// Clusters are rates that hosts share.
type Clusters []ClusterStatus

// A ClusterStatus is what the store knows of a cluster.
type ClusterStatus struct {
	Cluster    string `json:"cluster"`                // its name
	Version    int    `json:"version"`                // of the records in the store
	Quiet      bool   `json:"quiet"`                  // true while no leases are granted, because earlier ones may not have ended
	RateBits   uint64 `json:"rate_bits_per_second"`   // the least that a host's policy has
	LeasedBits uint64 `json:"leased_bits_per_second"` // what all members together may use
	UseBits    uint64 `json:"use_bits_per_second"`    // of all live members
	// MissingBits is reserved for the safe shares of hosts that have not come back since the store was emptied.
	MissingBits       uint64          `json:"missing_bits_per_second"`
	QuotaBytes        uint64          `json:"quota_bytes"`         // with the grace; 0 for none
	QuotaGrantedBytes uint64          `json:"quota_granted_bytes"` // what all hosts together may use of it by now, also those that are gone
	Members           []ClusterMember `json:"members"`
	ForgetHost        string          `json:"-"` // the command that frees the share of a silent member, but for its host
	ForgetLost        string          `json:"-"` // the command that frees MissingBits
}

// A ClusterMember is a pool of a host in a cluster.
type ClusterMember struct {
	Host   string `json:"host"`   // the name of the host
	Pool   string `json:"pool"`   // the name of its pool
	State  string `json:"state"`  // live, or silent: the lease ended
	AgeNS  uint64 `json:"age_ns"` // since its last request
	Weight uint64 `json:"weight"`
	// FloorBits is null for the default.
	FloorBits *uint64 `json:"floor_bits_per_second"`
	// ShareBits is null unless the lease is fixed.
	ShareBits  *uint64 `json:"share_bits_per_second"`
	RateBits   uint64  `json:"rate_bits_per_second"`   // of the cluster, by the policy of this host
	DemandBits uint64  `json:"demand_bits_per_second"` // what it would use without a limit, as far as can be told
	UseBits    uint64  `json:"use_bits_per_second"`    // what it used lately
	LeaseBits  uint64  `json:"lease_bits_per_second"`  // what it was granted
	SafeBits   uint64  `json:"safe_bits_per_second"`   // what it has without a lease
	ClaimBits  uint64  `json:"claim_bits_per_second"`  // the most that it may be using
	// UsedBytes is what it used of the quota in this period by its last request; null without a quota.
	UsedBytes *uint64 `json:"quota_used_bytes"`
	// GrantedBytes is up to what it may use it; null without a quota.
	GrantedBytes *uint64 `json:"quota_granted_bytes"`
}

// States of a ClusterMember.
const (
	Live   = "live"
	Silent = "silent"
)

// Text writes a table for each cluster.
func (all Clusters) Text(w io.Writer, width int) error {
	text := bufio.NewWriter(w)
	if len(all) == 0 {
		fmt.Fprintln(text, "no clusters")
	}
	for i := range all {
		if i > 0 {
			fmt.Fprintln(text)
		}
		if err := all[i].text(text, width); err != nil {
			return err
		}
	}
	return text.Flush()
}

func (c *ClusterStatus) text(w io.Writer, width int) error {
	silent := 0
	for _, m := range c.Members {
		if m.State == Silent {
			silent++
		}
	}
	hosts := plain.Count(len(c.Members), "host")
	if silent > 0 {
		hosts += fmt.Sprintf(" (%d silent)", silent)
	}
	fmt.Fprintf(w, "%s: %s for %s; %s used, %s leased", plain.Line(c.Cluster), rateText(&c.RateBits), hosts, Bits(c.UseBits), Bits(c.LeasedBits))
	if c.QuotaBytes > 0 {
		fmt.Fprintf(w, "; %s of the quota of %s used or granted", Bytes(c.QuotaGrantedBytes), Bytes(c.QuotaBytes))
	}
	fmt.Fprintln(w)
	if len(c.Members) > 0 {
		if err := writeTable(w, c.Members, c.columns(), width); err != nil {
			return err
		}
	}
	note := func(text string) { io.WriteString(w, plain.Fold(text, screenWidth, "", "    ")) }
	if c.Quiet {
		note("The store was emptied or may have lost writes: no leases until those from before have ended.")
	}
	var fixed uint64
	for _, m := range c.Members {
		switch {
		case m.ShareBits != nil:
			fixed += *m.ShareBits
		case m.FloorBits != nil:
			fixed += *m.FloorBits
		}
	}
	if slices.ContainsFunc(c.Members, func(m ClusterMember) bool { return m.RateBits != c.RateBits }) {
		note("The policies of the hosts differ in the rate; the least is in force.")
	}
	if fixed > c.RateBits {
		note(fmt.Sprintf("Floors and fixed shares are %s together, which is more than the rate: fixed shares come first, and what does not fit is lowered for all.", Bits(fixed)))
	}
	if silent > 0 {
		note("The safe shares of silent hosts stay reserved. If a host will not come back: " + c.ForgetHost)
	}
	if c.MissingBits > 0 && !c.Quiet { // else they may come back in a moment
		note(fmt.Sprintf("%s are reserved for hosts that have not come back since the store was emptied. If they will not: %s", Bits(c.MissingBits), c.ForgetLost))
	}
	return nil
}

func (c *ClusterStatus) columns() []column[ClusterMember] {
	columns := []column[ClusterMember]{
		{head: "HOST", always: true, cell: func(m *ClusterMember) string { return plain.Line(m.Host) }, least: leastCut},
		{head: "POOL", drop: 3, cell: func(m *ClusterMember) string {
			if m.Pool == c.Cluster {
				return ""
			}
			return plain.Line(m.Pool)
		}},
	}
	add := func(head string, drop int, of func(*ClusterMember) uint64) {
		columns = append(columns, column[ClusterMember]{head: head, right: true, always: true, drop: drop, cell: func(m *ClusterMember) string {
			if m.State == Silent && head != "SAFE" {
				return "-"
			}
			return Bits(of(m))
		}})
	}
	option := func(head string, of func(*ClusterMember) string) {
		columns = append(columns, column[ClusterMember]{head: head, right: true, drop: 4, cell: of})
	}
	option("WEIGHT", func(m *ClusterMember) string {
		if m.Weight == 1 {
			return ""
		}
		return fmt.Sprint(m.Weight)
	})
	option("RATE", func(m *ClusterMember) string { // by its policy, where that is another one
		if m.RateBits == c.RateBits {
			return ""
		}
		return rateText(&m.RateBits)
	})
	option("FLOOR", func(m *ClusterMember) string { return optional(m.FloorBits, Bits) })
	option("SHARE", func(m *ClusterMember) string { return optional(m.ShareBits, Bits) })
	add("DEMAND", 1, func(m *ClusterMember) uint64 { return m.DemandBits })
	add("USE", 0, func(m *ClusterMember) uint64 { return m.UseBits })
	add("LEASE", 0, func(m *ClusterMember) uint64 { return m.LeaseBits })
	option("USED", func(m *ClusterMember) string { return optional(m.UsedBytes, Bytes) })
	option("GRANTED", func(m *ClusterMember) string { return optional(m.GrantedBytes, Bytes) })
	add("SAFE", 2, func(m *ClusterMember) uint64 { return m.SafeBits })
	return append(columns,
		column[ClusterMember]{head: "AGE", right: true, always: true, cell: func(m *ClusterMember) string { return time.Duration(m.AgeNS).String() }},
		column[ClusterMember]{head: "STATE", always: true, cell: func(m *ClusterMember) string { return m.State }},
	)
}
