// Package top is the screen of 'shapectl top'. What it shows is a function of the readings so far and of the keys that
// were pressed. It reads and changes limits only through a Source.
package top

import (
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/report"
)

// A Source is where readings come from, and what the keys can do. Its functions may be called at the same time, Read
// and Look not twice at a time.
type Source interface {
	Read() (*live.Reading, error)
	// Chosen says which rules and pools are shown.
	Chosen(*live.Item) bool
	// Look watches the hosts of a rule, or the flows of one of its hosts.
	Look(rule *live.Item, host string) (Looker, error)
	Explain(Target) (string, error)
	// SetRate returns what it changed, in a sentence. The change reverts after confirm unless that is 0.
	SetRate(target Target, rate string, confirm time.Duration) (string, error)
	Confirm() (string, error)
	Rollback() (string, error)
}

// A Target is a rule or a pool, a key of a rule, or the rules with a name.
type Target struct {
	Rule      *live.Item // nil for the rules with a name
	Key       string     // of a host or flow of the rule; "" for none
	Name      string
	Direction string // "" for both
}

// A Looker watches who uses a rule.
type Looker interface {
	// Read returns what each used since the last Read.
	Read() (report.RuleTalkers, error)
	Close() error
}
