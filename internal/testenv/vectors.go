package testenv

import (
	"embed"
	"encoding/json"
	"io/fs"
	"testing"
)

//go:embed testdata/vectors
var vectors embed.FS

// A Trace is a sequence of packets to one bucket, with their exact verdicts.
type Trace struct {
	Name     string
	Rate     uint64 `json:"rate_bits_per_second"`
	Capacity uint64 `json:"capacity_bytes"`
	Columns  []string
	Rows     [][]any `json:"packets"`
}

// A Step is one packet of a trace. Level is rounded to three decimals.
type Step struct {
	Now, Bytes uint64
	Pass       bool
	Level      float64
	Departure  uint64 // from a queue, in ns, rounded down
	Departs    bool   // whether the trace has a departure
}

// Vectors returns traces whose verdicts were found by rational arithmetic.
func Vectors(tb testing.TB) []Trace {
	tb.Helper()
	var traces []Trace
	names, err := fs.Glob(vectors, "testdata/vectors/*.json")
	Must(tb, err)
	for _, name := range names {
		data, err := vectors.ReadFile(name)
		Must(tb, err)
		var t Trace
		if err := json.Unmarshal(data, &t); err != nil {
			tb.Fatalf("%s: %v", name, err)
		}
		if len(t.Rows) == 0 || t.Rate == 0 || t.Capacity == 0 {
			tb.Fatalf("%s: not a trace", name)
		}
		traces = append(traces, t)
	}
	return traces
}

// Steps returns the packets of a trace. Times and sizes are below 2^53, so a float64 is exact.
func (t Trace) Steps(tb testing.TB) []Step {
	tb.Helper()
	var steps []Step
	for _, row := range t.Rows {
		at := map[string]any{}
		for i, column := range t.Columns {
			at[column] = row[i]
		}
		if at["verdict"] != "pass" && at["verdict"] != "drop" {
			tb.Fatalf("%s: verdict %v is neither pass nor drop", t.Name, at["verdict"])
		}
		departure, departs := at["depart_ns"].(float64)
		steps = append(steps, Step{
			Now: uint64(at["time_ns"].(float64)), Bytes: uint64(at["bytes"].(float64)), Level: at["level_bytes"].(float64),
			Pass: at["verdict"] == "pass", Departure: uint64(departure), Departs: departs,
		})
	}
	return steps
}
