// Package top is the screen of 'shapectl top'. What it shows is a function of the readings so far and of the keys that
// were pressed. It reads and changes limits only through a Source.
package top

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	tea "charm.land/bubbletea/v2"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/report"
)

// A Source is where readings come from, and what the keys can do. Its functions may be called at the same time, Read
// not twice at a time.
type Source interface {
	Read() (*live.Reading, error)
	// Chosen says which rules and pools are shown.
	Chosen(*live.Item) bool
	// Look looks at packets until ctx is done, and says after each interval what it saw.
	Look(ctx context.Context, at Subject, see func(Seen)) error
	// Run runs a command line. ok is whether it did all of it.
	Run(args ...string) (text string, ok bool)
}

// A Subject is whose packets to look at.
type Subject struct {
	By   string     // host or flow, for who sends them; rtt, for their round trips
	Rule *live.Item // nil for all rules that are chosen
	Host string     // whose flows; "" for all
}

// Seen is what was seen in an interval: the one or the other.
type Seen struct {
	Uses []live.Use
	RTTs *report.RTTs
	Err  error // what is missing
}

// framesPerSecond is how often the terminal is written at most: readings come once a second, and keys must not feel slow.
const framesPerSecond = 20

// Run shows the screen on a terminal until the user or a signal ends it. The terminal is then as it was.
func Run(m *Model, in, out *os.File, environ []string) error {
	defer m.Close()
	p := tea.NewProgram(m, tea.WithInput(in), tea.WithOutput(out), tea.WithEnvironment(environ), tea.WithFPS(framesPerSecond), tea.WithoutSignalHandler())
	// A terminal that goes away, or a kill, ends it as a key does. The library's own way, a context, closes the input while
	// it is read. A second signal ends a process whose terminal takes no output.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGHUP, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	defer context.AfterFunc(ctx, func() {
		stop()
		p.Quit()
	})()
	_, err := p.Run()
	return err
}
