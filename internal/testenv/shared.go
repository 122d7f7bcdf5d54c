package testenv

import (
	"embed"
	"os"
	"path/filepath"
	"testing"
)

//go:embed testdata/captures
var captures embed.FS

// Captures returns captures of our own by their names: the packets of all kinds that bpf's tests make.
func Captures(tb testing.TB) map[string][]byte {
	tb.Helper()
	all := map[string][]byte{}
	files, err := captures.ReadDir("testdata/captures")
	Must(tb, err)
	for _, f := range files {
		all[f.Name()], err = captures.ReadFile("testdata/captures/" + f.Name())
		Must(tb, err)
	}
	return all
}

// Shared returns the files in ../shared, beside the repository, that match a pattern. If
// there are none, the caller skips or goes on without them; with NoSkip the test fails.
func Shared(tb testing.TB, pattern string) []string {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join(repository(tb), "..", "shared", pattern))
	Must(tb, err)
	if len(files) == 0 && os.Getenv(NoSkip) == "1" {
		tb.Fatalf("../shared/%s is not there, and %s is set", pattern, NoSkip)
	}
	return files
}

// repository returns the directory with go.mod above the working directory.
func repository(tb testing.TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	Must(tb, err)
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			tb.Fatal("no go.mod in this directory or above")
		}
		dir = up
	}
}
