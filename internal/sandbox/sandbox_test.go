package sandbox

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ask sends a request to the handler, which must answer with that status.
func ask(t testing.TB, status int, method, body string) string {
	t.Helper()
	w := httptest.NewRecorder()
	Handler().ServeHTTP(w, httptest.NewRequest(method, "/api/v1/sandbox", strings.NewReader(body)))
	if w.Code != status {
		t.Fatalf("%s %.200s: status %d, want %d: %.500s", method, body, w.Code, status, w.Body)
	}
	return w.Body.String()
}

// post returns the answer to a request, by the name of the limit.
func answered(t testing.TB, r Request) map[string]*Outcome {
	t.Helper()
	body, err := json.Marshal(r)
	testenv.Must(t, err)
	var result Result
	testenv.Must(t, json.Unmarshal([]byte(ask(t, http.StatusOK, http.MethodPost, string(body))), &result))
	byName := map[string]*Outcome{}
	for _, o := range result.Limits {
		byName[o.Name] = o
	}
	if len(byName) != 3 || result.Says == "" {
		t.Fatalf("%d limits; it says %q", len(byName), result.Says)
	}
	return byName
}

// Through HTTP, both meters give the verdicts and levels of the vectors, and the leaky queue their departures.
func TestVectors(t *testing.T) {
	for _, v := range testenv.Vectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			steps := v.Steps(t)
			var csv strings.Builder
			for _, s := range steps {
				fmt.Fprintf(&csv, "%d,%d\n", s.Now, s.Bytes)
			}
			byName := answered(t, Request{
				Limit: map[string]string{"rate": fmt.Sprintf("%dbit", v.Rate), "capacity": fmt.Sprintf("%db", v.Capacity), "algorithm": "leaky", "ecn-above": "never"},
				Trace: csv.String(),
			})
			for _, name := range []string{"gcra", "leaky", "queue"} {
				o, p := byName[name], byName[name].Packets
				if o.Error != "" || !o.Summary.Complete || len(p.TimeNS) != len(steps) {
					t.Fatalf("%s: %d packets of %d, complete %v, error %q", name, len(p.TimeNS), len(steps), o.Summary.Complete, o.Error)
				}
				for i, s := range steps {
					if p.TimeNS[i] != s.Now || p.Bytes[i] != s.Bytes || (p.Verdict[i] != "drop") != s.Pass || math.Abs(float64(p.AfterBytes[i])-s.Level) > 1.001 {
						t.Fatalf("%s, packet %d: %s with level %d, want %+v", name, i+1, p.Verdict[i], p.AfterBytes[i], s)
					}
					if name == "queue" && s.Departs && *p.DepartNS[i]+1-s.Departure > 2 {
						t.Fatalf("packet %d departs at %d, want %d", i+1, *p.DepartNS[i], s.Departure)
					}
				}
			}
		})
	}
}

