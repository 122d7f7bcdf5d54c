package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// transcript runs command lines, and is what a terminal would show of them.
// Two kinds of number are blotted out: how long to wait, and the Go version.
func (r *rig) transcript(lines ...string) string {
	r.t.Helper()
	var s strings.Builder
	for _, line := range lines {
		if packets, is := strings.CutPrefix(line, "# send "); is {
			var to string
			var count, bytes int
			if _, err := fmt.Sscan(packets, &to, &count, &bytes); err != nil {
				r.t.Fatal(err)
			}
			r.send(to, count, bytes)
			fmt.Fprintln(&s, line)
			continue
		}
		if rule, is := strings.CutPrefix(line, "# unheld "); is {
			r.setUnheld(rule)
			fmt.Fprintln(&s, line)
			continue
		}
		got := r.run(strings.Fields(line)...)
		fmt.Fprintf(&s, "$ shapectl %s\n%s", line, got.out)
		if got.err != "" {
			fmt.Fprintf(&s, "2> %s", got.err)
		}
		if got.code != 0 {
			fmt.Fprintf(&s, "exit %d\n", got.code)
		}
	}
	return volatile.ReplaceAllString(s.String(), "$1…")
}

var volatile = regexp.MustCompile(`(\bgo|layout |"layout": "|"wait_ns": )(?:[0-9][0-9a-z.µ]*|[0-9a-f]{16})`)

// What the commands print, as a manual would show it. Buckets are empty or
// drain at once, so that no level depends on the clock.
func TestTranscripts(t *testing.T) {
	for name, lines := range map[string][]string{
		"text": {
			"version",
			"show",
			"set va egress 10.0.0.0/24 --rate 10mbit",
			"set va egress 10.0.0.0/24 --rate 10mbit --each host --capacity 100ms",
			"set va egress 10.0.0.9 --rate unlimited",
			"set va egress 2001:db8::/32 --rate 1.5MB/s --each /64 --excess ecn --algorithm leaky --capacity 64kb",
			"set va egress 10.1.0.0/16 --rate 8kbit --capacity 3000 --algorithm leaky --penalty 30s --fail closed",
			"set va egress 10.2.0.0/16 --rate 400gbit --capacity 1gb --each flow --overhead 24 --mpu 64 --excess pass",
			"set va ingress 0.0.0.0/0 --cir 1gbit --cbs 1mb",
			"show",
			"show va ingress",
			"show va egress 10.0.0.9",
			"show --sentences",
			"show 10.0.0.9",
			"show 10.0.0.0/8",
			"show 10.1.2.0/24",
			"show --top 2 --sort rate",
			"# send 10.2.0.7 3 1000",
			"# send 10.0.0.9 2 500",
			"show va egress 10.2.0.0/16",
			"show --wide va egress",
			"# unheld va egress 10.3.0.0/16 --rate 400gbit --algorithm leaky --excess delay --capacity 20ms --each host",
			"# unheld va egress 10.4.0.0/16 --rate 400gbit --excess delay --ecn-above never",
			"show va egress 10.3.0.0/16",
			"show va egress 10.4.0.0/16",
			"# send 10.4.0.7 3 1000",
			"show va egress",
			"show --wide va egress",
			"delete va egress 10.0.0.9",
			"delete va egress 10.0.0.9",
			"flush va egress",
			"flush va",
			"flush va",
			"show",
		},
		"json": {
			"version -j",
			"show -j",
			"set va egress 10.0.0.0/24 --rate 10mbit --each host --capacity 100ms",
			"set va egress 10.0.0.9 --rate unlimited",
			"show -j --buckets",
			"# unheld va egress 10.3.0.0/16 --rate 400gbit --algorithm leaky --excess delay --capacity 20ms",
			"# unheld va egress 10.4.0.0/16 --rate 400gbit --excess delay --queue 64kb --ecn-above never",
			"show -j va egress 10.3.0.0/16",
			"show -j va egress 10.4.0.0/16",
			"delete -j va egress 10.0.0.9",
			"flush va",
			"flush -j va",
		},
		"colours": {
			"set va egress 10.0.0.0/24 --rate 10mbit --algorithm trtcm --pir 20mbit",
			"set va egress 10.0.1.0/24 --rate 400gbit --algorithm rfc4115 --eir 5mbit --ebs 0 --colour-aware --red dscp:LE --shadow rate=5mbit --each host",
			"set va egress 10.0.2.0/24 --rate 10mbit --algorithm srtcm --yellow ecn",
			"set va egress 10.0.3.0/24 --rate 10mbit",
			"# send 10.0.1.7 3 1000",
			"show",
			"show --wide",
			"show --sentences",
			"show --shadow",
			"show va egress 10.0.1.0/24",
			"show -j va egress 10.0.1.0/24",
			"flush va",
		},
		"pools": {
			"show --pools",
			"set uplink --new --rate 1gbit --share member",
			"set ap-1 --new --rate 100mbit --within uplink --guarantee 20mbit",
			"set ap-1 --rate 150mbit",
			"set va egress 10.0.0.7 --rate 20mbit --within ap-1 --guarantee 5mbit --name alice",
			"set va egress 2001:db8:7::/48 --within ap-1",
			"set va ingress 10.0.0.0/24 --rate 1mbit",
			"# send 10.0.0.7 3 1000",
			"show",
			"show --tree",
			"show --wide",
			"show ap-1",
			"show 10.0.0.7 --tree",
			"show --pools ap-1",
			"show --pools -j uplink",
			"show va egress 10.0.0.7",
			"set va egress 10.0.0.8 --within ap-2",
			"set va egress 10.0.0.8 --rate 20mbit --within ap-1 --guarantee 16mbit",
			"set uplink --within ap-1",
			"delete ap-1",
			"flush va",
			"delete ap-1",
			"flush --all",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			golden(t, name+".golden", r.transcript(lines...))
		})
	}
}

