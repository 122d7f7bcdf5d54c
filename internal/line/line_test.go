package line

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

var update = flag.Bool("update", false, "write the policies that are made now into testdata")

// docsis is a line whose hosts have their own addresses.
func docsis() Line {
	return Line{
		Device: "eth0", Link: "docsis", Share: policy.ShareHost, Command: "shapectl line eth0 --down 50mbit --up 10mbit --link docsis",
		Up:   Direction{Rate: 10_000_000, Match: policy.MatchSrc},
		Down: Direction{Rate: 50_000_000, Match: policy.MatchDst},
	}
}

// slow is a line that has all that a policy may say besides.
func slow() Line {
	return Line{
		Device: "ppp*0", Share: policy.ShareFlow, Why: "The hosts cannot be told apart", Command: "shapectl line 'ppp*0'",
		Up:   Direction{Rate: 400_000, Match: policy.MatchDst, Min: 100_000},
		Down: Direction{Down: true, Rate: 16_000_000, Match: policy.MatchSrc, Drops: true, Why: "Excess packets cannot be queued: ppp0 has no Ethernet header"},
	}
}

func tables(t *testing.T, text []byte, devices ...string) []policy.Table {
	t.Helper()
	f, err := policyfile.Parse("line.yaml", text)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if w := f.Warnings(); len(w) > 0 {
		t.Errorf("warnings: %v", w)
	}
	var all []policyfile.Device
	for _, name := range devices {
		all = append(all, policyfile.Device{Name: name, L2Bytes: 14})
	}
	tables, absent, err := f.Tables(all)
	if err != nil || len(absent) > 0 {
		t.Fatalf("%v, absent: %v", err, absent)
	}
	return tables
}

// The policies are as in testdata, and are valid.
func TestPolicy(t *testing.T) {
	down := docsis()
	down.Up = Direction{}
	for name, l := range map[string]Line{"docsis": docsis(), "slow": slow(), "down": down} {
		text, err := l.Policy()
		if err != nil {
			t.Fatal(err)
		}
		file := "testdata/" + name + ".yaml"
		if *update {
			if err := os.WriteFile(file, text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if want, err := os.ReadFile(file); err != nil || string(want) != string(text) {
			t.Errorf("%s differs (go test -update writes it anew): %v\n%s", file, err, text)
		}
		pools, rules := 0, 0
		for _, table := range tables(t, text, l.Device) {
			for _, r := range table.Rules {
				if r.Pool {
					pools++
				} else if rules++; r.Rate != policy.Unlimited || r.Within == "" {
					t.Errorf("%s: rule %v has the rate %v and is within %q", name, r.Prefix, r.Rate, r.Within)
				}
			}
		}
		if want := strings.Count(string(text), "pool:"); pools != want || rules != 2*want {
			t.Errorf("%s: %d pools, %d rules, and %d directions", name, pools, rules, want)
		}
	}
}

func TestPoolRate(t *testing.T) {
	for rate, want := range map[policy.Rate]policy.Rate{
		10_000_000: 9_500_000, 1_000_001: 950_000, 8_000: 8_000, policy.MaxRate: policy.MaxRate / 100 * 95, 101: policy.MinRate, 1_000_099: 950_094,
	} {
		if d := (Direction{Rate: rate}); d.PoolRate() != want {
			t.Errorf("of %v it is %v, want %v", rate, d.PoolRate(), want)
		}
	}
}
