package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// hostileDevices are names that the kernel lets devices have.
var hostileDevices = []string{
	"\x1b[31mred\x01\x08\x7f", "\u202eb\u2066\u2028\ufeff", "\u009b2J\u0085\U0001d173", "$(reboot);`x`", "-n", "a'b\"c\\d", "\"\x1b\\$`'#*&",
}

// notUTF8 is one that no JSON and no policy can have.
const notUTF8 = "\xff\xfe\x9bbad"

// isPlain fails the test unless a terminal shows all of a text, and does nothing else.
func isPlain(t *testing.T, what, text string) {
	t.Helper()
	for i, c := range text {
		if c == utf8.RuneError && !strings.HasPrefix(text[i:], "\ufffd") || unicode.IsControl(c) && c != '\n' ||
			unicode.In(c, unicode.Bidi_Control, unicode.Cf, unicode.Zl, unicode.Zp) {
			t.Errorf("%s: there is %U in %q", what, c, text)
			return
		}
	}
}

// tried runs a command line, of which all that it prints must be plain.
func (r *rig) tried(args ...string) result {
	r.t.Helper()
	got := r.run(args...)
	what := fmt.Sprintf("shapectl %q", args)
	isPlain(r.t, what, got.out)
	isPlain(r.t, what, got.err)
	for _, arg := range args {
		if arg == "-j" && got.out != "" && !json.Valid([]byte(got.out)) {
			r.t.Errorf("%s: no JSON: %q", what, got.out)
		}
	}
	return got
}

// Devices may be called anything but what has a slash or white space in it.
func TestHostileDevices(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.env["SHAPECTL_HOOK"] = "clsact" // so that a limit can be taken off behind our back
	for i, name := range append(hostileDevices, notUTF8) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		testenv.AddLink(t, &netlink.Veth{LinkAttrs: attrs, PeerName: fmt.Sprintf("peer%d", i)})
		must := func(code int, args ...string) result {
			t.Helper()
			got := r.tried(args...)
			if got.code != code {
				t.Errorf("shapectl %q: exit %d: %s", args, got.code, got.err)
			}
			return got
		}
		dashed := func(args ...string) []string { // so that it is no flag
			at := len(args)
			for j, arg := range args {
				if arg == name {
					at = j
				}
			}
			return append(append(append([]string{}, args[:at]...), "--"), args[at:]...)
		}
		rule := []string{"--rate", "1mbit", "--shadow", "rate=500kbit", name, "egress", "10.0.0.0/24"}
		must(exitDone, dashed(append([]string{"set"}, rule...)...)...)
		for _, command := range []string{"show", "show --wide", "show --shadow", "show --buckets", "doctor"} {
			for _, j := range []string{"", "-j"} {
				if got := r.tried(dashed(append(strings.Fields(command+" "+j), name)...)...); got.out == "" || got.code != exitDone && got.code != exitDegraded {
					t.Errorf("%s %s of %q: %+v", command, j, name, got)
				}
			}
		}
		for _, command := range []string{"explain", "explain -j"} {
			must(exitDone, dashed(append(strings.Fields(command), name, "egress", "10.0.0.7")...)...)
		}
		r.tried("explain", "10.0.0.7")
		r.tried(dashed("import", "tc", name)...)
		must(exitInput, dashed("show", name, "sideways")...)
		must(exitInput, dashed("show", name, "egress", "10.9.9.9")...)
		must(exitInput, dashed("set", name, "ingress", "10.0.0.0/24", "--rate", "1mbit")...) // behind the --, flags are none
		if name == notUTF8 {
			must(exitDegraded, "export")
		} else {
			var rules []shownRule
			testenv.Must(t, json.Unmarshal([]byte(must(exitDone, "show", "-j").out), &rules))
			if len(rules) != 1 || rules[0].Device != name {
				t.Errorf("show -j: %q is %+v", name, rules)
			}
			r.roundTrip(name)
		}
		must(exitDone, dashed("delete", name, "egress", "10.0.0.0/24")...)
		must(exitDone, dashed("delete", name, "egress", "10.0.0.0/24")...)
		must(exitDone, dashed(append([]string{"set", "-j"}, rule...)...)...)
		device := testenv.Link(t, name)
		suggests := func(pattern, shell string) {
			t.Helper()
			got := r.tried(dashed("doctor", "-v", name)...)
			suggested := regexp.MustCompile(pattern).FindStringSubmatch(strings.Join(strings.Fields(got.out), " "))
			if suggested == nil {
				t.Errorf("doctor of %q suggests no %s: %s", name, pattern, got.out)
				return
			}
			command := suggested[1]
			if strings.HasPrefix(command, "'") { // then there are no others in it
				command = strings.Trim(command, "'")
			}
			out, err := exec.Command("sh", "-c", shell+command).CombinedOutput()
			if err != nil || string(out) != name {
				t.Errorf("sh makes %q of %s, which is for %q: %v", out, suggested[1], name, err)
			}
		}
		testenv.Must(t, netlink.QdiscDel(clsactQdisc(device)))
		suggests(`or ('?shapectl flush .*? egress'?)`, `shapectl() { shift; [ "$1" = -- ] && shift; printf '%s' "$1"; }; `)
		must(exitDone, dashed("flush", name)...)
		testenv.Must(t, netlink.LinkDel(device))
		if len(r.show()) > 0 {
			t.Fatalf("rules are left: %+v", r.show())
		}
	}
}

