package testenv

import (
	"bufio"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A Prometheus is Debian's, in the test's network namespace, with the examples' configuration.
type Prometheus struct{ tb testing.TB }

// StartPrometheus starts one that scrapes 127.0.0.1:9824 each second. The calling thread must be in a namespace of the
// test with its loopback device up.
func StartPrometheus(tb testing.TB) *Prometheus {
	tb.Helper()
	if _, err := exec.LookPath("prometheus"); err != nil {
		Skip(tb, "needs Debian's package prometheus")
	}
	dir, examples := tb.TempDir(), filepath.Join(repository(tb), "examples/prometheus")
	config, err := os.ReadFile(filepath.Join(examples, "prometheus.yml"))
	Must(tb, err)
	faster := strings.NewReplacer("scrape_interval: 15s", "scrape_interval: 1s", "- alerts.yaml", "- "+filepath.Join(examples, "alerts.yaml"))
	text := "global: {evaluation_interval: 1s}\n" + faster.Replace(string(config))
	Must(tb, os.WriteFile(dir+"/prometheus.yml", []byte(text), 0o644))
	log, err := os.Create(dir + "/log")
	Must(tb, err)
	cmd := exec.Command("prometheus", "--config.file="+dir+"/prometheus.yml", "--storage.tsdb.path="+dir+"/data", "--web.listen-address=127.0.0.1:9090")
	cmd.Stdout, cmd.Stderr = log, log
	Must(tb, cmd.Start())
	tb.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		log.Close()
		if said, _ := os.ReadFile(dir + "/log"); tb.Failed() {
			tb.Logf("Prometheus says: %s", said)
		}
	})
	return &Prometheus{tb}
}

// Query returns the values that an expression has now: none until Prometheus has started. It ends the test if the
// expression is wrong.
func (p *Prometheus) Query(expr string) (values []string) {
	p.tb.Helper()
	var answer struct {
		Status, Error string
		Data          struct {
			Result []struct{ Value [2]any } // the time, and the value as text
		}
	}
	p.Get("/api/v1/query?query="+url.QueryEscape(expr), &answer)
	if answer.Status == "error" {
		p.tb.Fatalf("%s: %s", expr, answer.Error)
	}
	for _, r := range answer.Data.Result {
		values = append(values, r.Value[1].(string))
	}
	return values
}

// Get asks for a page, and leaves answer as it is until Prometheus has started.
func (p *Prometheus) Get(path string, answer any) {
	p.tb.Helper()
	c, err := net.Dial("tcp", "127.0.0.1:9090") // not by http.Client, which dials on a thread in another namespace
	if errors.Is(err, unix.ECONNREFUSED) {
		return
	}
	Must(p.tb, err)
	defer c.Close()
	request, err := http.NewRequest("GET", "http://127.0.0.1:9090"+path, nil)
	Must(p.tb, err)
	Must(p.tb, request.Write(c))
	got, err := http.ReadResponse(bufio.NewReader(c), request)
	Must(p.tb, err)
	defer got.Body.Close()
	if got.StatusCode != http.StatusServiceUnavailable {
		Must(p.tb, json.NewDecoder(got.Body).Decode(answer))
	}
}
