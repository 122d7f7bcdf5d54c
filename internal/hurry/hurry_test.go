package hurry

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

// Grace periods stay expedited until the last of several commands has ended. After a killed
// command, the next command of any namespace ends it.
func TestHurryTogether(t *testing.T) {
	file := haste(filepath.Join(t.TempDir(), "expedited")) // not the kernel's file, which other tests use
	write := func(number string) { testenv.Must(t, os.WriteFile(string(file), []byte(number+"\n"), 0o600)) }
	shows := func(when, want string) {
		t.Helper()
		if got := file.now(); got != want {
			t.Errorf("%s: the file says %s, want %s", when, got, want)
		}
	}
	hurry := func(f func()) {
		testenv.Must(t, file.up(many, func() error { f(); return nil }))
	}
	write(relaxed)
	began, end, ended := make(chan bool), make(chan bool), make(chan bool)
	hurry(func() {
		go func() {
			hurry(func() { close(began); <-end })
			close(ended)
		}()
		<-began
		shows("two hurry", Number)
		file.relax()
		shows("another one begins", Number)
	})
	shows("one has ended", Number)
	close(end)
	<-ended
	shows("both have ended", relaxed)
	write(Number)
	file.relax()
	shows("after a kill", relaxed)
	write("1")
	hurry(func() { shows("the administrator's", "1") })
	file.relax()
	shows("the administrator's still", "1")
}
