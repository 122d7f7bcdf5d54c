package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// Files of any kind are read as far as a policy may be long, and a copy is kept of none in a directory.
func TestFilesOfAnyKind(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	good := r.policy("devices: {va: {egress: {10.0.0.0/24: 1mbit}}}\n")
	fifo := filepath.Join(dir, "fifo")
	testenv.Must(t, unix.Mkfifo(fifo, 0o600))
	for _, command := range []string{"apply", "diff", "import nft", "import libreqos --device va", "replay testdata/traces/burst.csv --device va --direction egress --policy"} {
		r.refused(exitInput, "more than 128 MiB", append(strings.Fields(command), "/dev/zero")...)
	}
	for _, args := range [][]string{{"apply", fifo, "--last-good", filepath.Join(dir, "kept")}, {"serve", fifo}, {"serve", "/dev/zero"}} {
		r.refused(exitInput, "it is not a regular file", args...)
	}
	directory := filepath.Join(dir, "d")
	testenv.Must(t, os.Mkdir(directory, 0o700))
	r.refused(exitInput, directory+" is not a regular file", "apply", good, "--last-good", directory)
	if rules := r.show(); len(rules) > 0 {
		t.Errorf("rules: %+v", rules)
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	testenv.Must(t, err)
	if len(left) != 2 {
		t.Errorf("left behind: %v", left)
	}
	// What comes by a FIFO is a policy like any other.
	go os.WriteFile(fifo, []byte("devices: {va: {egress: {10.0.0.0/24: 1mbit}}}\n"), 0)
	r.ok("apply", fifo)
	r.has("va egress 10.0.0.0/24 1000000")
}