// A device that a policy file cannot name keeps no other from being exported.
func TestExportWithoutADevice(t *testing.T) {
	r := newRig(t)
	for i, name := range []string{notUTF8, notUTF8 + "2"} {
		testenv.Must(t, addVeth(name, fmt.Sprintf("peer%d", i)))
		r.ok("set", name, "egress", "10.0.0.0/24", "--rate", "2mbit")
	}
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	got := r.tried("export")
	if got.code != exitDegraded || got.out != "devices:\n  va:\n    egress:\n      10.0.0.0/24: 1mbit\n" || strings.Count(got.err, "\n") != 1 ||
		!strings.Contains(got.err, `the policy lacks rules: the name of device "\xff\xfe\x9bbad" is not UTF-8`) || !strings.Contains(got.err, `; the name of device "\xff\xfe\x9bbad2"`) {
		t.Errorf("%+v", got)
	}
}

// roundTrip exports the rules of a device, and applies that.
func (r *rig) roundTrip(name string) {
	r.t.Helper()
	text := r.tried("export").out
	file := r.policy(text)
	if got := r.tried("diff", file); got.code != exitDone || got.out != "nothing to change\n" {
		r.t.Errorf("diff of %q: %+v", text, got)
	}
	if got := r.tried("apply", file); got.out != "nothing to change\n" {
		r.t.Errorf("apply of %q: %+v", text, got)
	}
	for _, j := range []string{"-j=true", "-j=false"} {
		none := r.policy("devices: {}\n")
		if got := r.tried("apply", j, none); got.code != exitDone {
			r.t.Errorf("apply of none: %+v", got)
		}
		if got := r.tried("apply", j, file); got.code != exitDone {
			r.t.Errorf("apply of %q: %+v", text, got)
		}
		if got := r.tried("diff", j, none); got.code != exitDiffers {
			r.t.Errorf("diff: %+v", got)
		}
	}
	var did report.Applied
	if err := json.Unmarshal([]byte(r.tried("rollback", "-j").out), &did); err != nil || len(did.Hooks) != 1 || did.Hooks[0].Device != name {
		r.t.Errorf("rollback of %q: %+v, %v", name, did, err)
	}
	r.tried("apply", file)
}

