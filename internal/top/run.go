package top

import (
	"context"
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
