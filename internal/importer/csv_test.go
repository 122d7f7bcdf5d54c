package importer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
		header + "A,10.0.0.1,1,1,0,,1\n":       "f:2:16: quota",
		header + "A,10.0.0.1,1,1,5gb,,\n":      "f:2:16: nothing says what comes after the quota",
	} {
		_, err := CSV(File{"f", strings.NewReader(text)}, CSVOptions{Device: "eth1"})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	i, err := CSV(File{"f", strings.NewReader(header + "A,10.0.0.1,1,1,,,\nB,10.0.0.2,1,1,5gb,,\n")}, CSVOptions{Device: "eth1", SkipBad: true})
	if err != nil || i.Rules() != 2 || len(i.Left) != 1 || i.Left[0].reason != skipped {
		t.Errorf("%+v %v", i, err)
	}
}

// A pool within itself is reported, not followed for ever.
func TestCSVLoop(t *testing.T) {
	i, err := CSV(File{"f", strings.NewReader("name,ip,down,up,pool\nA,,1,1,B\nB,,1,1,A\nC,10.0.0.1,1,1,C\n")}, CSVOptions{Device: "eth1"})
	if err != nil || i.Pools() != 2 || len(i.Left) != 1 || i.Left[0].reason != unknownPool {
		t.Errorf("%+v %v", i, err)
	}
	if within := i.Tables[0].Rules[0].Within; within != "" && within != policy.Within("B") {
		t.Errorf("within %s", within)
	}
}
