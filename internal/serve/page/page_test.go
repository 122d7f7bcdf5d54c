package page

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/live/livetest"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/testenv/browser"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A fake answers as the API of serve does, about rules that do not exist.
type fake struct {
	*httptest.Server
	mu      sync.Mutex
	limits  []limit
	scene   *live.Scene // of the limits; nil if these changed
	last    *live.Reading
	reverts *uint64
	token   string // that changes take; "" for none
	fails   int    // the HTTP status of all readings; 0 for none
	version string
	asked   []string // methods and paths with what was sent
	events  []string // are sent to each listener
	// whether round-trip times are measured all the time
	measures bool
}

func newFake(t *testing.T, limits []limit) *fake {
	f := &fake{limits: limits, version: "1"}
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
	roundTrips := func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		measures := f.measures
		f.mu.Unlock()
		if r.URL.Query().Has("running") && !measures {
			answer(w, map[string]any{"interval_ns": 0, "rules": []any{}})
			return
		}
		time.Sleep(500 * time.Millisecond)
		part := func(ms float64, again int) map[string]any {
			return map[string]any{"receiver_rtt": map[string]any{"p50_ns": ms * 1e6}, "payload_packets": 1000, "retransmitted_packets": again}
		}
		one := func(host string, ms float64) map[string]any {
			return map[string]any{"device": "eth1", "direction": "ingress", "cidr": "10.0.0.0/24", "host": host, "limited": part(ms*9, 40), "not_limited": part(ms, 0)}
		}
		all := one("", 21.5)
		all["hosts"] = []any{one("10.0.0.7", 20), one("<i>10.0.0.9</i>", 23)}
		answer(w, map[string]any{"interval_ns": 3e9, "rules": []any{all}})
	}
	talkers := func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(500 * time.Millisecond)
		answer(w, report.Talkers{IntervalNS: 2e9, Rules: []report.RuleTalkers{{Device: "eth1", Direction: "ingress", CIDR: "10.0.0.0/24",
			OfferedBits: new(uint64(14e6)), PassedBits: new(uint64(9e6)), LeftOut: 3,
			Talkers: []report.Talker{
				{Key: "10.0.0.9", OfferedBits: new(uint64(7e6)), PassedBits: new(uint64(2e6)), FullPercent: new(99.5)},
				{Key: "10.0.0.7", OfferedBits: new(uint64(3e6)), PassedBits: new(uint64(2e6)), FullPercent: new(64.0)},
			}}}})
	}
	mux.HandleFunc("GET /api/v1/top", func(w http.ResponseWriter, r *http.Request) {
		switch q := r.URL.Query(); {
		case q.Has("rtt"):
			roundTrips(w, r)
			return
		case q.Get("by") == "host" || q.Get("by") == "flow":
			talkers(w, r)
			return
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.fails != 0 {
			fail(w, f.fails, "read the limits: permission denied; run as root, or ask root to add you to the group shapectl")
			return
		}
		q := r.URL.Query()
		v := live.View{By: q.Get("by"), Sort: q.Get("sort"), Search: q.Get("search"), Show: q.Get("show"), Kind: q.Get("kind"), Name: q.Get("name"), Of: q.Get("of"), Open: q["open"]}
		fmt.Sscan(q.Get("top"), &v.Top)
		fmt.Sscan(q.Get("most"), &v.Most)
		top := report.NewTop(f.read(), v)
		if len(top.Rules) == 0 && (v.Of != "" || v.Name != "") {
			fail(w, http.StatusNotFound, "there is no such rule")
			return
		}
		answer(w, top)
	})
	mux.HandleFunc("GET /api/v1/version", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		answer(w, map[string]string{"version": f.version})
	})
	mux.HandleFunc("GET /api/v1/show", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		q := r.URL.Query()
		if it := f.read().Find(live.Key{Device: q.Get("device"), Direction: q.Get("direction"), Network: q.Get("network")}); it != nil {
			rule := report.NewRule(it)
			for _, b := range f.last.Fullest {
				if b.Item == it {
					rule.Buckets = append(rule.Buckets, b.Bucket)
				}
			}
			answer(w, report.Rules{rule})
			return
		}
		fail(w, http.StatusNotFound, "there is no such rule")
	})
	mux.HandleFunc("GET /api/v1/explain", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "packets to %s go out by eth0\n  eth0 egress: 10.0.0.0/24 decides; they are dropped now; 62%% of all packets of 10.0.0.0/24 were dropped so far\n\nrule      each host in 10.0.0.0/24 gets 10mbit\nbucket    374600 of 375000 bytes (99.9 %% full)\nlater     conforms in 1.2 ms, if no others come\n", r.URL.Query().Get("address"))
	})
	mux.HandleFunc("GET /api/v1/report", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("since") == "1h" {
			fail(w, http.StatusNotFound, "report: this server records nothing")
			return
		}
		now, periods := time.Now(), []any{}
		for i := range 288 {
			passed := 9e6 + 8e6*math.Sin(float64(i)/20)
			periods = append(periods, map[string]any{"begin": now.Add(time.Duration(i-288) * 5 * time.Minute), "measured_ns": 300e9, "passed_bits_per_second": passed, "offered_bits_per_second": max(passed, 1.4*passed-6e6)})
		}
		answer(w, []any{map[string]any{"until": now, "periods": periods, "passed_bytes": 86e9, "dropped_bytes": 3e9, "passed": map[string]any{"p95_5min_bits_per_second": 16.8e6}, "checked_intervals": 8640, "delivered_intervals": 8630}})
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
			if f.reverts = nil; what == "set" {
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

// read is a reading of a second in which each rule and pool did what its limit says.
func (f *fake) read() *live.Reading {
	if f.scene == nil {
		var places []live.Place
		var rules [][]maps.Entry
		for i, l := range f.limits {
			at := livetest.Place(policy.Table{Device: l.device, Direction: l.direction})
			if l.out {
				at.InForce, at.Status = false, "detached"
			}
			n := slices.Index(places, at)
			if n < 0 {
				n, places, rules = len(places), append(places, at), append(rules, nil)
			}
			rules[n] = append(rules[n], maps.Entry{ID: uint32(i), Rule: l.Rule})
		}
		f.scene = live.NewScene(places, rules)
	}
	second := func(n uint64) *live.Reading {
		return f.scene.Read(n*1e9, func(l *live.Limit) live.Item {
			is, it := &f.limits[l.ID], live.Item{Limit: l}
			it.PassedBytes, it.DroppedBytes = n*is.use/8, n*is.dropped/8
			it.PassedPackets, it.DroppedPackets = it.PassedBytes/1000, it.DroppedBytes/1000
			it.ExcessPackets = it.DroppedPackets
			if l.Scope() == "" && l.Rule.Rate != policy.Unlimited {
				it.Level = l.Capacity * min(is.use, uint64(l.Rule.Rate)) / uint64(l.Rule.Rate)
			}
			return it
		})
	}
	f.last = second(401)
	f.last.Since(second(400))
	f.last.Time, f.last.RevertsInNS = time.Now(), f.reverts
	for i := range f.last.Items {
		if it := &f.last.Items[i]; f.limits[it.ID].Each.Kind == policy.EachHost {
			for n := range uint64(12) {
				level := it.Capacity - n*n*500
				f.last.AddFullest(it, live.Bucket{Name: fmt.Sprintf("10.0.0.%d", 7+n*3), Bytes: level}, 100*float64(level)/float64(it.Capacity))
			}
		}
	}
	if f.reverts != nil {
		f.reverts = new(*f.reverts - min(*f.reverts, 1e9))
	}
	return f.last
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	f.scene = nil
}

// A limit is a rule or pool, and what it does now, in bits per second.
type limit struct {
	policy.Rule
	device       string
	direction    policy.Direction
	use, dropped uint64
	out          bool // it is not in force
}

func rule(device string, d policy.Direction, network, name string, rate policy.Rate, use, dropped uint64) limit {
	return limit{Rule: policy.Rule{
		Prefix: netip.MustParsePrefix(network), Rate: rate, Capacity: max(uint64(rate)*3/10/8, 32768), Algorithm: policy.GCRA, Label: policy.Label{Name: name},
	}, device: device, direction: d, use: use, dropped: dropped}
}

func pool(name, within string, rate policy.Rate, use, refused uint64) limit {
	l := rule("", policy.Egress, "::/0", name, rate, use, refused)
	l.Pool, l.Prefix, l.Within, l.Share.Kind = true, policy.PoolKey(name), policy.Within(within), policy.ShareMember
	return l
}

const mbit = 1e6

// town is an ISP with an offender, names that attack, and the usual rest.
func town() []limit {
	within := func(r limit, pool, plan string) limit {
		r.Within, r.Label.Plan = policy.Within(pool), plan
		return r
	}
	const out, in = policy.Egress, policy.Ingress
	dns := rule("eth1", in, "10.0.0.0/24", "dns", 2*mbit, 9*mbit, 5*mbit)
	dns.Each.Kind = policy.EachHost
	all := []limit{
		pool("uplink", "", 1000*mbit, 612*mbit, 0),
		pool("ap-1", "uplink", 100*mbit, 99*mbit, 71*mbit),
		pool("ap-2", "uplink", 100*mbit, 31*mbit, 0),
		within(rule("eth0", out, "10.1.0.66/32", "mallory", 50*mbit, 49*mbit, 71*mbit), "ap-1", "home-50"),
		within(rule("eth0", out, "10.1.0.7/32", "alice", 50*mbit, 21*mbit, 0), "ap-1", "home-50"),
		within(rule("eth0", out, "2001:db8:7::/48", "alice", 50*mbit, 12*mbit, 0), "ap-1", "home-50"),
		within(rule("eth0", out, "10.2.0.9/32", "bob", 25*mbit, 24*mbit, 3*mbit), "ap-2", "home-25"),
		within(rule("eth0", out, "10.2.0.10/32", "carol", 25*mbit, 24*mbit, 0), "ap-2", "home-25"),
		rule("eth0", in, "0.0.0.0/0", "", 200*mbit, 88*mbit, 0),
		rule("wg0", out, "10.9.0.0/24", "office", 20*mbit, 3*mbit, 0),
		rule("tap0", out, "::/0", "", 200*mbit, 0, 0),
		rule("eth1", out, "192.168.1.0/24", strings.Repeat("very-long-name-", 14), 10*mbit, 1*mbit, 0),
		rule("eth1", out, "192.168.2.0/24", `<img src=x onerror="document.title='hurt'">`, 10*mbit, 2*mbit, 0),
		rule("eth1", out, "192.168.3.0/24", "a\u202eevil\u2066\x1b[31m\n'\"", 10*mbit, 2*mbit, 0),
		rule("eth1", out, "192.168.4.0/24", "مشترك-٧", 10*mbit, 1*mbit, 0),
		dns,
	}
	for i := range uint64(24) {
		all = append(all, within(rule("eth0", out, fmt.Sprintf("10.3.0.%d/32", i), fmt.Sprintf("home-%d", i), 25*mbit, i%5*mbit, 0), "ap-2", "home-25"))
	}
	return all
}

var happened = []string{
	`{"time":"2026-11-23T20:10:01.5Z","kind":"overflow","device":"eth0","direction":"egress","network":"10.1.0.66/32","name":"mallory","key":"10.1.0.66","pool":"ap-1","level_bytes":1875000,"sentence":"eth0 egress 10.1.0.66/32 mallory: pool ap-1 refuses packets of 10.1.0.66"}`,
	`{"time":"2026-11-23T20:10:07.1Z","kind":"overflow","device":"eth1","direction":"ingress","network":"10.0.0.0/24","name":"dns","key":"10.0.0.7","level_bytes":75000,"left_out":12,"sentence":"eth1 ingress 10.0.0.0/24 dns: the bucket of 10.0.0.7 is full"}`,
	`{"time":"2026-11-23T20:10:09Z","kind":"change-begun","sentence":"a change of rules began"}`,
	`{"time":"2026-11-23T20:10:09.1Z","kind":"rules-changed","device":"eth0","direction":"egress","network":"10.1.0.66/32","name":"mallory","sentence":"eth0 egress 10.1.0.66 (\"mallory\"): 1 rule changed"}`,
	`{"time":"2026-11-23T20:11:30Z","kind":"penalty","device":"eth1","direction":"ingress","network":"10.0.0.0/24","key":"10.0.0.10","sentence":"<b>10.0.0.10</b> is kept full for 10 s"}`,
}

const offender = "#/rule/eth0/egress/10.1.0.66%2F32"

// open shows a fake with the town in a browser, and waits for the first figures.
func open(t *testing.T, hash string) (*fake, *browser.Tab) {
	t.Helper()
	f := newFake(t, town())
	f.events = happened
	b := browser.New(t)
	b.Size(1440, 900, "light")
	b.Open(f.URL + "/" + hash)
	b.Until("the view", "document.querySelector('.tile, .events li, .pair')")
	return f, b
}

const firstLine = "document.querySelector('.list tbody .who a').textContent"

// choose chooses from a list.
func choose(b *browser.Tab, id, value string) {
	b.Eval(fmt.Sprintf("{ const s = document.getElementById(%q); s.value = %q; s.dispatchEvent(new Event('change')); }", id, value), nil)
}

// The rule that drops most comes first, and no name does harm.
func TestList(t *testing.T) {
	f, b := open(t, "")
	b.Until("the offender to be first", firstLine+" === 'mallory'")
	b.Until("a line for both rules of a name", "[...document.querySelectorAll('.list tbody tr')].find((tr) => tr.querySelector('a').textContent === 'alice').innerText.includes('33.0mbit')")
	choose(b, "kind", "rule")
	b.Until("rules", "document.querySelector('.list').innerText.includes('2mbit/host')")
	text := b.Text(".list")
	for _, want := range []string{`<img src=x onerror="document.title='hurt'">`, `a\u202eevil\u2066\u001b[31m\u000a'"`, "مشترك-٧", "very-long-name-very", "98% of 50mbit", "59% of packets", "2mbit/host", "0.0.0.0/0"} {
		if !strings.Contains(text, want) {
			t.Errorf("the list has no %s: %s", want, text)
		}
	}
	b.Until("figures of all rules", "document.querySelector('.tiles').innerText.includes('79.0mbit')")
	for _, hurt := range []string{"document.images.length > 0", "document.title !== 'shapectl'", "document.documentElement.scrollWidth > innerWidth"} {
		var is bool
		if b.Eval(hurt, &is); is {
			t.Errorf("%s", hurt)
		}
	}

	search := func(text string) {
		t.Helper()
		b.Eval(fmt.Sprintf("{ const s = document.getElementById('search'); s.value = %q; s.dispatchEvent(new Event('input')); }", text), nil)
	}
	for text, want := range map[string]string{"2001:db8:7::1": "alice", "10.9.0.77": "office", "home-25 bob": "bob", "wg0": "office", "ap-1 mall": "mallory"} {
		search(text)
		if text == "wg0" || text == "10.9.0.77" || text == "2001:db8:7::1" {
			search(text + " " + want)
		}
		b.Until("the search for "+text, firstLine+" === '"+want+"'")
	}
	search("nobody")
	b.Until("nothing to be found", "document.querySelector('.empty')?.innerText.includes('Nothing matches')")
	search("")
	names := "[...document.querySelectorAll('.list tbody .who a')].map((a) => a.textContent).join(' ')"
	for show, want := range map[string]string{"dropping": "mallory dns bob", "near": "mallory dns bob carol", "out": ""} {
		choose(b, "show", show)
		b.Until("only what is "+show, names+" === '"+want+"'")
	}
	choose(b, "show", "")
	b.Eval("[...document.querySelectorAll('.sorter')].find((s) => s.textContent === 'Name or rule').click()", nil)
	b.Until("the order by name", "document.querySelector('[aria-sort=ascending]')?.innerText === 'Name or rule' && "+firstLine+" !== 'mallory'")
	b.Harmless(f.URL)
}

// A tree of pools opens and closes, and a search opens the way to what it finds.
func TestPools(t *testing.T) {
	f, b := open(t, "#/pools")
	names := "[...document.querySelectorAll('.list tbody .who a')].map((a) => a.textContent).join(' ')"
	b.Until("the tree", names+" === 'uplink ap-1 ap-2'")
	b.Click(".list tbody tr:nth-child(2) .twig")
	b.Until("a pool to open", names+" === 'uplink ap-1 mallory alice alice ap-2'")
	b.Click(".list tbody tr:nth-child(2) .twig")
	b.Until("a pool to close", names+" === 'uplink ap-1 ap-2'")
	b.Eval("{ const s = document.getElementById('search'); s.value = 'mallory'; s.dispatchEvent(new Event('input')); }", nil)
	b.Until("only the way to a rule", names+" === 'uplink ap-1 mallory'")
	b.Harmless(f.URL)
}

// The page of a name has its rules, and the pools above them.
func TestName(t *testing.T) {
	f, b := open(t, "")
	b.Until("the list", firstLine)
	b.Eval("[...document.querySelectorAll('.who a')].find((a) => a.textContent === 'alice').click()", nil)
	b.Until("the name", "document.querySelector('h1')?.innerText.startsWith('alice') && document.activeElement.id === 'title'")
	b.Until("its rules", "[...document.querySelectorAll('.list tbody .who a')].map((a) => a.textContent).join(' ') === 'uplink ap-1 alice alice'")
	b.Until("what they do together", "document.querySelector('.legend').innerText.includes('33.0mbit')")
	b.Harmless(f.URL)
	b.Open(f.URL + "/#/name/nobody")
	b.Until("that there is none", "document.querySelector('.empty')?.innerText.includes('No rule has this name') && document.querySelector('#live').dataset.state === 'live'")
}

// The page of a rule survives a reload, draws, explains, and says what happens.
func TestRule(t *testing.T) {
	f, b := open(t, "#/rule/eth1/ingress/10.0.0.0%2F24")
	b.Until("the title", "document.querySelector('h1').innerText.startsWith('dns')")
	if text := b.Text(".sentence"); text != "eth1 ingress: each host in 10.0.0.0/24 gets 2mbit" {
		t.Errorf("the rule is described as %q", text)
	}
	drawn := "document.querySelector('.plot canvas').toDataURL()"
	var before string
	b.Until("a plot", "document.querySelector('.legend')?.innerText.includes('5.00mbit')")
	b.Eval(drawn, &before)
	b.Until("the plot to move", fmt.Sprintf("%s !== %q", drawn, before))
	b.Until("the text of the plot", "document.querySelector('.plot canvas').getAttribute('aria-label').includes('9.00mbit pass and 5.00mbit are dropped')")
	b.Until("buckets", "document.querySelectorAll('.within tbody tr').length === 12 && document.querySelector('.within tbody').innerText.startsWith('10.0.0.7')")
	b.Click(".within tbody tr:nth-child(2) button")
	b.Until("an explanation", "document.querySelector('.said pre')?.innerText.startsWith('packets to 10.0.0.10 go out by eth0')")
	b.Eval("[...document.querySelectorAll('button')].find((b) => b.innerText === 'Measure').click()", nil)
	b.Until("round-trip times", "[...document.querySelectorAll('.mini tbody')].some((b) => b.innerText.includes('all\\t194 ms\\t22 ms\\t2.0%') && b.innerText.includes('<i>10.0.0.9</i>'))")
	b.Until("events", "document.querySelectorAll('.side .events li').length === 2 && document.querySelector('.side .events').innerText.includes('<b>10.0.0.10</b>')")
	b.Click(".segments button:nth-child(3)")
	b.Until("no history", "document.querySelector('.detail').innerText.includes('No history: report: this server records nothing')")
	b.Click(".segments button:nth-child(4)")
	b.Until("a day", "document.querySelector('.detail').innerText.includes('95th percentile: 16.8mbit. The committed rate was delivered in 8\u202f630 of 8\u202f640 intervals.')")
	b.Eval("location.reload()", nil)
	b.Until("the same rule", "document.querySelector('h1')?.innerText.startsWith('dns')")
	f.set(func() { f.measures = true })
	b.Eval("location.reload()", nil)
	b.Until("round-trip times without a click", "document.querySelector('h1')?.innerText.startsWith('dns') && [...document.querySelectorAll('.mini tbody')].some((b) => b.innerText.includes('all\\t194 ms'))")
	b.Open(f.URL + "/#/rule/eth9/egress/10.0.0.0%2F8")
	b.Until("a rule that is gone", "document.querySelector('.empty')?.innerText.includes('no such rule')")
	b.Open(f.URL + "/#/rule/%E0%A4%A/x") // which is no valid address
	b.Until("all rules", "document.querySelector('.list')")
	for _, p := range b.Problems() {
		if !strings.Contains(p, "/api/v1/report") && !strings.Contains(p, "of=eth9") { // which this server refused
			t.Errorf("the console says: %s", p)
		}
	}
	b.OnlyAsked(f.URL)
}

// A rate is changed with the token, after a look at before and after, and confirmed or rolled back.
func TestChange(t *testing.T) {
	f, b := open(t, offender)
	f.set(func() { f.token = "let-me-change-this" })
	asked := func(want ...string) {
		t.Helper()
		b.Until("the dialog to close", "!document.querySelector('dialog')")
		f.mu.Lock()
		defer f.mu.Unlock()
		if fmt.Sprint(f.asked) != fmt.Sprint(want) {
			t.Errorf("changes: %q, want %q", f.asked, want)
		}
	}
	fill := func(id, text string) {
		t.Helper()
		b.Until(id, "document.getElementById('"+id+"')")
		b.Eval(fmt.Sprintf("document.getElementById(%q).value = %q", id, text), nil)
	}
	fill("new-rate", "10parsecs")
	b.Click(".rate-form button")
	b.Until("before and after", "document.querySelector('dialog')?.innerText.includes('50mbit') && document.querySelector('dialog').innerText.includes('10parsecs')")
	b.Click("dialog .primary")
	fill("token", "wrong")
	b.Click("dialog:last-of-type .primary")
	b.Until("the token to be asked for again", "document.querySelectorAll('dialog').length === 2 && document.querySelector('dialog:last-of-type').innerText.includes('was refused')")
	fill("token", "let-me-change-this")
	b.Click("dialog:last-of-type .primary")
	b.Until("the error", "document.querySelector('dialog .wrong')?.innerText.includes('unknown unit')")
	b.Key(kb.Escape)
	asked()

	fill("new-rate", "10kbit")
	b.Click(".rate-form button")
	b.Until("a doubt", "document.querySelector('dialog')?.innerText.includes('100% less than now. Is the unit right?')")
	b.Key(kb.Escape)
	asked()
	fill("new-rate", "25mbit")
	b.Click(".rate-form button")
	b.Until("the command", "document.querySelector('dialog')?.innerText.includes('shapectl set --kind rule --rate 25mbit --confirm 60s eth0 egress 10.1.0.66/32')")
	b.Click("dialog .primary")
	asked(`set {"confirm":"60s","device":"eth0","direction":"egress","kind":"rule","network":"10.1.0.66/32","rate":"25mbit"}`)
	b.Until("what is pending", "document.querySelector('.banner .countdown')?.innerText.startsWith('0:')")
	b.Until("what changed", `document.querySelector('.banner').innerText.includes('eth0 egress 10.1.0.66 ("mallory"): 1 rule changed.')`)
	b.Click(".banner .primary")
	b.Until("nothing to be pending", "!document.querySelector('.banner')")
	f.set(func() { f.asked, f.reverts = f.asked[1:], new(uint64(20e9)) })
	b.Until("what is pending", "document.querySelector('.banner .countdown')")
	b.Eval("[...document.querySelectorAll('.banner button')].find((b) => b.innerText === 'Roll back').click()", nil)
	b.Until("nothing to be pending", "!document.querySelector('.banner')")
	asked("confirm {}", "rollback {}")

	var kept string
	if b.Eval("[localStorage.length, sessionStorage.getItem('shapectl-token'), document.cookie].join()", &kept); kept != "0,let-me-change-this," {
		t.Errorf("kept: %s", kept)
	}
	b.Open(f.URL + "/?again#/pool/ap-1")
	b.Until("a pool", "document.querySelector('h1')?.innerText.startsWith('ap-1')")
	f.set(func() { f.asked = nil })
	fill("new-rate", "120mbit")
	b.Eval("document.getElementById('revert').value = ''", nil)
	b.Click(".rate-form button")
	b.Until("the command", "document.querySelector('dialog')?.innerText.includes('shapectl set --kind pool --rate 120mbit ap-1')")
	b.Click("dialog .primary")
	asked(`set {"kind":"pool","named":"ap-1","rate":"120mbit"}`)
	var problems []string // the browser writes each refusal to the console
	for _, p := range b.Problems() {
		if !strings.Contains(p, "401") && !strings.Contains(p, "400") {
			problems = append(problems, p)
		}
	}
	if len(problems) > 0 {
		t.Errorf("the console says: %s", problems)
	}
}

// Without rules, without rights, without a server, and with another version of it, the page says so.
func TestStates(t *testing.T) {
	f := newFake(t, nil)
	b := browser.New(t)
	b.Open(f.URL)
	b.Until("no rules", "document.querySelector('.empty')?.innerText.includes('No limits yet')")
	f.set(func() { f.fails = http.StatusNotImplemented })
	b.Until("an error", "document.querySelector('.banner.bad')?.innerText.includes('permission denied')")
	f.set(func() { f.fails, f.version = 0, "2" })
	b.Until("another version", "document.querySelector('.banner')?.innerText.includes('was updated')")
	f.set(func() { f.fails = http.StatusNotImplemented })
	b.Open(f.URL + "/?new")
	b.Until("no rights", "document.querySelector('.empty')?.innerText.includes('group shapectl')")
	f.set(func() { f.fails = http.StatusUnauthorized })
	b.Until("the token for reading", "document.querySelector('.empty')?.innerText.includes('needs a token')")
	f.set(func() { f.fails, f.limits = 0, town() })
	b.Until("rules", "document.querySelector('.list tbody tr')")
	f.set(func() { f.limits[4].out = true })
	b.Until("a rule that is not in force", "document.querySelector('.banner.bad')?.innerText.includes('not in force')")
	f.Listener.Close()
	f.CloseClientConnections()
	b.Until("no server", "document.getElementById('notices').innerText.includes('has not answered since')")
	b.Until("the state", "document.getElementById('live').innerText === 'no answer'")
}

// Thousands of rules do not become thousands of lines.
func TestManyRules(t *testing.T) {
	rules := make([]limit, 5000)
	for i := range rules {
		rules[i] = rule("eth0", policy.Egress, fmt.Sprintf("10.%d.%d.0/24", i/250, i%250), fmt.Sprintf("home-%d", i), 10*mbit, uint64(i)*1000, 0)
	}
	rules[4321] = rule("eth0", policy.Egress, "10.17.71.0/24", "mallory", 10*mbit, 10*mbit, 50*mbit)
	f := newFake(t, rules)
	b := browser.New(t)
	b.Open(f.URL)
	b.Until("the offender", firstLine+" === 'mallory'")
	b.Until("100 lines", "document.querySelectorAll('.list tbody tr').length === 100 && document.querySelector('.summary').innerText.includes('100 of 5\u202f000 names')")
	b.Click(".summary button")
	b.Until("100 more", "document.querySelectorAll('.list tbody tr').length === 200")
	b.Harmless(f.URL)
}

// It fits each width, in all views, and the keyboard and screen readers have all of it.
func TestAccess(t *testing.T) {
	f, b := open(t, "")
	for _, width := range []int{360, 768, 1440} {
		b.Size(width, 900, "dark")
		for _, hash := range []string{"#/", "#/pools", "#/name/alice", offender, "#/rule/eth1/ingress/10.0.0.0%2F24", "#/events"} {
			b.Eval("location.hash = '"+hash+"'", nil)
			b.Until("the view", "document.querySelector('.tile, .events li, .pair')")
			var wide []string
			b.Eval("[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > (e.closest('.list')?.getBoundingClientRect().right ?? innerWidth) + 1 && !e.closest('.hidden, .scroll, .who a, dialog')).slice(0, 5).map((e) => e.outerHTML.slice(0, 120))", &wide)
			if len(wide) > 0 {
				t.Errorf("%s at %d px: wider than its card or the screen: %s", hash, width, wide)
			}
		}
	}
	b.Until("dark colours", "document.documentElement.dataset.theme === 'dark'")
	b.Click("#theme")
	b.Eval("location.reload()", nil)
	b.Until("light colours", "document.documentElement?.dataset.theme === 'light' && document.getElementById('theme')?.title === 'Dark colours'")

	b.Open(f.URL + "/?keys#/")
	b.Until("the offender", firstLine+" === 'mallory'")
	b.Key(kb.Tab)
	b.Until("the skip link", "document.activeElement.id === 'skip' && document.activeElement.getBoundingClientRect().top >= 0")
	b.Key(kb.Enter)
	b.Until("the focus in the main part", "document.activeElement.id === 'main'")
	b.Key("/")
	b.Until("the focus in the search", "document.activeElement.id === 'search'")
	reached := func(what, expression string) {
		t.Helper()
		for range 40 {
			var is bool
			if b.Eval(expression, &is); is {
				return
			}
			b.Key(kb.Tab)
		}
		t.Errorf("Tab does not reach %s", what)
	}
	choose(b, "kind", "rule")
	b.Until("rules", "document.querySelector('.list').innerText.includes('2mbit/host')")
	reached("the first rule", "document.activeElement.matches('.who a')")
	b.Key(kb.Enter)
	b.Until("the rule", "document.activeElement.id === 'title'")
	reached("the plot", "document.activeElement.matches('.plot-frame')")
	b.Until("a second value", "document.querySelector('.legend')")
	b.Key(kb.ArrowLeft)
	b.Until("the value at the cursor", "document.querySelector('.plot output').textContent.includes('passed 49.0mbit')")
	reached("the rate", "document.activeElement.id === 'new-rate'")

	b.Open(f.URL + "/?roles#/")
	b.Until("the offender", firstLine+" === 'mallory'")
	for _, width := range []int{360, 1440} {
		b.Size(width, 900, "light")
		roles := b.Roles()
		for _, want := range []string{"banner", "navigation Pages", "main", "search", "heading Rules, worst first", "table Rules", "columnheader Use now", "rowheader mallory", "link mallory", "searchbox Search", "button Pause", "button Dark colours", "status"} {
			if !strings.Contains(roles, "\n"+want) {
				t.Errorf("at %d px, no %q in the accessibility tree: %s", width, want, roles)
			}
		}
	}
	b.Harmless(f.URL)
}

// The files ask for nothing elsewhere, and have nothing inline.
func TestFiles(t *testing.T) {
	names, err := fs.Glob(files, "*")
	testenv.Must(t, err)
	elsewhere := regexp.MustCompile(`(?i)https?://[^"'\s]*|<script(>| [^>]*>[^<])|<style|style="|\son[a-z]+="|innerHTML|outerHTML|insertAdjacentHTML|\beval\(|document\.write`)
	for _, name := range names {
		content, err := files.ReadFile(name)
		testenv.Must(t, err)
		for _, found := range elsewhere.FindAllString(string(content), -1) {
			if found != "http://www.w3.org/2000/svg" && found != "http://localhost" && found != "https://github.com/leeoniya/uPlot" {
				t.Errorf("%s has %s", name, found)
			}
		}
	}
	get := func(method, path, tag string) *http.Response {
		w, r := httptest.NewRecorder(), httptest.NewRequest(method, path, nil)
		r.Header.Set("If-None-Match", tag)
		Handler().ServeHTTP(w, r)
		return w.Result()
	}
	page := get("GET", "/", "")
	if page.StatusCode != 200 || page.Header.Get("Content-Type") != "text/html; charset=utf-8" || page.Header.Get("Content-Security-Policy") != Policy {
		t.Errorf("the page: %d, %v", page.StatusCode, page.Header)
	}
	for what, want := range map[string]int{"GET /app.js": 200, "GET /index.html": 200, "GET /page.go": 404, "GET /../page.go": 404, "POST /": 405} {
		method, path, _ := strings.Cut(what, " ")
		if got := get(method, path, "").StatusCode; got != want {
			t.Errorf("%s: %d, want %d", what, got, want)
		}
	}
	if again := get("GET", "/", page.Header.Get("ETag")); again.StatusCode != http.StatusNotModified {
		t.Errorf("with the tag: %d", again.StatusCode)
	}
}

// TestPictures writes pictures of the page at three widths, light and dark, into the directory SHAPECTL_PICTURES, for
// people to look at. SHAPECTL_PICTURES_ONLY is a part of their names. docs/page.webp is one of them. Without a directory,
// it only sees that the first picture can be made.
func TestPictures(t *testing.T) {
	dir := os.Getenv("SHAPECTL_PICTURES")
	all := dir != ""
	if !all {
		dir = t.TempDir()
	}
	f := newFake(t, town())
	f.events = happened
	b := browser.New(t)
	b.Size(1120, 640, "light")
	b.Open(f.URL + "/?docs#/")
	b.Until("the view", firstLine)
	if all {
		time.Sleep(20 * time.Second) // until the plots have a past
	}
	b.Picture(filepath.Join(dir, "page.webp"))
	if !all {
		b.Harmless(f.URL)
		return
	}
	for _, width := range []int{360, 820, 1440} {
		for _, theme := range []string{"light", "dark"} {
			b.Size(width, 1100, theme)
			for name, hash := range map[string]string{"list": "", "pools": "#/pools", "rule": "#/rule/eth0/egress/10.1.0.66%2F32", "hosts": "#/rule/eth1/ingress/10.0.0.0%2F24", "events": "#/events", "day": "#/rule/eth0/egress/10.2.0.9%2F32", "change": "#/rule/eth0/egress/10.2.0.9%2F32"} {
				if only := os.Getenv("SHAPECTL_PICTURES_ONLY"); only != "" && !strings.Contains(fmt.Sprintf("%s-%d-%s", name, width, theme), only) {
					continue
				}
				f.set(func() { f.reverts = nil })
				if name == "pools" || name == "rule" {
					f.set(func() { f.reverts = new(uint64(47e9)) })
				}
				b.Open(f.URL + "/?" + name + hash)
				b.Until("the view", "document.querySelector('.tile, .events')")
				time.Sleep(4 * time.Second)
				switch name {
				case "hosts":
					b.Click(".ask button")
					b.Eval("[...document.querySelectorAll('button')].filter((b) => ['Count', 'Measure'].includes(b.innerText)).forEach((b) => b.click())", nil)
					time.Sleep(3 * time.Second)
				case "day":
					b.Click(".segments button:nth-child(4)")
					time.Sleep(time.Second)
				case "change":
					b.Eval("document.getElementById('new-rate').value = '500kbit'; document.querySelector('.rate-form button').click()", nil)
				}
				b.Picture(filepath.Join(dir, fmt.Sprintf("page-%s-%d-%s.png", name, width, theme)))
			}
		}
	}
	b.Harmless(f.URL)
}
