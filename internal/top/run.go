package top

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	tea "charm.land/bubbletea/v2"
)

// framesPerSecond is how often the terminal is written at most: readings come once a second, and keys must not feel slow.
const framesPerSecond = 20

// Run shows the screen on a terminal until the user or a signal ends it. The terminal is then as it was.
func Run(m *Model, in, out *os.File, environ []string) error {
	defer m.Close()
	// A terminal that goes away, or a kill, ends it as a key does.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGHUP, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p := tea.NewProgram(m, tea.WithContext(ctx), tea.WithInput(in), tea.WithOutput(out), tea.WithEnvironment(environ),
		tea.WithFPS(framesPerSecond), tea.WithoutSignalHandler())
	_, err := p.Run()
	if ctx.Err() != nil && errors.Is(err, tea.ErrProgramKilled) {
		return nil
	}
	return err
}
