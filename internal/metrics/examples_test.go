package metrics_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.yaml.in/yaml/v4"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/testenv"
)

const examples = "../../examples/"

// A query is one of the dashboard or of the alerts.
type query struct{ where, expr string }

// A dashboard is what the tests need to know of Grafana's JSON.
type dashboard struct {
	UID, Title  string
	Annotations struct {
		List []struct{ Name, Expr string }
	}
	Panels []struct {
		ID         int
		Type       string
		Title      string
		Datasource struct{ Type, UID string }
		GridPos    struct{ H, W, X, Y int }
		Targets    []struct{ Expr, RefID string }
	}
	Templating struct {
		List []struct {
			Name, Type string
			Query      any
			Definition string
		}
	}
	SchemaVersion int
}

func readDashboard(t *testing.T) (d dashboard, queries []query) {
	t.Helper()
	text, err := os.ReadFile(examples + "grafana/shapectl.json")
	testenv.Must(t, err)
	testenv.Must(t, json.Unmarshal(text, &d))
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			queries = append(queries, query{p.Title, target.Expr})
		}
	}
	for _, a := range d.Annotations.List {
		if a.Expr != "" {
			queries = append(queries, query{a.Name, a.Expr})
		}
	}
	return d, queries
}

func alerts(t *testing.T) (queries []query) {
	t.Helper()
	text, err := os.ReadFile(examples + "prometheus/alerts.yaml")
	testenv.Must(t, err)
	var file struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	testenv.Must(t, yaml.Unmarshal(text, &file))
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			queries = append(queries, query{r.Alert, r.Expr})
		}
	}
	return queries
}

var ourName = regexp.MustCompile(`\bshapectl_\w+`)

// All names of metrics in the dashboard and the alerts exist, and each metric of a trouble is in one of them.
func TestExamplesNameMetrics(t *testing.T) {
	d, queries := readDashboard(t)
	for _, v := range d.Templating.List {
		queries = append(queries, query{"variable " + v.Name, v.Definition})
	}
	queries = append(queries, alerts(t)...)
	used := map[string]bool{}
	for _, q := range queries {
		for _, name := range ourName.FindAllString(q.expr, -1) {
			used[name] = true
			if !slices.ContainsFunc(metrics.All(), func(m metrics.Metric) bool { return m.Name == name }) {
				t.Errorf("%s asks for %s, which does not exist", q.where, name)
			}
		}
	}
	if len(used) < 25 {
		t.Errorf("the examples use only %d metrics", len(used))
	}
}

var variable = regexp.MustCompile(`\$\{?(\w+)`)