// Policies, files of other tools and their names may hold anything.
func TestHostileText(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	dir := t.TempDir()
	for i, evil := range append(hostileDevices, notUTF8, "a\nshapectl: all is well", "a\r\nb\t\v\f", "\n") {
		for _, args := range [][]string{
			{evil}, {"show", evil}, {"show", "va", evil}, {"show", "va", "egress", evil}, {"show", "-n", evil}, {"flush", evil}, {"doctor", evil}, {"explain", evil},
			{"explain", "va", "egress", evil}, {"explain", "va", "egress", "10.0.0.7", "--flow", evil}, {"import", evil}, {"import", "tc", evil}, {"completion", evil}, {"help", evil},
			{"set", "va", "egress", "10.0.1.0/24", "--rate", evil}, {"set", "va", "egress", "10.0.1.0/24", "--rate", "1mbit", "--shadow", evil},
			{"set", "va", "egress", "10.0.1.0/24", "--rate", "1mbit", "--capacity", evil}, {"set", evil, "egress", "10.0.1.0/24", "--rate", "1mbit"},
			{"apply", filepath.Join(dir, evil)}, {"apply", r.policy("devices: {}\n"), "--last-good", dir + "/" + evil + "/x/y"},
			{"replay", filepath.Join(dir, evil), "--rate", "1mbit"}, {"delete", "va", "egress", evil}, {"--" + evil},
		} {
			got := r.tried(args...)
			if got.code == exitDone && args[0] != "--" && args[0] != "apply" && got.out == "" {
				t.Errorf("shapectl %q: nothing is said: %+v", args, got)
			}
			for _, line := range strings.Split(strings.TrimSuffix(got.err, "\n"), "\n") {
				if got.err != "" && !strings.HasPrefix(line, "shapectl: ") || strings.HasPrefix(line, "shapectl: all is well") {
					t.Errorf("shapectl %q: a line of its own: %q", args, line)
				}
			}
		}
		r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit") // the policies above have none

		// In double quotes YAML says all; Go's escapes are its own, but for bytes.
		key := strings.ReplaceAll(fmt.Sprintf("%+q", evil), `\x`, `\u00`)
		for _, text := range []string{
			"devices: {" + key + ": {egress: {10.0.0.0/24: 1mbit}}}", "devices: {va: {egress: {10.0.0.0/24: " + key + "}}}", "devices: {va: {egress: {" + key + ": 1mbit}}}",
			"plans: {" + key + ": 1mbit, gold: {rate: 1mbit, each: " + key + "}}\ndevices: {va: {egress: {10.0.0.0/24: gold, 10.0.1.0/24: " + key + "}}}",
			key + ": {}", "devices: {va: {" + key + ": {}}}", "devices:\n  va: # " + evil + "\n    egress: {10.0.0.0/24: 1mbit}\n  " + evil + ": {}\n", evil,
		} {
			file := r.policy(text + "\n")
			for _, args := range [][]string{{"diff", file}, {"diff", "-j", file}, {"apply", "--absent-ok", file}, {"show"}, {"show", "-j"}} {
				got := r.tried(args...)
				for _, line := range strings.Split(got.err, "\n") {
					if strings.HasPrefix(line, "shapectl: all is well") {
						t.Errorf("shapectl %q of %q: a line of its own: %q", args, text, line)
					}
				}
			}
		}

		// What other tools call things.
		var quoted bytes.Buffer
		testenv.Must(t, json.NewEncoder(&quoted).Encode(evil))
		name := strings.TrimSpace(quoted.String())
		csv := "Circuit ID,Circuit Name,Device ID,Device Name,Parent Node,MAC,IPv4,IPv6,Download Min Mbps,Upload Min Mbps,Download Max Mbps,Upload Max Mbps,Comment\n"
		cell := `"` + strings.ReplaceAll(evil, `"`, `""`) + `"`
		csv += fmt.Sprintf("%[1]s,%[1]s,1,%[1]s,%[1]s,,10.0.0.%[2]d,,1,1,2,2,%[1]s\n%[1]s,%[1]s,1,x,,,10.0.1.%[2]d,,1,1,%[1]s,2,x\n", cell, i)
		common := fmt.Sprintf("name,ip,down,up,quota,then,pool,note,%[1]s\n%[1]s,10.0.0.%[2]d,2,1,%[1]s,1,%[1]s,%[1]s,\n%[1]s,,1,1,5gb,drop,,,\n%[1]s,10.0.1.1,1,1,5gb,drop,%[1]s,%[1]s,\n", cell, i)
		nft := fmt.Sprintf(`{"nftables":[{"table":{"family":"ip","name":%[1]s}},{"chain":{"family":"ip","table":%[1]s,"name":%[1]s,"type":"filter","hook":"forward","policy":"accept"}},
{"rule":{"family":"ip","table":%[1]s,"chain":%[1]s,"handle":4,"comment":%[1]s,"expr":[{"match":{"op":"==","left":{"meta":{"key":"oifname"}},"right":%[1]s}},{"match":{"op":"==","left":{"payload":{"protocol":"ip","field":"daddr"}},"right":"10.0.0.1"}},{"limit":{"rate":1000,"per":"second","rate_unit":"kbytes","inv":true}},{"drop":null}]}},
{"rule":{"family":"ip","table":%[1]s,"chain":%[1]s,"handle":5,"comment":%[1]s,"expr":[{"limit":{"rate":10,"per":"second"}},{"drop":null}]}}]}`, name)
		for kind, text := range map[string]string{"csv": common, "csv ": evil, "libreqos": csv, "nft": nft, "nft ": evil, "libreqos ": evil} {
			file := filepath.Join(dir, fmt.Sprintf("file%d", i))
			testenv.Must(t, os.WriteFile(file, []byte(text), 0o600))
			for _, device := range []string{"va", evil} {
				for _, j := range []string{"", "-j"} {
					args := append([]string{"import"}, strings.Fields(kind+" "+j+" "+file)...)
					got := r.tried(append(args, "--device", device)...)
					if j == "" && got.out != "" {
						if again := r.tried("diff", r.policy(got.out)); again.code == exitInput {
							t.Errorf("import %s with %q makes a policy that is none: %s\n%s", kind, evil, again.err, got.out)
						}
					}
					if j == "-j" && got.out != "" {
						var imported report.Imported
						testenv.Must(t, json.Unmarshal([]byte(got.out), &imported))
						if again := r.tried("diff", r.policy(imported.Policy)); again.code == exitInput {
							t.Errorf("import -j %s with %q makes a policy that is none: %s\n%s", kind, evil, again.err, imported.Policy)
						}
					}
				}
			}
		}
	}
}

