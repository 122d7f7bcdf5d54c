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
//	COMMAND =~ REGEXP  prints what matches; =/~ prints nothing that does
//	COMMAND 2=> TEXT   says TEXT on stderr; 2=^ and so on are the same for stderr
//	:until COMMAND     the same, until it is so
//
// A command that ends with <<TEXT gets a file with the policy TEXT as its last argument, of which $FILE is the path. Lines that
// begin with a colon are for the test itself: see does.
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
				t.Run(name, func(t *testing.T) { t.Parallel(); newScript(newRig(t), path).run(lines, at+1) })
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				eachHook(t, func(t *testing.T, r *rig) { newScript(r, path).run(lines, at+1) })
			})
		}
	}
}

// A script is a test of TestScripts.
type script struct {
	*rig
	path     string
	line     string            // with its place
	files    map[string]string // paths of policies, and names of network namespaces
	netns    map[string]*testenv.Netns
	kept     []string // what :keep has seen
	deadline uint64   // the last one
	daemon   *process
	home     *home
}

func newScript(r *rig, path string) *script {
	return &script{rig: r, path: path, files: map[string]string{}, netns: map[string]*testenv.Netns{}}
}

// with is a text with the paths of files.
func (s *script) with(text string) string {
	return scriptFile.ReplaceAllStringFunc(text, func(name string) string { return s.files[strings.TrimPrefix(name, "$")] })
}

var scriptFile = regexp.MustCompile(`\$(FILE|[a-z]\b)`)

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
		marks := slices.DeleteFunc(scriptMark.FindAllStringSubmatchIndex(line, -1), func(m []int) bool { return m[1] < len(line) && line[m[1]] != ' ' })
		command, checks := line, [][2]string{}
		for j, m := range marks {
			end := len(line)
			if j == 0 {
				command = line[:m[0]]
			}
			if j+1 < len(marks) {
				end = marks[j+1][0]
			}
			checks = append(checks, [2]string{line[m[2]:m[3]], strings.TrimSpace(line[m[1]:end])})
		}
		until, waits := strings.CutPrefix(command, ":until ")
		rest, isOurs := strings.CutPrefix(command, ":")
		var wrong string
		switch {
		case waits:
			testenv.Eventually(s.t, s.line, func() bool { return s.wrong(s.command(until), checks) == "" })
		case isOurs:
			wrong = s.wrong(s.does(rest), checks)
		case len(checks) == 1 && checks[0][0][0] == '!':
			s.isRefusal(s.line, s.command(command), int(checks[0][0][1]-'0'), s.with(checks[0][1]))
		default:
			wrong = s.wrong(s.command(command), checks)
		}
		if wrong != "" {
			s.fail("%s", wrong)
		}
	}
}

var scriptMark = regexp.MustCompile(` (2?(?:=>|=/>|==|=/?~|=\^|=\$|=\d+x)|!\d|\?\d)`)

func (s *script) fail(format string, args ...any) { s.t.Errorf(s.line+": "+format, args...) }

// command runs a command of shapectl.
func (s *script) command(line string) result {
	line, text, isPolicy := strings.Cut(line, "<<")
	args := shellWords(s.with(line))
	if isPolicy {
		s.does("policy " + text)
		args = append(args, s.files["FILE"])
	}
	got := s.rig.run(args...)
	if args[0] == "__complete" {
		got.err = "" // which has what cobra says to a person
	}
	return got
}

// shellWords are the words of a line. One in single quotes may have blanks and be empty.
func shellWords(line string) (words []string) {
	for _, m := range regexp.MustCompile(`'([^']*)'|[^\s']+`).FindAllStringSubmatch(line, -1) {
		if strings.HasPrefix(m[0], "'") {
			m[0] = strings.ReplaceAll(m[1], `\n`, "\n")
		}
		words = append(words, m[0])
	}
	return words
}

