package page

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/report"
)

// A fake answers as the API of serve does, about rules that do not exist.
type fake struct {
	*httptest.Server
	mu      sync.Mutex
	rules   report.Rules
	buckets []report.FullBucket
	reverts *uint64
	token   string // that changes take; "" for none
	fails   int    // the HTTP status of all readings; 0 for none
	version string
	asked   []string // methods and paths with what was sent
	events  []string // are sent to each listener
	at      time.Time
}

func newFake(t *testing.T, rules report.Rules) *fake {
	f := &fake{rules: rules, version: "1", at: time.Now()}
	mux := http.NewServeMux()
	mux.Handle("GET /", Handler())
	answer := func(w http.ResponseWriter, value any) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(value)
	}
	fail := func(w http.ResponseWriter, status int, says string) {
		w.WriteHeader(status)
		answer(w, map[string]any{"error": says, "exit_code": 1})
	}
	mux.HandleFunc("GET /api/v1/top", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.fails != 0 {
			fail(w, f.fails, "read the limits: permission denied; run as root, or ask root to add you to the group shapectl")
			return
		}
		f.step()
		answer(w, report.NewTop(time.Now(), time.Second, f.rules, f.buckets, f.reverts))
	})
	mux.HandleFunc("GET /api/v1/version", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		answer(w, map[string]string{"version": f.version})
	})
	mux.HandleFunc("GET /api/v1/show", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, rule := range f.rules {
			if q := r.URL.Query(); rule.Device == q.Get("device") && rule.Direction == q.Get("direction") && rule.CIDR == q.Get("network") {
				for _, b := range f.buckets {
					if b.CIDR == rule.CIDR && b.Device == rule.Device {
						rule.Buckets = append(rule.Buckets, b.Bucket)
					}
				}
				answer(w, report.Rules{rule})
				return
			}
		}
		fail(w, http.StatusNotFound, "there is no such rule")
	})
	mux.HandleFunc("GET /api/v1/explain", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "packets to %s go out by eth0\n  eth0 egress: 10.0.0.0/24 decides; they are dropped now; 62%% of all packets of 10.0.0.0/24 were dropped so far\n\nrule      each host in 10.0.0.0/24 gets 10mbit\nbucket    374600 of 375000 bytes (99.9 %% full)\nlater     conforms in 1.2 ms, if no others come\n", r.URL.Query().Get("address"))
	})
	mux.HandleFunc("GET /api/v1/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		f.mu.Lock()
		for _, e := range f.events {
			fmt.Fprintf(w, "data: %s\n\n", e)
		}
		f.mu.Unlock()
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	mux.HandleFunc("POST /api/v1/", func(w http.ResponseWriter, r *http.Request) {
		var body map[string]any
		err := json.NewDecoder(r.Body).Decode(&body)
		f.mu.Lock()
		defer f.mu.Unlock()
		switch what := strings.TrimPrefix(r.URL.Path, "/api/v1/"); {
		case err != nil || r.Header.Get("Content-Type") != "application/json":
			fail(w, http.StatusBadRequest, "no JSON")
		case f.token != "" && r.Header.Get("Authorization") != "Bearer "+f.token:
			fail(w, http.StatusUnauthorized, "changes take a token")
		case what == "set" && body["rate"] == "10parsecs":
			fail(w, http.StatusBadRequest, `set: rate "10parsecs" has the unknown unit "parsecs"`)
		default:
			text, _ := json.Marshal(body) // keys are sorted
			f.asked = append(f.asked, what+" "+string(text))
			if f.reverts = nil; what == "set" || what == "pool/set" {
				f.reverts = new(uint64(60e9))
			}
			answer(w, struct{}{})
		}
	})
	f.Server = httptest.NewServer(mux)
	t.Cleanup(func() {
		f.Server.CloseClientConnections()
		f.Server.Close()
	})
	return f
}

