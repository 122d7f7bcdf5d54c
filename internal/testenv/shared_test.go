package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Without ../shared a test goes on, unless NoSkip is set.
func TestMissingShared(t *testing.T) {
	if os.Getenv("SHARED_IS_MISSING") != "" {
		if files := Shared(t, "pcaps/*"); len(files) != 0 {
			t.Errorf("found %v", files)
		}
		return
	}
	dir := filepath.Join(t.TempDir(), "repository")
	Must(t, os.Mkdir(dir, 0o700))
	Must(t, os.WriteFile(filepath.Join(dir, "go.mod"), nil, 0o600))
	program, err := os.Executable()
	Must(t, err)
	for noSkip, want := range map[string]string{"0": "PASS", "1": "../shared/pcaps/* is not there, and SHAPECTL_NO_SKIP is set"} {
		cmd := exec.Command(program, "-test.run", "^TestMissingShared$")
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "SHARED_IS_MISSING=1", NoSkip+"="+noSkip)
		out, err := cmd.CombinedOutput()
		if (err != nil) != (noSkip == "1") || !strings.Contains(string(out), want) {
			t.Errorf("%s=%s: %v, output %s; want %q", NoSkip, noSkip, err, out, want)
		}
	}
}