// Each packet has the verdict, level and departure of a replay with the same options.
func TestEqualsReplay(t *testing.T) {
	random := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	pick := func(of ...string) string { return of[random.IntN(len(of))] }
	for range 60 {
		limit := map[string]string{
			"rate": pick("64kbit", "1mbit", "33mbit", "10gbit"), "capacity": pick("", "1600b", "20kb", "50ms"), "algorithm": pick("gcra", "leaky"),
			"excess": pick("drop", "ecn", "pass"), "penalty": pick("", "", "fill", "3ms"), "queue": pick("", "20kb"), "ecn-above": pick("", "1ms", "never"),
			"order": pick("fifo", "sparse-first"), "share": pick("none", "none", "flow"), "overhead": pick("", "18"), "mpu": pick("", "84"),
		}
		if limit["share"] != "none" {
			delete(limit, "penalty")
		}
		var csv strings.Builder
		for at, i := uint64(random.IntN(1e9)), 0; i < 400; i++ {
			at += uint64(random.ExpFloat64() * 1e6)
			fmt.Fprintf(&csv, "%d,%d\n", at, 40+random.IntN(1475))
		}
		for name, o := range answered(t, Request{Limit: limit, Trace: csv.String()}) {
			if o.Error != "" {
				t.Fatalf("%v: %s: %s", limit, name, o.Error)
			}
			rule := ruleOf(t, name, limit)
			rule.Prefix = netip.PrefixFrom(netip.IPv4Unspecified(), 0) // packets of a CSV have no addresses
			engine := replay.NewModel(replay.Limits{Rules: []policy.Rule{rule}})
			in, err := trace.Open(strings.NewReader(csv.String()))
			testenv.Must(t, err)
			var p trace.Packet
			for i := range o.Packets.TimeNS {
				testenv.Must(t, in.Next(&p))
				want, err := engine.Offer(&p)
				testenv.Must(t, err)
				got := o.Packets
				departs := got.DepartNS[i]
				if got.TimeNS[i] != want.Time || got.Bytes[i] != want.Bytes || got.Verdict[i] != want.Verdict.String() || got.Conforms[i] == want.Excess ||
					(departs == nil) != (got.Verdict[i] == "drop") || departs != nil && *departs != want.Departure() || got.AfterBytes[i] != want.LevelBytes() {
					t.Fatalf("%v: %s, packet %d: %s, departs %v, level %d; a replay says %+v", limit, name, i+1, got.Verdict[i], departs, got.AfterBytes[i], want)
				}
				// The level before is what is left: a packet that adds nothing does not change it.
				if added := got.AfterBytes[i] - got.BeforeBytes[i]; got.Conforms[i] && added+1-got.Bytes[i] > 2 || got.Verdict[i] == "drop" && limit["penalty"] == "" && added != 0 {
					t.Fatalf("%v: %s, packet %d: %s of %d bytes from level %d to %d", limit, name, i+1, got.Verdict[i], got.Bytes[i], got.BeforeBytes[i], got.AfterBytes[i])
				}
			}
		}
	}
}

// ruleOf makes the rule of a limit from the options on its own.
func ruleOf(t testing.TB, name string, options map[string]string) policy.Rule {
	t.Helper()
	options = maps.Clone(options)
	if name != "queue" {
		options["algorithm"] = name
		for _, key := range []string{"queue", "ecn-above", "order"} {
			delete(options, key)
		}
	} else {
		options["excess"] = "delay"
		if options["algorithm"] == "leaky" {
			delete(options, "queue")
			delete(options, "order")
		}
	}
	if name != "leaky" {
		delete(options, "penalty")
	}
	var l policy.Limit
	for key, value := range options {
		if value != "" {
			testenv.Must(t, l.Set(key, value))
		}
	}
	rule, err := l.Tiny(network)
	testenv.Must(t, err)
	return rule
}

// The command of a limit sets just that limit.
func TestCommand(t *testing.T) {
	for _, options := range []map[string]string{
		{"rate": "10mbit"},
		{"rate": "5mbit", "capacity": "64kb", "penalty": "3s", "excess": "ecn", "each": "host"},
		{"rate": "4mbit", "queue": "100ms", "order": "sparse-first", "ecn-above": "5ms", "share": "host", "overhead": "-4", "mpu": "64"},
		{"rate": "64kbit", "algorithm": "leaky", "capacity": "2s", "each": "flow"},
	} {
		one := []Sender{{Kind: "burst", Bytes: 1, Packets: 1}}
		for name, o := range answered(t, Request{Limit: options, Senders: one, Direction: "ingress"}) {
			rest, ok := strings.CutPrefix(o.Command, "shapectl set eth0 ingress 10.0.0.0/24 --")
			if !ok {
				t.Fatalf("%v: %s: %q, error %q %q", options, name, o.Command, o.Error, o.NoCommand)
			}
			var l policy.Limit
			for flag := range strings.SplitSeq(rest, " --") {
				if flag == "setup-fq" {
					continue
				}
				key, value, _ := strings.Cut(flag, " ")
				testenv.Must(t, l.Set(key, value))
			}
			got, err := l.Rule(network)
			testenv.Must(t, err)
			if want := ruleOf(t, name, options); got != want {
				t.Errorf("%s sets %+v, want %+v", o.Command, got, want)
			}
		}
	}
	o := answered(t, Request{Limit: map[string]string{"rate": "8kbit", "capacity": "100b"}, Senders: []Sender{{Kind: "burst", Bytes: 1, Packets: 1}}})["gcra"]
	if o.Command != "" || !strings.Contains(o.NoCommand, "less than one full packet") {
		t.Errorf("the command is %q, and not: %q", o.Command, o.NoCommand)
	}
}

