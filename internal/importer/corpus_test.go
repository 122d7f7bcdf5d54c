package importer

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

var corpus = flag.String("corpus", "", "import what the kernel's tc tests in this directory set up")

// A corpusCase is a test of the kernel's tc-testing. A command may be a list: the command, and its exit codes.
type corpusCase struct {
	ID    string
	Setup []any
	Test  string `json:"cmdUnderTest"`
}

var (
	limiters = regexp.MustCompile(`(?m)^qdisc tbf |^qdisc cake .*(bandwidth \d|autorate)|^class htb |police 0x`)
	policers = regexp.MustCompile(`police 0x([0-9a-f]+) `)
	classes  = regexp.MustCompile(`(?m)^class htb (\S+) `)
	// words of a command that change its limit, and how an import reports them
	words = map[string]reason{
		" peakrate ": counted, " linklayer atm ": counted, " overhead 300 ": counted, " pkts_rate ": oddPolicer, " mtu 1k ": sized,
		" cake bandwidth 1000 ": outside, " autorate-ingress ": adaptive, " conform-exceed pass/pipe ": oddPolicer, " continue ": oddPolicer,
	}
)

// Each test of the kernel's tc-testing is set up in a namespace of its own, and what it leaves in force is imported: each limiter
// that tc shows becomes a rule or pool, or is reported. scripts/judges.sh runs it on a kernel that has all qdiscs and actions.
func TestCorpus(t *testing.T) {
	if *corpus == "" {
		return
	}
	var all strings.Builder
	for _, name := range []string{"actions/police", "qdiscs/htb", "qdiscs/tbf", "qdiscs/cake"} {
		text, err := os.ReadFile(filepath.Join(*corpus, name+".json"))
		testenv.Must(t, err)
		var cases []corpusCase
		testenv.Must(t, json.Unmarshal(text, &cases))
		for _, c := range cases {
			t.Run(name+"/"+c.ID, func(t *testing.T) { fmt.Fprintf(&all, "%s %s: %s\n", name, c.ID, c.imported(t)) })
		}
	}
	golden(t, "tc/corpus.golden", all.String())
}

// imported sets a test up, and returns what becomes of its limits: as they are, and with a filter for each policer and class.
func (c corpusCase) imported(t *testing.T) (result string) {
	const device = "dummy1"
	testenv.NewNetns(t)
	testenv.AddLink(t, &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: device}})
	sh := func(line string) (string, error) {
		line = strings.NewReplacer("$TC", "tc", "$IP", "ip", "$DUMMY", device).Replace(line)
		out, err := exec.Command("sh", "-c", line).CombinedOutput()
		return string(out), err
	}
	must := func(line string) string {
		out, err := sh(line)
		if err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
		return out
	}
	for _, line := range append(c.Setup, c.Test) {
		if list, ok := line.([]any); ok {
			line = list[0]
		}
		sh(line.(string)) // some must fail
	}
	const show = "$TC qdisc show dev $DUMMY; $TC class show dev $DUMMY; "
	for _, filters := range []bool{false, true} {
		if filters {
			must("$TC qdisc add dev $DUMMY clsact")
			n, flags := 0, ""
			if strings.HasSuffix(c.Test, " skip_hw") {
				flags = "skip_hw" // of a policer and its filters
			}
			filter := func(at, action string) {
				n++
				must(fmt.Sprintf("$TC filter add dev $DUMMY %s protocol ip pref %d flower %s dst_ip 10.0.0.%[2]d %[4]s", at, n, flags, action))
			}
			for _, p := range policers.FindAllStringSubmatch(must("$TC actions list action police"), -1) {
				index, err := strconv.ParseUint(p[1], 16, 32)
				testenv.Must(t, err)
				filter("egress", fmt.Sprintf("action police index %d", index))
			}
			for _, class := range classes.FindAllStringSubmatch(must(show), -1) {
				filter("parent 1:", "classid "+class[1])
			}
		}
		shown := must(show + "$TC filter show dev $DUMMY; $TC filter show dev $DUMMY egress")
		dump, err := ReadTC(device, testenv.Link(t, device).Attrs().Index, 14)
		testenv.Must(t, err)
		i, err := TC([]Dump{dump}, "")
		testenv.Must(t, err)
		transcript(t, i)
		result = summary(i)
		there := len(limiters.FindAllString(shown, -1))
		if told := i.Rules() + len(i.Left); there > told {
			t.Errorf("%d limiters, but %d rules and reports: %s\n%s", there, told, result, shown)
		}
		for word, r := range words {
			if there > 0 && filters && strings.Contains(c.Test+" ", word) && !strings.Contains(result, r.Kind) {
				t.Errorf("'%s' is lost: %s\n%s", c.Test, result, shown)
			}
		}
	}
	return result
}

// summary returns the limits of an import, and the kinds of what is left.
func summary(i Imported) string {
	var all []string
	for _, t := range i.Tables {
		for _, r := range t.Rules {
			text := fmt.Sprintf("%v %d", r.Rate, r.Capacity)
			if r.Within != "" {
				text = "within it"
			}
			if r.Framing != (policy.Framing{}) {
				text += fmt.Sprintf(" overhead %d mpu %d", r.Framing.Overhead, r.Framing.MPU)
			}
			all = append(all, text)
		}
	}
	for _, l := range i.Left {
		all = append(all, l.Kind)
	}
	if all == nil {
		return "no limit"
	}
	return strings.Join(all, "; ")
}
