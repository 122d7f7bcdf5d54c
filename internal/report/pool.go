package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ExplainedPool is a pool with the pools above it and what is within it, as measured over an interval.
type ExplainedPool struct {
	Pool string `json:"pool"`
	// LimitedBy is the one of Levels that limited the pool's packets; null if none did.
	LimitedBy *string `json:"limited_by"`
	Levels    []Rule  `json:"levels"`  // the pool and those above it, the lowest first
	Members   []Rule  `json:"members"` // directly within it, those that use most first
}

// ExplainPool finds what limits a pool.
func ExplainPool(pool *live.Item) *ExplainedPool {
	p := &ExplainedPool{Pool: pool.Key.Pool, Levels: []Rule{}, Members: []Rule{}}
	var loads []Load
	for at := pool; at != nil; at = at.Parent() {
		p.Levels, loads = append(p.Levels, NewRule(at)), append(loads, loadOf(at))
	}
	members := pool.Children()
	slices.SortStableFunc(members, func(a, b *live.Item) int { return cmp.Compare(b.UseBits().Or(-1), a.UseBits().Or(-1)) })
	p.Members = NewRules(members)
	// One that delays or marks packets drops none. Senders that got nothing through may have stopped, so a pool without packets
	// counts as one that loses some.
	dropped := pool.DroppedPercent()
	if i := Limiter(loads); i != NoLimiter && (p.Levels[i].Excess != policy.Drop || !dropped.Known || dropped.N > 0) {
		p.LimitedBy = &p.Levels[i].Label.Name
	}
	return p
}

// loadOf is what a pool did over the interval. If members share it, those with shares of their own refuse what it does not
// leave them. If none of those that refuse packets is below its own rate, the pool limits none of them.
func loadOf(pool *live.Item) Load {
	rate, capacity, _ := pool.InForce()
	l := Load{Use: uint64(pool.UseBits().N), Rate: rate, Refuses: pool.ExcessPercent().N > 0, Shares: pool.Share.Kind != policy.ShareNone}
	l.Full = model.AtRate(pool.Level, capacity, l.Shares)
	if pool.Share.Kind != policy.ShareMember {
		return l
	}
	for _, m := range pool.Children() {
		if m.ExcessPercent().N == 0 {
			continue
		}
		if l.Full = m.UsePercent().N < near; l.Full {
			break
		}
	}
	return l
}

// ExplainedPools are several pools, such as those of a device.
type ExplainedPools []*ExplainedPool

// Text says of each pool what limits it.
func (pools ExplainedPools) Text(w io.Writer) error {
	for i, p := range pools {
		if i > 0 {
			if _, err := io.WriteString(w, "\n"); err != nil {
				return err
			}
		}
		if err := p.Text(w); err != nil {
			return err
		}
	}
	return nil
}

// fewMembers is how many members are listed as text.
const fewMembers = 5

// Text says what limits the pool, and then why.
func (p *ExplainedPool) Text(w io.Writer) error {
	var s strings.Builder
	name := "pool " + p.Pool
	own := &p.Levels[0]
	says := name + " limited none of its packets, and neither did a pool above"
	if p.LimitedBy != nil {
		limiter := &p.Levels[slices.IndexFunc(p.Levels, func(r Rule) bool { return r.Label.Name == *p.LimitedBy })]
		says = "pool " + limiter.Label.Name + " is full: " + limiter.useNow()
		if sharers := limiter.sharers(); sharers != "" {
			says += " for " + sharers
		}
		if limiter != own {
			says = name + " gets " + own.useNow() + "; " + says
		}
	}
	if p.LimitedBy == nil && own.UsePercent().N > 100 {
		says += "; its burst lets more than its rate pass for a moment"
	}
	if dropped := own.DroppedPercent(); dropped.N > 0 {
		says += "; " + percentText(dropped.N) + " of the packets of " + p.Pool + " were dropped"
		if p.LimitedBy == nil {
			says += " by limits within it"
		}
	}
	says = fmt.Sprintf("in the last %.1f s, %s", p.Levels[0].Interval.Seconds(), says)
	for _, level := range slices.Backward(p.Levels) {
		if quota := NewQuotaUse(level.Also, level.Used).usedUp("pool " + level.Label.Name); quota != "" {
			says = quota + "; " + says
		}
	}
	s.WriteString(plain.Fold(plain.Line(says), screenWidth, "", "    "))
	var rows Rules // the topmost pool first, and below this one the members that use most
	for depth, level := range slices.Backward(p.Levels) {
		level.depth = len(p.Levels) - 1 - depth
		rows = append(rows, level)
	}
	for _, m := range p.Members {
		if len(rows) < len(p.Levels)+fewMembers && m.UseBits().N+m.DroppedPercent().N > 0 {
			m.depth = len(p.Levels)
			rows = append(rows, m)
		}
	}
	if err := writeTable(&s, rows, branchColumns(rows, false), screenWidth); err != nil {
		return err
	}
	if others := len(p.Levels) + len(p.Members) - len(rows); others > 0 {
		fmt.Fprintf(&s, "%d more within it, with less or no use\n", others)
	}
	_, err := io.WriteString(w, s.String())
	return err
}

// useNow is how much of the rate in force is used.
func (r *Rule) useNow() string {
	if quota := NewQuotaUse(r.Also, r.Used); quota != nil && quota.UsedUp {
		return useText(bits(r.UseBits()), quota.ThenBits) + ", as its quota is used up"
	}
	if r.AnyRate() {
		return Bits(uint64(r.UseBits().N)) + ", with a limit of " + ratesOf(&r.Item.Rule)
	}
	return useText(bits(r.UseBits()), *r.rateNow())
}

// sharers are those that are active; "" without shares.
func (r *Rule) sharers() string {
	return (&Sharing{Share: r.Share.String(), ActiveSharers: r.ActiveSharers}).sharers()
}