// wrong is what a line did other than it ought to do; empty for nothing.
func (s *script) wrong(got result, checks [][2]string) string {
	code, mayTell := exitDone, false
	for _, c := range checks {
		mark, text := c[0], s.with(c[1])
		if mark[0] == '?' {
			code, mayTell = int(mark[1]-'0'), true
			continue
		}
		said := got.out
		if mark, mayTell = strings.TrimPrefix(mark, "2"), mayTell || mark[0] == '2'; mark != c[0] {
			said = got.err
		}
		whole := strings.ReplaceAll(strings.TrimSuffix(said, "\n"), "\n", " | ")
		is := func(said string) bool { // one that is folded may end its lines anywhere
			switch said, want := bare(said), bare(text); mark {
			case "=>", "=/>":
				return strings.Contains(said, want)
			case "=^":
				return strings.HasPrefix(said, want)
			case "=$":
				return strings.HasSuffix(said, want)
			case "=~", "=/~":
				return regexp.MustCompile(want).MatchString(said)
			default:
				times, _ := strconv.Atoi(strings.Trim(mark, "=x"))
				return strings.Count(said, want) == times
			}
		}
		ok := whole == text
		if mark != "==" {
			ok = (is(whole) || is(said)) != strings.Contains(mark, "/")
		}
		if !ok {
			return fmt.Sprintf("not %s %s:\n%s%s", c[0], text, got.out, got.err)
		}
	}
	if got.code != code || got.err != "" && !mayTell {
		return fmt.Sprintf("exit %d: %s", got.code, got.err)
	}
	return ""
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
		s.files["FILE"] = s.policy(strings.ReplaceAll(rest, `\n`, "\n") + "\n")
	case "file": // NAME TEXT: a policy that is called $NAME
		s.does("policy " + s.with(strings.TrimPrefix(rest, words[0]+" ")))
		s.files[words[0]] = s.files["FILE"]
	case "rewrite": // NAME TEXT: the file has another policy
		s.writeFile(s.files[words[0]], strings.TrimPrefix(rest, words[0]+" ")+"\n")
	case "exported": // makes a file of what is in force
		s.files["FILE"] = s.policy(s.ok("export"))
	case "send": // ADDRESS PACKETS BYTES
		packets, err := strconv.Atoi(words[1])
		in(err)
		bytes, err := strconv.Atoi(words[2])
		in(err)
		s.send(words[0], packets, bytes)
	case "slow": // a rule for what leaves va, whose bucket keeps its level
		s.setSlow("va egress " + rest)
	case "unheld": // a rule that delays, though nothing holds back its packets
		s.setUnheld(rest)
	case "address": // of va
		s.address(rest)
	case "home": // va is that of a router, with a tablet behind it
		s.home = newHome(s.rig)
	case "nat": // va is the line of a router with NAT, and lan its inner device
		newNATRig(s.rig)
	case "gets": // ADDRESS/BITS: the tablet has it
		s.home.gets(rest)
	case "loses": // ADDRESS/BITS
		s.home.loses(rest)
	case "forgets": // DEVICE ADDRESS: the router does not know it any more
		s.home.forgets(words[0], words[1])
	case "talk": // ADDRESS: the router sends 200 packets to the tablet
		s.home.talk(rest, 200)
	case "home-rules":
		found.out = s.home.rules()
	case "veth": // DEVICE PEER
		testenv.Veth(s.t, words[0], words[1])
	case "add": // DEVICE PEER, which stay down
		in(addVeth(words[0], words[1]))
	case "taps": // N
		n, err := strconv.Atoi(rest)
		in(err)
		for i := range n {
			in(addVeth(fmt.Sprint("tap", i), fmt.Sprint("peer", i)))
		}
	case "no-taps": // N
		n, err := strconv.Atoi(rest)
		in(err)
		for i := range n {
			s.remove(fmt.Sprint("tap", i))
		}
	case "remove": // DEVICE
		s.remove(rest)
	case "rename": // DEVICE NAME
		rename(s.t, words[0], words[1])
	case "altname": // DEVICE NAME
		in(netlink.LinkAddAltName(testenv.Link(s.t, words[0]), words[1]))
	case "move": // DEVICE, to another network namespace, or DEVICE NAME
		var other *testenv.Netns
		if len(words) == 2 {
			other = s.netns[words[1]]
		} else {
			_, other = testenv.NewNamedNetns(s.t)
		}
		in(netlink.LinkSetNsFd(testenv.Link(s.t, words[0]), other.FD()))
	case "other-layout":
		s.makeOtherLayout()
	case "deadline": // there is a change that is pending
		if s.deadline = s.pending(); s.deadline == 0 {
			s.fail("nothing is pending")
		}
	case "deadline-kept":
		if now := s.pending(); now != s.deadline {
			s.fail("until %d, not %d", now, s.deadline)
		}
	case "expire": // waits for the last deadline
		sleepUntil(s.deadline)
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
	case "meters": // DEVICE PEER...: each packet through these is metered once
		for i := 0; i < len(words); i += 2 {
			s.meters([2]string{words[i], words[i+1]})
		}
	case "env": // NAME VALUE
		s.env[words[0]] = words[1]
	case "no-clsact": // DEVICE: something else deletes the qdisc
		in(netlink.QdiscDel(clsactQdisc(testenv.Link(s.t, rest))))
	case "no-filters": // DEVICE: something else deletes the filters for egress
		filters, err := netlink.FilterList(testenv.Link(s.t, rest), netlink.HANDLE_MIN_EGRESS)
		in(err)
		for _, f := range filters {
			in(netlink.FilterDel(f))
		}
	case "netns": // NAME DEVICE PEER: another network namespace, of which $NAME is the name
		name, ns := testenv.NewNamedNetns(s.t)
		s.files[words[0]], s.netns[words[0]] = name, ns
		in(ns.Do(func() error { return addVeth(words[1], words[2]) }))
	case "tun": // DEVICE, without a link header
		testenv.AddLink(s.t, &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: rest}, Mode: netlink.TUNTAP_MODE_TUN, Queues: 1, Flags: netlink.TUNTAP_DEFAULTS})
	case "keep-attached":
		s.kept = s.attached()
	case "attached-kept": // pins and programs
		if now := s.attached(); !slices.Equal(now, s.kept) {
			s.fail("attached were %v, and are %v", s.kept, now)
		}
	case "nothing-left":
		s.rig.nothingLeft()
	case "no-pins": // for where there is no va
		if pins := s.pins(); len(pins) > 0 {
			s.fail("pins are left: %v", pins)
		}
	case "until-no-pins":
		testenv.Eventually(s.t, s.line, func() bool { return len(s.pins()) == 0 })
	case "hooks":
		found.out = strconv.Itoa(len(s.hooks()))
	case "names": // ARGUMENTS of show: the rules and pools that it has in JSON
		found.out = names(s.show(words...))
	case "guarantees": // ARGUMENTS of show: those of its rules and pools that have one
		for _, row := range s.show(words...) {
			if row.GuaranteeBits != 0 {
				found.out += names([]shownRule{row}) + "\n"
			}
		}
	case "decide": // ARGUMENTS of show: those of its rules that decide
		found.out = names(slices.DeleteFunc(s.show(words...), func(row shownRule) bool { return row.Decides == nil || !*row.Decides }))
	case "bridged":
		s.bridged()
	case "findings": // ARGUMENTS of doctor
		found = s.examined(words...)
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
		s.daemon = s.watch(shellWords(s.with(rest))...)
	case "says": // TEXT, once more than before
		s.daemon.says(strings.ReplaceAll(s.with(rest), " | ", "\n"))
	case "said": // so far
		found.err = s.daemon.err.String()
	case "reload":
		in(s.daemon.cmd.Process.Signal(unix.SIGHUP))
	case "ends": // serve ends well; what it said but for what it watches
		found = s.daemon.ends(unix.SIGTERM)
	default:
		s.t.Fatalf("%s: no such line", s.line)
	}
	return found
}