// What a device is called is also said while it appears.
func TestHostileNamesWhileWatching(t *testing.T) {
	for _, j := range []string{"", "-j"} {
		r := newRig(t)
		name := "\x1b[31m\u202ex"
		file := r.policy("devices: {\"\\e*\": {egress: {10.0.0.0/24: 1mbit}}}\n")
		args := pageless(file)
		if j != "" {
			args = append(args, j)
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		cmd := r.command(args...)
		out, err := cmd.StdoutPipe()
		testenv.Must(t, err)
		testenv.Must(t, cmd.Start())
		context.AfterFunc(ctx, func() { cmd.Process.Kill() })
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		testenv.AddLink(t, &netlink.Veth{LinkAttrs: attrs, PeerName: "peer"})
		text := make([]byte, 1<<16)
		n, err := out.Read(text)
		testenv.Must(t, err)
		isPlain(t, "serve "+j, string(text[:n]))
		if !strings.Contains(string(text[:n]), `\u001b[31m\u202ex`) {
			t.Errorf("serve %s: %q", j, text[:n])
		}
		stop()
		cmd.Wait()
	}
}

// Only names that a shell takes as they are complete a command line.
func TestHostileNamesAreNotCompleted(t *testing.T) {
	r := newRig(t)
	for i, name := range []string{"$(reboot)", "\x1b[31m", "-x", "a;b"} {
		testenv.Veth(t, name, fmt.Sprintf("peer%d", i))
	}
	got := r.tried("__complete", "show", "")
	for _, want := range []string{"va", "vb", "peer0"} {
		if !strings.Contains(got.out, want+"\n") {
			t.Errorf("%s is not completed: %q", want, got.out)
		}
	}
	if strings.ContainsAny(got.out, "$[;") || strings.Contains(got.out, "-x") {
		t.Errorf("completed are %q", got.out)
	}
}
