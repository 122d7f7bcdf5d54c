package input

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// endless is an endless input that counts the bytes read.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	clear(p)
	e.read += len(p)
	return len(p), nil
}

func TestAll(t *testing.T) {
	if text, err := All(strings.NewReader("devices: {}\n")); string(text) != "devices: {}\n" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	const most = 1 << 16
	if text, err := all(io.LimitReader(new(endless), most), most); len(text) != most || err != nil {
		t.Errorf("the maximum: %d bytes, %v", len(text), err)
	}
	source := new(endless)
	if _, err := all(source, most); !errors.Is(err, ErrTooLarge) || source.read > most+1 {
		t.Errorf("endless input: %v after %d bytes", err, source.read)
	}
}

func TestFile(t *testing.T) {
	dir := t.TempDir()
	name := func(s string) string { return filepath.Join(dir, s) }
	large, err := os.Create(name("large"))
	if err != nil {
		t.Fatal(err)
	}
	defer large.Close()
	for _, err := range []error{
		os.WriteFile(name("good"), []byte("text"), 0o600), large.Truncate(MaxBytes + 1), unix.Mkfifo(name("fifo"), 0o600), os.Symlink("good", name("link")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, good := range []string{"good", "link"} {
		if text, err := File(name(good)); string(text) != "text" || err != nil {
			t.Errorf("%s: %q, %v", good, text, err)
		}
	}
	for file, says := range map[string]string{
		name("none"):  "no such file",
		dir:           "read " + dir + ": it is not a regular file",
		name("fifo"):  "it is not a regular file",
		"/dev/zero":   "read /dev/zero: it is not a regular file",
		name("large"): "it has more than 128 MiB",
	} {
		if _, err := File(file); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", file, err, says)
		}
	}
}

// Update writes to no file that somebody else has put in the place of the next one.
func TestUpdate(t *testing.T) {
	path, victim := filepath.Join(t.TempDir(), "file"), filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	for what, put := range map[string]func() error{
		"symlink":   func() error { return os.Symlink(victim, path+".new") },
		"hard link": func() error { return os.Link(victim, path+".new") },
	} {
		if err := put(); err != nil {
			t.Fatal(err)
		}
		if err := Update(path, func([]byte, error) []byte { return []byte(what) }); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if text, err := os.ReadFile(victim); string(text) != "text" || err != nil {
			t.Errorf("%s: the other file has %q, %v", what, text, err)
		}
		if text, err := File(path); string(text) != what || err != nil {
			t.Errorf("%s: %q, %v", what, text, err)
		}
	}
}
