package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/sandbox"
	"github.com/shapectl/shapectl/internal/testenv"
)

// A sandbox gives each packet of a trace what 'shapectl replay' gives it: on the traces beside the repository, and on
// those that tests have.
func TestSandboxAsReplay(t *testing.T) {
	testenv.Root(t)
	r := &rig{t: t}
	traces := map[string]string{} // limit and CSV, by name
	add := func(name, csv string, rate, capacity uint64) {
		traces[fmt.Sprintf("%s %dbit %db", name, rate, capacity)] = csv
	}
	burst, err := os.ReadFile("testdata/traces/burst.csv")
	testenv.Must(t, err)
	add("burst", string(burst), 8_000_000, 3000)
	for _, v := range testenv.Vectors(t) {
		var csv strings.Builder
		for _, s := range v.Steps(t) {
			fmt.Fprintf(&csv, "%d,%d\n", s.Now, s.Bytes)
		}
		add(v.Name, csv.String(), v.Rate, v.Capacity)
	}
	for name, csv := range traces {
		var rate, capacity string
		fmt.Sscanf(name, "%s %s %s", new(string), &rate, &capacity)
		path := filepath.Join(t.TempDir(), "trace.csv")
		testenv.Must(t, os.WriteFile(path, []byte(csv), 0o644))
		result, err := sandbox.Run(sandbox.Request{
			Limit: map[string]string{"rate": rate, "capacity": capacity, "algorithm": "leaky", "penalty": "fill"}, Trace: csv,
		})
		testenv.Must(t, err)
		for i, flags := range []string{"--algorithm gcra", "--algorithm leaky --penalty fill", "--algorithm leaky --excess delay"} {
			args := append([]string{"replay", path, "-j", "--rate", rate, "--capacity", capacity}, strings.Fields(flags)...)
			lines := strings.Split(strings.TrimSuffix(r.ok(args...), "\n"), "\n")
			p := result.Limits[i].Packets
			if len(lines) != len(p.TimeNS) {
				t.Fatalf("%s %s: %d packets, want %d", name, flags, len(p.TimeNS), len(lines))
			}
			for n, want := range lines {
				depart := "null"
				if at := p.DepartNS[n]; at != nil {
					depart = fmt.Sprint(*at)
				}
				got := fmt.Sprintf(`{"time_ns":%d,"bytes":%d,"verdict":"%s","depart_ns":%s,"level_bytes":%d,"conforms":%v}`,
					p.TimeNS[n], p.Bytes[n], p.Verdict[n], depart, p.AfterBytes[n], p.Conforms[n])
				if got != want {
					t.Fatalf("%s %s, packet %d:\n%s, want\n%s", name, flags, n+1, got, want)
				}
			}
		}
	}
}
