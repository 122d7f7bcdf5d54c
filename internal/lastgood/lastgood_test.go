package lastgood

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/testenv"
)

const (
	good  = "devices: {eth0: {egress: {10.0.0.0/24: 10mbit}}}\n"
	other = "devices: {eth0: {egress: {10.0.0.0/24: 20mbit}}}\n"
	bad   = "devices: {eth0: {egress: {10.0.0.0/24: fast}}}\n"
)

// files writes texts to files in a new directory, and returns its path.
func files(t *testing.T, texts map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range texts {
		testenv.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return dir
}

func TestLoad(t *testing.T) {
	for name, c := range map[string]struct {
		texts     map[string]string
		kept      string // the second argument of Load, relative to the directory
		from      string
		says, not []string // in the problem, or in the error if no policy can be used
	}{
		"good":                 {texts: map[string]string{"file": good, "kept": other}, kept: "kept", from: "file"},
		"good, none kept":      {texts: map[string]string{"file": good}, kept: "kept", from: "file"},
		"good, bad kept":       {texts: map[string]string{"file": good, "kept": bad}, kept: "kept", from: "file"},
		"good, not to keep":    {texts: map[string]string{"file": good}, from: "file"},
		"bad":                  {texts: map[string]string{"file": bad, "kept": other}, kept: "kept", from: "kept", says: []string{"file:1:", "fast"}},
		"missing":              {texts: map[string]string{"kept": other}, kept: "kept", says: []string{"file: no such file"}, not: []string{"kept"}},
		"bad, none kept":       {texts: map[string]string{"file": bad}, kept: "kept", says: []string{"file:1:", "there is no last good policy in"}},
		"bad, bad kept":        {texts: map[string]string{"file": bad, "kept": bad}, kept: "kept", says: []string{"file:1:", "kept:1:"}},
		"bad, not to keep":     {texts: map[string]string{"file": bad}, says: []string{"file:1:"}, not: []string{"kept"}},
		"missing, not to keep": {says: []string{"read the policy", "no such file"}, not: []string{"kept"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := files(t, c.texts)
			if c.kept != "" {
				c.kept = filepath.Join(dir, c.kept)
			}
			p, err := Load(filepath.Join(dir, "file"), c.kept)
			problem := p.Problem
			if c.from == "" {
				if err == nil || p.File != nil {
					t.Fatalf("used %+v, %v, want nothing", p, err)
				}
				problem = err
			} else if err != nil {
				t.Fatal(err)
			} else if p.Path != filepath.Join(dir, c.from) || string(p.Text) != c.texts[c.from] {
				t.Errorf("used %s with %q, want %s", p.Path, p.Text, c.from)
			} else if tables, err := p.For(policyfile.Device{Name: "eth0", L2Bytes: 14}); err != nil || len(tables) != 1 {
				t.Errorf("tables: %v, %v", tables, err)
			}
			if problem == nil != (c.says == nil) {
				t.Fatalf("problem: %v", problem)
			}
			for _, s := range c.says {
				if !strings.Contains(problem.Error(), s) {
					t.Errorf("the problem does not say %q: %v", s, problem)
				}
			}
			for _, s := range c.not {
				if strings.Contains(strings.ReplaceAll(problem.Error(), dir, ""), s) {
					t.Errorf("the problem says %q: %v", s, problem)
				}
			}
		})
	}
}

func TestKeep(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "made", "policy.yaml")
	inode := func() uint64 {
		t.Helper()
		var st unix.Stat_t
		testenv.Must(t, unix.Stat(path, &st))
		if mode := st.Mode & 0o7777; mode != 0o640 {
			t.Errorf("mode %o", mode)
		}
		return st.Ino
	}
	has := func(want string) {
		t.Helper()
		if have, err := os.ReadFile(path); err != nil || string(have) != want {
			t.Errorf("the file has %q, want %q: %v", have, want, err)
		}
		if in, err := os.ReadDir(filepath.Dir(path)); err != nil || len(in) != 1 {
			t.Errorf("there are other files: %v, %v", in, err)
		}
	}
	defer unix.Umask(unix.Umask(0o077))
	testenv.Must(t, Keep(path, []byte(good)))
	has(good)
	first := inode()
	testenv.Must(t, Keep(path, []byte(good)))
	if inode() != first {
		t.Error("an equal text was written again")
	}
	// A file of a killed process is replaced, whatever its contents.
	testenv.Must(t, os.WriteFile(path+".new", []byte(strings.Repeat(bad, 3)), 0o600))
	testenv.Must(t, Keep(path, []byte(other)))
	has(other)
	inode()

	// If the new file cannot be written, the old one stays.
	testenv.Must(t, os.MkdirAll(filepath.Join(path+".new", "full"), 0o700))
	if err := Keep(path, []byte(good)); err == nil || !strings.Contains(err.Error(), "save the last good policy: ") {
		t.Errorf("no error although the text cannot be written: %v", err)
	}
	testenv.Must(t, os.RemoveAll(path+".new"))
	has(other)
	if err := Keep(filepath.Join(dir, "a", "b", "policy.yaml"), []byte(good)); err == nil {
		t.Error("no error although two directories are missing")
	}
}

// A reader always sees the whole text of one of several concurrent commands.
func TestConcurrentKeep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	texts := []string{strings.Repeat("a", 1<<16), strings.Repeat("b", 1<<17), strings.Repeat("c", 1<<10)}
	testenv.Must(t, Keep(path, []byte(texts[0])))
	var writers sync.WaitGroup
	for _, text := range texts {
		writers.Go(func() {
			for range 30 {
				if err := Keep(path, []byte(text)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	for {
		have, err := os.ReadFile(path)
		testenv.Must(t, err)
		if s := string(have); s != texts[0] && s != texts[1] && s != texts[2] {
			t.Fatalf("a reader saw %d bytes, %.3q to %.3q", len(s), s, s[max(0, len(s)-3):])
		}
		select {
		case <-done:
			return
		default:
		}
	}
}
