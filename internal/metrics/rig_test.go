package metrics_test

import (
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

var update = flag.Bool("update", false, "write what the metrics are now into testdata")

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		testenv.Must(t, os.MkdirAll("testdata", 0o755))
		testenv.Must(t, os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	testenv.Must(t, err)
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it anew); it is now:\n%s", path, got)
	}
}

// promtool runs Prometheus's tool, and returns what it says.
func promtool(t *testing.T, in io.Reader, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath("promtool"); err != nil {
		testenv.Skip(t, "needs promtool, of Debian's package prometheus")
	}
	cmd := exec.Command("promtool", args...)
	cmd.Stdin = in
	said, err := cmd.CombinedOutput()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(said)
}

// lint is what promtool says of an answer. The contract has rates in bits, as users write them; promtool wants bytes.
func lint(t *testing.T, text string) (said []string) {
	t.Helper()
	for line := range strings.Lines(promtool(t, strings.NewReader(text), "check", "metrics")) {
		if !strings.HasSuffix(line, "_bits_per_second use base unit \"bytes\" instead of \"bits\"\n") {
			said = append(said, line)
		}
	}
	return said
}