const millisecond = second / 1000

// examples are the requests of the presets.
func examples(t testing.TB) map[string]Request {
	var all []struct {
		Name    string
		Request Request
	}
	testenv.Must(t, json.Unmarshal([]byte(ask(t, http.StatusOK, http.MethodGet, "")), &all))
	byName := map[string]Request{}
	for _, p := range all {
		byName[p.Name] = p.Request
	}
	return byName
}

func preset(t *testing.T, name string) Request {
	t.Helper()
	r, ok := examples(t)[name]
	if !ok {
		t.Fatalf("there is no preset %s", name)
	}
	return r
}

// Two presets are vectors: here are their verdicts and departures, so that the test needs no other files.
func TestPresetVectors(t *testing.T) {
	five := answered(t, preset(t, "five-per-second"))
	for name, o := range five {
		var verdicts strings.Builder
		for i, v := range o.Packets.Verdict {
			verdicts.WriteByte(map[string]byte{"pass": 'p', "delay": 'p', "drop": 'd'}[v])
			if o.Packets.TimeNS[i] != uint64(i)*25*millisecond {
				t.Errorf("packet %d at %d", i+1, o.Packets.TimeNS[i])
			}
		}
		if got, want := verdicts.String(), "pppppppppppdddddpddd"; got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	sent := uint64(0)
	for i, at := range five["queue"].Packets.DepartNS {
		if at == nil {
			continue
		}
		if *at != sent*200*millisecond {
			t.Errorf("packet %d departs at %d, want %d", i+1, *at, sent*200*millisecond)
		}
		sent++
	}
	idle := answered(t, preset(t, "idle-then-burst"))
	for name, o := range idle {
		if s := o.Summary; s.PassedPackets != 201 || s.DroppedPackets != 0 || s.HighestLevelBytes != 190050 {
			t.Errorf("%s: %d pass, %d are dropped, the highest level is %d", name, s.PassedPackets, s.DroppedPackets, s.HighestLevelBytes)
		}
	}
	for i, at := range idle["queue"].Packets.DepartNS[1:] {
		if want := uint64(5*second + i*10*millisecond); *at+1-want > 2 {
			t.Errorf("packet %d departs at %d, want %d", i+2, *at, want)
		}
	}
}

// What the presets say is what happens.
func TestPresets(t *testing.T) {
	run := func(name string, set ...string) map[string]*Outcome {
		r := preset(t, name)
		for i := 0; i < len(set); i += 2 {
			r.Limit[set[i]] = set[i+1]
		}
		return answered(t, r)
	}
	says := func(o *Outcome, want string) {
		t.Helper()
		if !strings.HasPrefix(o.Says, want) {
			t.Errorf("%s: %q, want %q", o.Name, o.Says, want)
		}
	}
	for p := range examples(t) {
		for name, o := range run(p) {
			if o.Error != "" || !o.Summary.Complete || o.Command == "" {
				t.Errorf("%s: %s: error %q, complete %v, command %q", p, name, o.Error, o.Summary.Complete, o.Command)
			}
		}
	}
	for _, o := range run("five-a-second") {
		says(o, "20 of 20 requests pass. The highest level is 1 of 10 requests.")
	}
	says(run("ten-after-idle")["gcra"], "10 of 10 requests pass. The highest level is 10 of 10 requests.")
	more := preset(t, "ten-after-idle")
	more.Senders[0].Packets++
	says(answered(t, more)["gcra"], "10 of 11 requests pass; dropped: 1, the first at 3s. The highest level is 10 of 10 requests.")
	says(run("three-times")["leaky"], "39 of 90 requests pass; dropped: 51, the first at 467ms.")
	says(run("three-times", "excess", "ecn")["gcra"], "39 of 90 requests pass; dropped: 51, the first at 467ms.")
	says(run("three-times", "excess", "pass")["gcra"], "90 of 90 requests pass. Excess: 51.")
	never := run("never-stops")["leaky"]
	says(never, "14 of 90 requests pass; dropped: 76")
	if i := slices.Index(never.Packets.Verdict, "drop"); slices.Contains(never.Packets.Verdict[i:], "pass") {
		t.Error("with a penalty, a request passes after a drop")
	}
	if d := run("download"); d["queue"].Summary.DroppedPackets >= d["gcra"].Summary.DroppedPackets {
		t.Error("the queue does not lose fewer packets of the download")
	}
	if offered, passed, longest := run("call-and-download")["queue"].Packets.of(0); longest != 0 || passed != offered {
		t.Errorf("with sparse-first, the call waits up to %d ns, and %d of %d pass", longest, passed, offered)
	}
	if _, _, longest := run("call-and-download", "order", "fifo")["queue"].Packets.of(0); longest < 80*millisecond || longest > 100*millisecond {
		t.Errorf("with fifo, the call waits up to %d ns", longest)
	}
	for name, o := range run("dns-flood") {
		client, passed, _ := o.Packets.of(0)
		flood, more, _ := o.Packets.of(1)
		if passed != client || more*4 > flood {
			t.Errorf("%s: %d of %d of the client pass, %d of %d of the flood", name, passed, client, more, flood)
		}
	}
	if offered, passed, _ := run("dns-flood", "each", "all")["leaky"].Packets.of(0); passed > offered/2 {
		t.Errorf("with one bucket, %d of %d of the client pass", passed, offered)
	}
	if p := run("pages", "capacity", "256kb")["gcra"].Summary; p.DroppedPackets != 0 {
		t.Errorf("pages lose %d packets although they fit", p.DroppedPackets)
	}
}

// A TCP sender uses the rate, reacts to what it loses, and is never faster than its line.
func TestTCP(t *testing.T) {
	sender := func(kind string) []Sender {
		return []Sender{{Kind: kind, Bytes: 1500, PacketsPerSecond: 5000, RTTNS: 20 * millisecond, DurationNS: 4 * second}}
	}
	limit := map[string]string{"rate": "5mbit", "capacity": "4kb", "queue": "50ms"}
	loss, delay := answered(t, Request{Limit: limit, Senders: sender("tcp")})["queue"], answered(t, Request{Limit: limit, Senders: sender("tcp-delay")})["queue"]
	for _, o := range []*Outcome{loss, delay} {
		if passed := o.Summary.PassedBytes * 8 / 4; passed < 4_700_000 || passed > 5_200_000 {
			t.Errorf("%s: %d bit/s pass of 5 mbit", o.Says, passed)
		}
		for i, at := range o.Packets.TimeNS[1:] {
			if at-o.Packets.TimeNS[i] < second/5000 {
				t.Fatalf("two packets within %d ns", at-o.Packets.TimeNS[i])
			}
		}
	}
	if delay.Summary.MeanDelayNS*2 > loss.Summary.MeanDelayNS || delay.Summary.DroppedPackets >= loss.Summary.DroppedPackets {
		t.Errorf("a sender that reacts to delay: %s\none that reacts to loss: %s", delay.Says, loss.Says)
	}
	marked := sender("tcp")
	marked[0].ECN = true
	if o := answered(t, Request{Limit: limit, Senders: marked})["queue"]; o.Summary.MarkedPackets == 0 || o.Summary.DroppedPackets > loss.Summary.DroppedPackets/2 {
		t.Errorf("a sender that allows marks: %s; without: %s", o.Says, loss.Says)
	}
	// A sender that loses everything goes on after timeouts.
	dead := answered(t, Request{Limit: map[string]string{"rate": "8kbit", "capacity": "1b", "penalty": "10s"}, Senders: sender("tcp")})["leaky"]
	if n := dead.Summary.OfferedPackets; n < 15 || n > 40 {
		t.Errorf("a sender that gets nothing through sends %d packets", n)
	}
}

// All packets are in the rates, at their departures, and the level before each is what the one before in its bucket left.
func TestPictures(t *testing.T) {
	r := Request{
		Limit:   map[string]string{"rate": "1mbit", "capacity": "20kb", "excess": "ecn"},
		Senders: []Sender{{Kind: "random", Bytes: 300, PacketsPerSecond: 500, DurationNS: 5 * second, ECN: true}, {Kind: "on-off", Bytes: 900, PacketsPerSecond: 500, OnNS: 50 * millisecond, OffNS: second, DurationNS: 5 * second}},
	}
	for _, each := range []string{"all", "host"} {
		r.Limit["each"] = each
		for name, o := range answered(t, r) {
			s, p, bytes := o.Summary, o.Packets, [2]float64{}
			for i, l := range o.Rates.Layers {
				for _, v := range l.Y {
					bytes[i] += v * o.Rates.X[0] * 2 / 8e9
				}
			}
			if math.Abs(bytes[0]-float64(s.OfferedBytes)) > 1 || math.Abs(bytes[1]-float64(s.PassedBytes)) > 1 || len(o.Rates.X) > 80 || len(o.Rates.X) < 40 {
				t.Errorf("%s: in %d parts, %v bytes are offered and passed, want %d and %d", name, len(o.Rates.X), bytes, s.OfferedBytes, s.PassedBytes)
			}
			last := map[int]int{}
			for i, at := range p.TimeNS {
				bucket := p.Sender[i]
				if each == "all" {
					bucket = 0
				}
				want := 0.0
				if before, ok := last[bucket]; ok {
					want = max(0, float64(p.AfterBytes[before])-float64(at-p.TimeNS[before])/8000)
				}
				if math.Abs(float64(p.BeforeBytes[i])-want) > 1 {
					t.Fatalf("%s, each %s: packet %d finds a level of %d, want %v", name, each, i+1, p.BeforeBytes[i], want)
				}
				last[bucket] = i
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	sender := `"senders":[{"kind":"burst","bytes":1000,"packets":1}]`
	long := strings.Repeat("0,1000\n", maxTrace/7+1)
	text := func(s string) string { b, _ := json.Marshal(s); return string(b) }
	for body, want := range map[string]string{
		``:    "EOF",
		`[1]`: "cannot unmarshal",
		`{"limit":{"rate":"1mbit"},` + sender + `,"file":"/etc/passwd"}`:                                           `unknown field \"file\"`,
		`{"limit":{},` + sender + `}`:                                                                              "rate is missing",
		`{"limit":{"rate":"10mbps"},` + sender + `}`:                                                               "ambiguous",
		`{"limit":{"rate":"unlimited"},` + sender + `}`:                                                            "unlimited would pass everything",
		`{"limit":{"rate":"1mbit","within":"x"},` + sender + `}`:                                                   "no option of a sandbox",
		`{"limit":{"rate":"1mbit","excess":"delay"},` + sender + `}`:                                               "always shown",
		`{"limit":{"rate":"1mbit","algorithm":"srtcm"},` + sender + `}`:                                            "see its colours with 'shapectl replay'",
		`{"limit":{"rate":"1mbit","each":"/28"},` + sender + `}`:                                                   "no subnets",
		`{"limit":{"rate":"1mbit"}}`:                                                                               "the load is missing",
		`{"limit":{"rate":"1mbit"},"trace":"0,1",` + sender + `}`:                                                  "the load is missing",
		`{"limit":{"rate":"1mbit"},"trace":"0,x"}`:                                                                 "is not a whole number",
		`{"limit":{"rate":"1mbit"},"trace":"\n\r\r\n` + strings.Repeat("A", 600) + `"}`:                            "",
		`{"limit":{"rate":"1mbit"},"trace":` + text(long) + `}`:                                                    "more than 262144",
		`{"limit":{"rate":"1mbit"},"direction":"up",` + sender + `}`:                                               "direction",
		`{"limit":{"rate":"1mbit"},"unit":"car",` + sender + `}`:                                                   "unit",
		`{"limit":{"rate":"1mbit"},"senders":[{"kind":"flood","bytes":1,"packets_per_second":1,"duration_ns":1}]}`: "is unknown",
		`{"limit":{"rate":"1mbit"},"senders":[{"kind":"steady","bytes":1,"duration_ns":1}]}`:                       "packets_per_second",
		`{"limit":{"rate":"1mbit"},"senders":[{"kind":"steady","bytes":1,"packets_per_second":1}]}`:                "duration_ns",
		`{"limit":{"rate":"1mbit"},"senders":[{"kind":"tcp","bytes":1,"packets_per_second":1,"duration_ns":1}]}`:   "rtt_ns",
		`{"limit":{"rate":"1mbit"},"senders":[{"kind":"burst","packets":1}]}`:                                      "bytes of 0 is out of range",
		`{"limit":{"rate":"1mbit"},"senders":[{"kind":"burst","bytes":1,"packets":1000000}]}`:                      "packets of 1000000",
		`{"limit":{"rate":"1mbit"},"senders":[{},{},{},{},{}]}`:                                                    "5 senders",
	} {
		if got := ask(t, http.StatusBadRequest, http.MethodPost, body); !strings.Contains(got, `{"error":"sandbox: `) || !strings.Contains(got, want) || !strings.Contains(got, `"exit_code":1`) {
			t.Errorf("%.200s: %s, want %q", body, got, want)
		}
	}
	// An option that one limit cannot have does not hide the others.
	byName := answered(t, Request{Limit: map[string]string{"rate": "8kbit", "queue": "1gb"}, Senders: []Sender{{Kind: "burst", Bytes: 1, Packets: 1}}})
	if byName["gcra"].Error != "" || !strings.Contains(byName["queue"].Error, "longest delay") {
		t.Errorf("the errors are %q and %q", byName["gcra"].Error, byName["queue"].Error)
	}
}

// Whatever is asked, the answer is bounded and adds up.
func FuzzHandler(f *testing.F) {
	for _, r := range examples(f) {
		body, err := json.Marshal(r)
		testenv.Must(f, err)
		f.Add(string(body))
	}
	f.Add(`{"limit":{"rate":"8kbit","share":"host"},"trace":"18446744073709551615,1\n0,16777215\n9223372036854775808,1"}`)
	f.Add(`{"limit":{"rate":"400gbit","capacity":"1024gb","penalty":"86400s"},"senders":[{"kind":"tcp","bytes":1,"packets_per_second":1e9,"duration_ns":86400000000000,"rtt_ns":1000}]}`)
	f.Fuzz(func(t *testing.T, body string) {
		w := httptest.NewRecorder()
		Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body)))
		var result Result
		if w.Code == http.StatusBadRequest {
			return
		}
		if err := json.Unmarshal(w.Body.Bytes(), &result); w.Code != http.StatusOK || err != nil {
			t.Fatalf("status %d: %v", w.Code, err)
		}
		for _, o := range result.Limits {
			s, p := o.Summary, o.Packets
			if s.OfferedPackets > MaxPackets || len(p.TimeNS) > MaxPackets || s.PassedPackets+s.DroppedPackets != s.OfferedPackets {
				t.Fatalf("%s: %d pass and %d are dropped of %d", o.Name, s.PassedPackets, s.DroppedPackets, s.OfferedPackets)
			}
		}
	})
}