// Help fits a terminal, and is the same each time and either way. Of its layout there are samples; the manual pages have all texts.
func TestHelp(t *testing.T) {
	r := &rig{t: t, env: map[string]string{}}
	root := (&env{}).command()
	samples := []string{"", "set", "serve", "queue", "import csv"}
	shown := map[string]string{}
	for _, cmd := range append(allCommands(root), root.Commands()...) {
		name := strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "shapectl"), " ")
		args := append(strings.Fields(name), "--help")
		shown[name] = r.ok(args...)
		if again := r.ok(args...); again != shown[name] {
			t.Errorf("%v is not stable", args)
		}
		if viaHelp := r.ok(append([]string{"help"}, strings.Fields(name)...)...); viaHelp != shown[name] {
			t.Errorf("help %s differs from %s --help", name, name)
		}
		for _, columns := range []int{usualWidth, 2 * widestHelp} {
			r.env["COLUMNS"] = fmt.Sprint(columns)
			for line := range strings.Lines(r.ok(args...)) {
				if width := len(strings.TrimSuffix(line, "\n")); width > min(columns, widestHelp) && !strings.HasPrefix(line, "  ") {
					t.Errorf("%s --help: a line of %d columns: %s", name, width, line)
				}
			}
			delete(r.env, "COLUMNS")
		}
	}
	var all strings.Builder
	for _, name := range samples {
		fmt.Fprintf(&all, "$ shapectl help %s\n%s\n", name, shown[name])
	}
	golden(t, "help.golden", all.String())
}

// Completion asks shapectl, and executes nothing else of a line that is not complete.
func TestCompletionExecutesNothing(t *testing.T) {
	r := newRig(t)
	for shell, complete := range map[string]string{
		"bash": `shapectl() { touch asked; }; . ./script; words=(shapectl show "$word" ''); __shapectl_get_completion_results`,
		"zsh":  `compdef() { :; }; shapectl() { touch asked; }; . ./script; words=(shapectl show "$word" ''); CURRENT=4; _shapectl`,
		"fish": `function shapectl; touch asked; end; source ./script; complete -C "shapectl show $word "`,
	} {
		t.Run(shell, func(t *testing.T) {
			if _, err := exec.LookPath(shell); err != nil {
				testenv.Skip(t, err.Error())
			}
			for word, asks := range map[string]bool{
				"'e*'": true, `"a;touch run"`: true, "'a;touch run'": true,
				"$(touch run)": shell == "fish", `"$(touch run)"`: shell == "fish", "'$(touch run)'": shell == "fish", "`touch run`": shell == "fish",
			} {
				dir := t.TempDir()
				testenv.Must(t, os.WriteFile(filepath.Join(dir, "script"), []byte(r.ok("completion", shell)), 0o600))
				cmd := exec.Command(shell, "-c", complete)
				cmd.Dir, cmd.Env = dir, append(os.Environ(), "HOME="+dir, "word="+word)
				out, _ := cmd.CombinedOutput()
				for name, want := range map[string]bool{"asked": asks, "run": false} {
					if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != want {
						t.Errorf("%s: file %q: %v; %s", word, name, err, out)
					}
				}
			}
		})
	}
}

// state is every byte of the maps of va's rules on egress.
func (r *rig) state() (all []byte) {
	r.t.Helper()
	n, err := loader.Read(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(r.t, err)
	defer n.Close()
	h, err := n.Find("va", policy.Egress)
	testenv.Must(r.t, err)
	defer h.Close()
	names := []string{}
	for name := range h.Set.Store.Replacements() {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		m := h.Set.Store.Replacements()[name]
		if m.Type() == ebpf.Hash || m.Type() == ebpf.ArrayOfMaps || m.Type() == ebpf.ProgramArray {
			continue // labels, which no packet sees; listeners; programs
		}
		if m.Type() == ebpf.LRUHash {
			var key bpf.AbiAffectedKey
			var value bpf.AbiAffected
			for entries := m.Iterate(); entries.Next(&key, &value); {
				all = fmt.Appendf(all, "%+v %+v\n", key, value)
			}
			continue
		}
		size := int(m.ValueSize()) * int(m.MaxEntries())
		memory, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil { // the settings, which are frozen and never change
			if name != ".rodata" {
				r.t.Fatalf("map %s: %v", name, err)
			}
			continue
		}
		all = append(all, memory...)
		testenv.Must(r.t, unix.Munmap(memory))
	}
	return all
}
