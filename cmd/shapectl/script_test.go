package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// TestScripts runs testdata/scripts/*.txt. A line "== WHAT IS SO" begins a test, in a network namespace with va and vb; a line
// "== both: WHAT IS SO" one that runs with tcx and with clsact. All other lines are commands of shapectl, with what they must
// do. Without such a mark, a command must succeed and say nothing on stderr.
//
//	COMMAND !N TEXT    refused with exit code N and one line that has TEXT, and prints nothing
//	COMMAND ?N         exits with code N
//	COMMAND => TEXT    prints TEXT; line ends are written " | "
//	COMMAND =/> TEXT   does not print TEXT
//	COMMAND =^ TEXT    prints TEXT first; =$ TEXT last; == TEXT and nothing else; =3x TEXT three times
//	COMMAND 2> TEXT    says TEXT on stderr
//
// A command that ends with <<TEXT gets a file with the policy TEXT as its last argument. $FILE is its path.
// Lines that begin with a colon are the methods of script below.
func TestScripts(t *testing.T) {
	paths, err := filepath.Glob("testdata/scripts/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		testenv.Must(t, err)
		lines := strings.Split(string(text), "\n")
		for at, line := range lines {
			title, begins := strings.CutPrefix(line, "== ")
			if !begins {
				continue
			}
			title, both := strings.CutPrefix(title, "both: ")
			title, _, _ = strings.Cut(title, ". ")
			name := strings.TrimSuffix(filepath.Base(path), ".txt") + "/" + title
			if !both {
				t.Run(name, func(t *testing.T) { t.Parallel(); (&script{rig: newRig(t), path: path}).run(lines, at+1) })
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				eachHook(t, func(t *testing.T, r *rig) { (&script{rig: r, path: path}).run(lines, at+1) })
			})
		}
	}
}

// A script is a test of TestScripts.
type script struct {
	*rig
	path   string
	line   string   // with its place
	file   string   // the last policy
	kept   []string // what :keep has seen
	daemon *process
}

func (s *script) run(lines []string, from int) {
	for i, line := range lines[from:] {
		line, _, _ = strings.Cut(line, "  # ")
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "== ") || s.t.Failed() {
			return
		}
		if line == "" || line[0] == '#' {
			continue
		}
		s.line = fmt.Sprintf("%s:%d: %s", s.path, from+i+1, line)
		marks := scriptMark.FindAllStringSubmatchIndex(line, -1)
		command, checks := line, [][2]string{}
		for j, m := range marks {
			end := len(line)
			if j == 0 {
				command = line[:m[0]]
			}
			if j+1 < len(marks) {
				end = marks[j+1][0]
			}
			checks = append(checks, [2]string{line[m[2]:m[3]], strings.ReplaceAll(strings.TrimSpace(line[m[1]:end]), "$FILE", s.file)})
		}
		if rest, is := strings.CutPrefix(command, ":"); is {
			s.check(s.does(rest), checks)
		} else {
			s.check(s.command(command), checks)
		}
	}
}

var scriptMark = regexp.MustCompile(` (=>|=/>|==|=\^|=\$|=\d+x|2>|!\d|\?\d)(?: |$)`)

func (s *script) fail(format string, args ...any) { s.t.Errorf(s.line+": "+format, args...) }

// command runs a command of shapectl.
func (s *script) command(line string) result {
	line, text, isPolicy := strings.Cut(line, "<<")
	args := shellWords(line)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "$FILE", s.file)
	}
	if isPolicy {
		s.does("policy " + text)
		args = append(args, s.file)
	}
	got := s.rig.run(args...)
	if args[0] == "__complete" {
		got.err = "" // which has what cobra says to a person
	}
	return got
}

// shellWords are the words of a line. One in quotes, ”, may have blanks and be empty.
func shellWords(line string) (words []string) {
	for _, m := range regexp.MustCompile(`'([^']*)'|[^\s']+`).FindAllStringSubmatch(line, -1) {
		if strings.HasPrefix(m[0], "'") {
			m[0] = strings.ReplaceAll(m[1], `\n`, "\n")
		}
		words = append(words, m[0])
	}
	return words
}

// check compares what a line did with what it ought to do.
func (s *script) check(got result, checks [][2]string) {
	out := strings.ReplaceAll(strings.TrimSuffix(got.out, "\n"), "\n", " | ")
	short, folded, code, mayTell := bare(out), bare(got.out), exitDone, false
	has := func(text string) bool {
		return strings.Contains(short, bare(text)) || strings.Contains(folded, bare(text))
	}
	for _, c := range checks {
		mark, text := c[0], c[1]
		ok := true
		switch {
		case mark[0] == '!':
			s.isRefusal(s.line, got, int(mark[1]-'0'), text)
			return
		case mark[0] == '?':
			code, mayTell = int(mark[1]-'0'), true
		case mark == "2>":
			ok, mayTell = strings.Contains(bare(got.err), bare(text)), true
		case mark == "=>":
			ok = has(text)
		case mark == "=/>":
			ok = !has(text)
		case mark == "==":
			ok = out == text
		case mark == "=^":
			ok = strings.HasPrefix(short, bare(text))
		case mark == "=$":
			ok = strings.HasSuffix(short, bare(text))
		default:
			times, _ := strconv.Atoi(strings.Trim(mark, "=x"))
			ok = strings.Count(short, bare(text)) == times
		}
		if !ok {
			s.fail("not %s %s:\n%s%s", mark, text, got.out, got.err)
		}
	}
	if got.code != code || got.err != "" && !mayTell {
		s.fail("exit %d: %s", got.code, got.err)
	}
}