// step lets time pass for the rules: use rises and falls.
func (f *fake) step() {
	seconds := time.Since(f.at).Seconds()
	for i := range f.rules {
		r := &f.rules[i]
		if r.UseBits == nil || r.RateBits == nil || r.DroppedBits == nil {
			continue
		}
		use := float64(*r.UseBits)
		if *r.DroppedBits == 0 {
			use = max(0, use*(1+0.08*math.Sin(seconds/3+float64(i))))
		}
		r.PassedBytes += uint64(use / 8)
		r.PassedPackets += uint64(use / 8 / 1200)
		r.DroppedBytes += *r.DroppedBits / 8
		r.DroppedPackets += *r.DroppedBits / 8 / 1200
		if r.IsPool() {
			r.RefusedBytes, r.RefusedPackets = r.DroppedBytes, r.DroppedPackets
		}
	}
	if f.reverts != nil {
		f.reverts = new(*f.reverts - min(*f.reverts, 1e9))
	}
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// rule is a rule with figures of now; dropped is in bits per second, too.
func rule(device, direction, cidr, name string, rate, use, dropped uint64) report.Rule {
	yes := true
	capacity := max(rate*3/10/8, 32768)
	r := report.Rule{
		Kind: report.KindRule, Device: device, Direction: direction, CIDR: cidr, Name: name, Match: "dst", Algorithm: "gcra", Each: "all", Excess: "drop", Penalty: "none", Fail: "pass",
		RateBits: &rate, CapacityBytes: &capacity, Share: "none", Weight: 1, Attached: &yes, State: "attached", Hook: "tcx",
		IntervalNS: new(uint64(1e9)), UseBits: &use, BorrowedBits: new(uint64), UsePercent: new(math.Round(1e4*float64(use)/float64(rate)) / 100), DroppedBits: &dropped,
		DroppedPercent: new(100 * float64(dropped) / float64(max(use+dropped, 1))), ExcessPercent: new(100 * float64(dropped) / float64(max(use+dropped, 1))),
		LevelBytes: uint64(float64(capacity) * min(1, float64(use)/float64(rate)) * 0.97), PassedBytes: use * 400, PassedPackets: use / 3, DroppedBytes: dropped * 300, DroppedPackets: dropped / 4,
		Sentence: fmt.Sprintf("%s %s: %s as a whole gets %dmbit, burst %d kB (300 ms); excess is dropped (gcra)", device, direction, cidr, rate/1e6, capacity/1000),
	}
	if use+dropped == 0 {
		r.DroppedPercent, r.ExcessPercent = nil, nil
	}
	return r
}

func pool(name, within string, rate, use, refused uint64) report.Rule {
	r := rule("", "", "", name, rate, use, refused)
	r.Kind, r.Within, r.Attached, r.Match, r.Share = report.KindPool, within, nil, "", "member"
	r.RefusedPercent = r.DroppedPercent
	r.Sentence = fmt.Sprintf("pool %q gets %dmbit, shared fairly by its members; excess is dropped (gcra)", name, rate/1e6)
	return r
}

const mbit = uint64(1e6)

// town is an ISP with an offender, names that attack, and the usual rest.
func town() (report.Rules, []report.FullBucket) {
	all := report.Rules{
		pool("uplink", "", 1000*mbit, 612*mbit, 0),
		pool("ap-1", "uplink", 100*mbit, 99*mbit, 74*mbit),
		pool("ap-2", "uplink", 100*mbit, 31*mbit, 0),
	}
	within := func(r report.Rule, pool, plan string) report.Rule {
		r.Within, r.Plan = pool, plan
		return r
	}
	all = append(all,
		within(rule("eth0", "egress", "10.1.0.66/32", "mallory", 50*mbit, 49*mbit, 71*mbit), "ap-1", "home-50"),
		within(rule("eth0", "egress", "10.1.0.7/32", "alice", 50*mbit, 21*mbit, 0), "ap-1", "home-50"),
		within(rule("eth0", "egress", "2001:db8:7::/48", "alice", 50*mbit, 12*mbit, 0), "ap-1", "home-50"),
		within(rule("eth0", "egress", "10.2.0.9/32", "bob", 25*mbit, 24*mbit, 3*mbit), "ap-2", "home-25"),
		within(rule("eth0", "egress", "10.2.0.10/32", "carol", 25*mbit, 24*mbit, 0), "ap-2", "home-25"),
		rule("eth0", "ingress", "0.0.0.0/0", "", 200*mbit, 88*mbit, 0),
		rule("wg0", "egress", "10.9.0.0/24", "office", 20*mbit, 3*mbit, 0),
		rule("tap0", "egress", "::/0", "", 200*mbit, 0, 0),
		rule("eth1", "egress", "192.168.1.0/24", strings.Repeat("very-long-name-", 14), 10*mbit, 1*mbit, 0),
		rule("eth1", "egress", "192.168.2.0/24", `<img src=x onerror="document.title='hurt'">`, 10*mbit, 2*mbit, 0),
		rule("eth1", "egress", "192.168.3.0/24", "a\u202eevil\u2066\x1b[31m\n'\"", 10*mbit, 2*mbit, 0),
		rule("eth1", "egress", "192.168.4.0/24", "مشترك-٧", 10*mbit, 1*mbit, 0),
	)
	dns := rule("eth1", "ingress", "10.0.0.0/24", "dns", 2*mbit, 9*mbit, 5*mbit)
	dns.Each, dns.UsePercent, dns.LevelBytes = "host", nil, 0
	dns.Sentence = "eth1 ingress: each host in 10.0.0.0/24 gets 2mbit (250 kB/s), burst 75 kB (300 ms); excess is dropped (gcra)"
	all = append(all, dns)
	for i := range 24 {
		all = append(all, within(rule("eth0", "egress", fmt.Sprintf("10.3.0.%d/32", i), fmt.Sprintf("home-%d", i), 25*mbit, uint64(i%5)*mbit, 0), "ap-2", "home-25"))
	}
	buckets := []report.FullBucket{}
	for i := range 12 {
		level := *dns.CapacityBytes - uint64(i*i)*500
		buckets = append(buckets, report.NewFullBucket(&dns, report.Bucket{Key: fmt.Sprintf("10.0.0.%d", 7+i*3), LevelBytes: level}, 100*float64(level)/float64(*dns.CapacityBytes)))
	}
	return all, buckets
}

var happened = []string{
	`{"time":"2026-11-23T20:10:01.5Z","kind":"overflow","device":"eth0","direction":"egress","network":"10.1.0.66/32","name":"mallory","key":"10.1.0.66","pool":"ap-1","level_bytes":1875000,"sentence":"eth0 egress 10.1.0.66/32 mallory: pool ap-1 refuses packets of 10.1.0.66"}`,
	`{"time":"2026-11-23T20:10:07.1Z","kind":"overflow","device":"eth1","direction":"ingress","network":"10.0.0.0/24","name":"dns","key":"10.0.0.7","level_bytes":75000,"left_out":12,"sentence":"eth1 ingress 10.0.0.0/24 dns: the bucket of 10.0.0.7 is full"}`,
	`{"time":"2026-11-23T20:11:30Z","kind":"penalty","device":"eth1","direction":"ingress","network":"10.0.0.0/24","key":"10.0.0.10","sentence":"<b>10.0.0.10</b> is kept full for 10 s"}`,
}

// pictures writes the page at three widths, light and dark, where SHAPECTL_PICTURES says.
func TestPictures(t *testing.T) {
	dir := os.Getenv("SHAPECTL_PICTURES")
	if dir == "" {
		t.Skip("SHAPECTL_PICTURES names no directory")
	}
	rules, buckets := town()
	f := newFake(t, rules)
	f.buckets, f.events = buckets, happened
	b := newBrowser(t)
	for _, width := range []int{360, 820, 1440} {
		for _, theme := range []string{"light", "dark"} {
			b.size(width, 900, theme)
			for name, hash := range map[string]string{"list": "", "pools": "#/pools", "rule": "#/rule/eth0/egress/10.1.0.66%2F32", "hosts": "#/rule/eth1/ingress/10.0.0.0%2F24", "events": "#/events"} {
				if only := os.Getenv("SHAPECTL_PICTURES_ONLY"); only != "" && !strings.Contains(fmt.Sprintf("%s-%d-%s", name, width, theme), only) {
					continue
				}
				f.set(func() { f.reverts = nil })
				if name == "pools" || name == "rule" {
					f.set(func() { f.reverts = new(uint64(47e9)) })
				}
				b.open(f.URL + "/?" + name + hash)
				b.until("the view", "document.querySelector('.tile, .events')")
				time.Sleep(4 * time.Second)
				if name == "hosts" {
					b.click(".ask button")
					time.Sleep(time.Second)
				}
				b.picture(filepath.Join(dir, fmt.Sprintf("page-%s-%d-%s.png", name, width, theme)))
			}
		}
	}
	b.harmless(f.URL)
}
