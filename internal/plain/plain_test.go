package plain

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"
)

var escapes = map[string]string{
	"":          "",
	"eth0.100":  "eth0.100",
	"häuser-東京": "häuser-東京",
	"نمی\u200cخواهم \U0001f469\u200d\U0001f680": "نمی\u200cخواهم \U0001f469\u200d\U0001f680",
	"a\x1b[31mb":             `a\u001b[31mb`,
	"a\x7fb\u0085c\u009bd":   `a\u007fb\u0085c\u009bd`,
	"a\u202eb\u2066c\u200fd": `a\u202eb\u2066c\u200fd`,
	"a\u2028b\ufeffc\u00add": `a\u2028b\ufeffc\u00add`,
	"a\U000e0041b":           `a\udb40\udc41b`,
	"a\xffb\xc3":             `a\xffb\xc3`,
	"a\xe2\x80b":             `a\xe2\x80b`,
	"a\xed\xa0\x80b":         `a\xed\xa0\x80b`, // half of a pair
	"a\x00\a\b\vb":           `a\u0000\u0007\u0008\u000bb`,
}

func TestLine(t *testing.T) {
	for in, want := range escapes {
		if got := Line(in); got != want {
			t.Errorf("%q is %s, want %s", in, got, want)
		}
	}
	if got := Line("a\nb\tc\rd\r\n"); got != `a\nb\tc\rd\r\n` {
		t.Errorf("layout is %s", got)
	}
}

// However a text is cut into pieces, it comes out the same.
func TestWriter(t *testing.T) {
	check := func(in, want string) {
		t.Helper()
		for size := 1; size <= len(in); size++ {
			var out bytes.Buffer
			w := NewWriter(&out)
			for at := 0; at < len(in); at += size {
				piece := in[at:min(at+size, len(in))]
				if n, err := w.Write([]byte(piece)); n != len(piece) || err != nil {
					t.Fatalf("Write of %q: %d, %v", piece, n, err)
				}
			}
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
			if out.String() != want {
				t.Errorf("%q by %d bytes is %q, want %q", in, size, out.String(), want)
			}
		}
	}
	for in, want := range escapes {
		check(in, want)
	}
	check("a\n\tb\r\nc\rd\r", "a\n\tb\r\nc\\rd\\r")
	for in := range escapes {
		if !utf8.ValidString(in) {
			continue // which JSON can not say
		}
		var out bytes.Buffer
		w := NewWriter(&out)
		if err := json.NewEncoder(w).Encode(map[string]string{"name": in}); err != nil {
			t.Fatal(err)
		}
		var got map[string]string
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || got["name"] != in {
			t.Errorf("%q is %q in JSON: %v: %s", in, got, err, out.String())
		}
	}
}

// A shell makes of a word what it stands for, and of a command the same arguments.
func TestWord(t *testing.T) {
	names := []string{
		"eth0", "", "x;reboot", "$(reboot)", "`reboot`", "a b", "a'b", `a"b`, `a\b`, "a\\", "*", "~", "#", "-x", "--", "-", "a&b|c>d<e", "!x", "{a,b}", "a=b", "%s", "100%",
		"ä;東", "a\x1b[31m;$(reboot)'%s\\", "-\x1b", "a\nb", "\u202e%d", "\xff\xfe", "a\u009b'", "\x01234", "-n",
	}
	for _, name := range names {
		word := Word(name)
		if Line(word) != word {
			t.Errorf("the word of %q is %q", name, word)
		}
		out, err := exec.Command("sh", "-c", "printf '<%s>' "+word).CombinedOutput()
		if err != nil || string(out) != "<"+name+">" {
			t.Errorf("sh makes %q of %s, which is for %q: %v", out, word, name, err)
		}
		line := Command("", "flush", name, "egress")
		out, err = exec.Command("sh", "-c", "shapectl() { printf '<%s>' \"$@\"; }; "+line).CombinedOutput()
		want := "<flush><" + name + "><egress>"
		if strings.HasPrefix(name, "-") && name != "-" {
			want = "<flush><--><" + name + "><egress>"
		}
		if err != nil || string(out) != want {
			t.Errorf("sh runs %q of %s, not %q: %v", out, line, want, err)
		}
	}
}

// A command has -n with the network namespace, quoted as all names.
func TestCommandInNetns(t *testing.T) {
	for netns, want := range map[string]string{
		"":               "'shapectl flush eth0'",
		"blue":           "'shapectl -n blue flush eth0'",
		"/proc/7/ns/net": "'shapectl -n /proc/7/ns/net flush eth0'",
		"a b":            "shapectl -n 'a b' flush eth0",
	} {
		if got := Suggest(netns, "flush", "eth0"); got != want {
			t.Errorf("in %q: %s, want %s", netns, got, want)
		}
	}
}

func TestList(t *testing.T) {
	for want, names := range map[string][]string{
		"":                   nil,
		"a":                  {"a"},
		"a, b, c, d":         {"a", "b", "c", "d"},
		"a, b, c and 2 more": {"a", "b", "c", "d", "e"},
	} {
		if got := List(names); got != want {
			t.Errorf("list(%q) is %q, want %q", names, got, want)
		}
	}
}