// does is what lines that begin with a colon do. What they find is checked as what commands print.
func (s *script) does(line string) (found result) {
	s.t.Helper()
	verb, rest, _ := strings.Cut(line, " ")
	words := shellWords(rest)
	in := func(err error) {
		if err != nil {
			s.t.Fatalf("%s: %v", s.line, err)
		}
	}
	switch verb {
	case "policy": // TEXT: writes a file, of which $FILE is the path
		s.file = s.policy(strings.ReplaceAll(rest, `\n`, "\n") + "\n")
	case "rewrite": // TEXT: the file has another policy
		s.writeFile(s.file, strings.ReplaceAll(rest, `\n`, "\n")+"\n")
	case "exported": // makes a file of what is in force
		s.file = s.policy(s.ok("export"))
	case "send": // ADDRESS PACKETS BYTES
		packets, err := strconv.Atoi(words[1])
		in(err)
		bytes, err := strconv.Atoi(words[2])
		in(err)
		s.send(words[0], packets, bytes)
	case "veth": // DEVICE PEER
		testenv.Veth(s.t, words[0], words[1])
	case "add": // DEVICE PEER, which stay down
		in(addVeth(words[0], words[1]))
	case "taps": // N
		n, err := strconv.Atoi(rest)
		in(err)
		s.taps(n)
	case "remove": // DEVICE
		s.remove(rest)
	case "rename": // DEVICE NAME
		rename(s.t, words[0], words[1])
	case "altname": // DEVICE NAME
		in(netlink.LinkAddAltName(testenv.Link(s.t, words[0]), words[1]))
	case "move": // DEVICE, to another network namespace
		_, other := testenv.NewNamedNetns(s.t)
		in(netlink.LinkSetNsFd(testenv.Link(s.t, rest), other.FD()))
	case "other-layout":
		s.makeOtherLayout()
	case "expire": // waits for a change that is pending to be reverted
		sleepUntil(s.pending())
	case "keep", "kept": // the rules and pools with their counters are those that :keep has seen
		now := []string{s.ok("show", "-j"), s.ok("export")}
		if verb == "kept" && !slices.Equal(now, s.kept) {
			s.fail("before:\n%s\nand now:\n%s", strings.Join(s.kept, "\n"), strings.Join(now, "\n"))
		} else if verb == "keep" {
			s.kept = now
		}
	case "policy-kept": // the rules and pools are those that :keep has seen, but for their counters
		if now := s.ok("export"); now != s.kept[1] {
			s.fail("before:\n%s\nand now:\n%s", s.kept[1], now)
		}
	case "nothing-left":
		s.rig.nothingLeft()
	case "hooks":
		found.out = strconv.Itoa(len(s.hooks()))
	case "names": // COMMAND: the rules and pools that it has in JSON
		found.out = names(s.rows(words...))
	case "decide": // COMMAND: those of its rules that decide
		found.out = names(slices.DeleteFunc(s.rows(words...), func(row shownRule) bool { return row.Decides == nil || !*row.Decides }))
	case "rates": // the rules, all of which are attached, and pools
		var all []string
		for _, rule := range s.show(words...) {
			if all = append(all, strings.TrimSpace(fmt.Sprintf("%s %s %s %d", rule.Device, rule.Direction, rule.CIDR, rule.Rate))); !rule.Attached && rule.Device != "" {
				s.fail("%s %s %s: %s", rule.Device, rule.Direction, rule.CIDR, rule.State)
			}
		}
		slices.Sort(all)
		found.out = strings.Join(all, "\n")
	case "labels": // the rules with their names, plans, notes, rates in Mbit/s, and capacities
		found.out = strings.Join(s.labelled(), "\n")
	case "serve": // ARGUMENTS: goes on until :ends
		for i := range words {
			words[i] = strings.ReplaceAll(words[i], "$FILE", s.file)
		}
		s.daemon = s.watch(words...)
	case "says": // TEXT, once more than before
		s.daemon.says(strings.ReplaceAll(strings.ReplaceAll(rest, "$FILE", s.file), " | ", "\n"))
	case "reload":
		in(s.daemon.cmd.Process.Signal(unix.SIGHUP))
	case "ends": // serve ends well; what it said but for what it watches
		found = s.daemon.ends(unix.SIGTERM)
	default:
		s.t.Fatalf("%s: no such line", s.line)
	}
	return found
}