// The dashboard is as Grafana wants it: panels have ids of their own and places that do not overlap, and the variables
// that they use exist.
func TestDashboard(t *testing.T) {
	d, queries := readDashboard(t)
	if d.UID == "" || d.Title == "" || d.SchemaVersion < 36 {
		t.Errorf("uid %q, title %q, schema %d", d.UID, d.Title, d.SchemaVersion)
	}
	known := []string{"__rate_interval"}
	for _, v := range d.Templating.List {
		known = append(known, v.Name)
	}
	for _, q := range queries {
		for _, v := range variable.FindAllStringSubmatch(q.expr, -1) {
			if !slices.Contains(known, v[1]) {
				t.Errorf("%s uses the variable %s, which does not exist", q.where, v[1])
			}
		}
	}
	for _, q := range queries { // an ISP has twenty thousand pools
		if !regexp.MustCompile(`topk|sum|count|min|max|shapectl_bucket_level|shapectl_change`).MatchString(q.expr) && regexp.MustCompile(`shapectl_(rule|pool)_`).MatchString(q.expr) {
			t.Errorf("%s has a series for each rule or pool: %s", q.where, q.expr)
		}
	}
	ids, taken := map[int]bool{}, map[[2]int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] || p.ID == 0 {
			t.Errorf("%s has an id that another panel has, or none", p.Title)
		}
		ids[p.ID] = true
		if p.Type != "row" && (p.Datasource.UID != "${datasource}" || len(p.Targets) == 0) {
			t.Errorf("%s has the data source %q and %d queries", p.Title, p.Datasource.UID, len(p.Targets))
		}
		g := p.GridPos
		if g.X < 0 || g.W < 1 || g.X+g.W > 24 {
			t.Errorf("%s is at %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" {
					t.Fatalf("%s and %s overlap", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
	}
}

// The alerts and Prometheus's configuration are valid, and the alerts fire when they should, and only then.
func TestAlerts(t *testing.T) {
	for _, args := range [][]string{
		{"check", "config", examples + "prometheus/prometheus.yml"},
		{"check", "rules", examples + "prometheus/alerts.yaml"},
		{"test", "rules", examples + "prometheus/alerts_test.yaml"},
	} {
		if said := promtool(t, nil, args...); !strings.Contains(said, "SUCCESS") || strings.Contains(said, "FAILED") {
			t.Errorf("promtool %v: %s", args, said)
		}
	}
	text, err := os.ReadFile(examples + "prometheus/alerts_test.yaml")
	testenv.Must(t, err)
	for _, a := range alerts(t) {
		if strings.Count(string(text), "alertname: "+a.where+"\n")+strings.Count(string(text), "alertname: "+a.where+"}") < 2 {
			t.Errorf("alerts_test.yaml does not test when %s fires, and when it does not", a.where)
		}
	}
}

// Prometheus scrapes an exporter, and answers each query of the dashboard and of the alerts from what it got.
func TestPrometheus(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	listener, err := net.Listen("tcp", "127.0.0.1:9824")
	testenv.Must(t, err)
	server := &http.Server{Handler: traffic(t)}
	go server.Serve(listener)
	defer server.Close()

	prometheus := testenv.StartPrometheus(t)
	_, queries := readDashboard(t)
	for i := range queries {
		queries[i].expr = grafanas.Replace(queries[i].expr)
	}
	// The exporter says that all is wrong, so all alerts have something to say but the one about scrapes that fail.
	for _, a := range alerts(t) {
		if a.where != "ShapectlScrapeFails" {
			queries = append(queries, a)
		}
	}
	left := queries
	for deadline := time.Now().Add(time.Minute); len(left) > 0 && time.Now().Before(deadline); time.Sleep(500 * time.Millisecond) {
		left = slices.DeleteFunc(slices.Clone(left), func(q query) bool { return len(prometheus.Query(q.expr)) > 0 })
	}
	for _, q := range left {
		t.Errorf("%s has no data: %s", q.where, q.expr)
	}
	var rules struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
	}
	prometheus.Get("/api/v1/rules", &rules)
	for _, r := range rules.Data.Groups[0].Rules {
		if r.Health != "ok" {
			t.Errorf("alert %s: %s %s", r.Name, r.Health, r.LastError)
		}
	}
}

// traffic is an exporter of rules and pools with all kinds of trouble, whose counters grow.
func traffic(t *testing.T) http.Handler {
	began, failing := time.Now(), errors.New("a device is gone")
	return metrics.New(metrics.Options{Version: "test", Layout: "00", Most: -1, Read: func(context.Context) (*live.Reading, error) {
		now, n := everything(), 1000+uint64(time.Since(began).Milliseconds())
		now.Time, now.Slots.InUse = time.Now(), now.Slots.All*9/10
		for i := range now.Items {
			it := &now.Items[i]
			it.Place.InForce = false
			for _, counter := range []*uint64{&it.PassedPackets, &it.DroppedBytes, &it.DroppedPackets, &it.ContendedPackets, &it.SpilledPackets,
				&it.GuaranteedBytes, &it.LostBytes, &it.LostPackets, &it.DelayedPackets, &it.MarkedPackets} {
				*counter = n
			}
			it.PassedBytes = 2 * n
			if it.Shadow != nil {
				it.Shadow.ExcessBytes = n
			}
		}
		return now, failing
	}})
}

// grafanas replaces variables as Grafana does.
var grafanas = strings.NewReplacer("$__rate_interval", "10s", "$instance", ".*", "$device", ".*", "$direction", ".*", "$name", ".*", "$pool", ".*")
