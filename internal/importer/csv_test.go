package importer

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

func TestCSV(t *testing.T) {
	f, err := os.Open(filepath.Join("testdata", "csv", "customers.csv"))
	testenv.Must(t, err)
	defer f.Close()
	imported, err := CSV(File{"customers.csv", f}, CSVOptions{Device: "eth1", Then: 1e6})
	testenv.Must(t, err)
	golden(t, "csv/customers.golden", transcript(t, imported))
}

// What cannot be read is an error of its line, and of --skip-bad a line of the report.
func TestBadCSV(t *testing.T) {
	const header = "name,ip,down,up,quota,period,then\n"
	for text, want := range map[string]string{
		"name,ip,down\n":                       "f:1:1: there is no column upload;",
		"name,down,up\n":                       "f:1:1: there is no column address;",
		"down,ip,download,up\n":                "the column",
		header + "A,10.0.0.1,fast,1,,,\n":      `f:2:12: down "fast" is not a number of megabits per second`,
		header + "A,10.0.0,1,1,,,\n":           "f:2:3: ",
		header + "A,10.0.0.1,1,1,5gb,year,1\n": `f:2:16: quota "5gb/year" has no period that is known`,
		header + "A,10.0.0.1,1,1,0,,1\n":       `f:2:16: quota "0gb" is not a whole number of bytes above 0; write one such as 100gb; none, unlimited or an empty cell mean no quota`,
		header + "A,10.0.0.1,1,1,5gb,,\n":      "f:2:16: nothing says what comes after the quota",

		// No quota or limit gets lost.
		header + "A,10.0.0.1,2,1,5gb,,5\n":                        `f:2:12: the pool of "A" has the sum of both rates: then 5mbit is above the rate 3mbit; lower it`,
		header + "A,10.0.0.1,400000,1,5gb,,5\n":                   `f:2:12: the pool of "A" has the sum of both rates: rate 400.001gbit is above`,
		header + "A,10.0.0.1,,,5gb,,drop\n":                       `f:2:12: the pool of "A" has the sum of both rates: rate 0 is zero`,
		header + "A,10.0.0.1,99999999999999,1,,,\n":               `f:2:12: down "99999999999999" is too small or too large; rates are 8kbit to 400gbit, and`,
		header + "A,10.0.0.1,1,0.1k,,,\n":                         `f:2:14: up "0.1k" is too small or too large`,
		header + "A,10.0.0.1,1,1,5gb,,99999999\n":                 `f:2:21: then "99999999" is too small or too large`,
		header + "A,10.0.0.1,1,1,5gb,,fast\n":                     `f:2:21: then "fast" is neither a rate such as 5mbit nor drop`,
		header + "A,10.0.0.1,1,1,5gb/week,day,1\n":                "f:2:25: the period is day, but that of the quota week; remove one",
		header + "A,10.0.0.1,1,1,5gb,,1\nA,10.0.0.2,1,1,5gb,,1\n": `f:3:1: the name "A" was in line 2;`,
		header + "A,,1,1,,,\nA,10.0.0.2,1,1,5gb,,1\n":             `f:3:1: the name "A" was in line 2;`,
		header + "A,10.0.0.1,1,1,,,\nB,10.0.0.1,1,1,5gb,,1\n":     "f:3:3: 10.0.0.1 was in line 2;",
		"name,ip,down,up,qouta,then\nA,10.0.0.1,1,1,5gb,1\n":      `f:1:17: unknown column "qouta"; did you mean "quota"?`,
		"name,ip,down,up,then\nA,10.0.0.1,1,1,1\n":                "f:1:17: then or period without quota",
		header + "A down,10.0.0.1,1,1,,,\n":                       `f:2:1: the name "A down" ends as those of the pools`,
	} {
		_, err := CSV(File{"f", strings.NewReader(text)}, CSVOptions{Device: "eth1"})
		if mistakes, _ := errors.AsType[policyfile.Errors](err); len(mistakes) != 1 || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := CSV(File{"f", strings.NewReader("ip,down,up\n10.0.0.1,1,1\n")}, CSVOptions{Device: "eth1", Then: 1e6}); err == nil {
		t.Error("--then without a column quota")
	}
	i, err := CSV(File{"f", strings.NewReader(header + "C,10.0.0.3,2,1,5gb/day,daily,3\nA,10.0.0.1,1,1,,,\nB,10.0.0.2,1,1,5gb,,\n")}, CSVOptions{Device: "eth1", SkipBad: true})
	if err != nil || i.Rules() != 4 || i.Pools() != 1 || len(i.Left) != 1 || i.Left[0].reason != skipped {
		t.Errorf("%+v %v", i, err)
	}
}

// A pool within itself is reported, not followed for ever, and so is one that limits nobody.
func TestCSVLoop(t *testing.T) {
	i, err := CSV(File{"f", strings.NewReader("name,ip,down,up,pool\nA,,1,1,B\nB,,1,1,A\nC,10.0.0.1,1,1,C\nD,,1,1,\n")}, CSVOptions{Device: "eth1"})
	if err != nil || i.Pools() != 3 || len(i.Left) != 3 || i.Left[1].reason != unknownPool || i.Left[2].reason != noAddress {
		t.Errorf("%+v %v", i, err)
	}
	if within := i.Tables[0].Rules[0].Within; within != "" && within != policy.Within("B") {
		t.Errorf("within %s", within)
	}
}
