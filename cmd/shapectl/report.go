package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// defaultHistory is what the unit of serve writes. Without it, a report asks serve.
const defaultHistory = "/var/lib/shapectl/history"

type reportOptions struct {
	rule, name, pool string
	since, until     string
	committed        policy.Rate
	html, history    string
}

func reportCommand(e *env) *cobra.Command {
	var o reportOptions
	cmd := &cobra.Command{
		Use:   "report --rule 'DEV DIR NET'|--name NAME|--pool NAME [flags]",
		Short: "Report what a rule or pool delivered over time",
		Long: `Report what a rule, all rules with a name, or a pool passed and dropped over time, and whether the committed rate was
delivered. 'shapectl serve' records the history.

The committed rate is the guarantee. Without a guarantee, it is the rate, unless the rule draws from a pool.
--committed checks another rate. Rules with a rate for each host, subnet or flow are checked only with --committed.

An interval of 10s delivered the committed rate if nothing was dropped in it, or if at least as much passed as the rate
allows in that time, less one burst. Otherwise the interval is missed if that rate was offered in it and in the intervals
before and after it: packets came in bursts, or a pool was full. If less was offered, nobody can judge.
Intervals without traffic do not count. Gaps are times without readings. Rates and checks leave them out, but sums
include the bytes counted meanwhile.

The report has the 95th percentile of 5-minute averages, as used for billing, and of intervals. --html writes a page
with a picture to a file.

--since and --until take an age such as 24h or 7d, or a time such as 2026-11-23, '2026-11-23 14:00' or 14:00.`,
		Example: `  shapectl report --name alice --since 7d --html alice.html
  shapectl report --rule 'eth0 egress 10.0.0.7' --since 24h
  shapectl report --pool uplink --committed 400mbit -j`,
		Args: args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			set := cmd.Flags().Changed
			given := 0
			for _, name := range []string{"rule", "name", "pool"} {
				if set(name) {
					given++
				}
				if set(name) && cmd.Flag(name).Value.String() == "" {
					return inputf("report: --%s is empty; name a rule or pool", name)
				}
			}
			switch {
			case given == 0:
				return inputf("report: choose one of --rule 'DEV ingress|egress CIDR', --name NAME and --pool NAME")
			case given > 1:
				return inputf("report: give one of --rule, --name and --pool")
			case e.json && o.html != "":
				return inputf("report: -j and --html exclude each other; give one of them")
			case set("html") && o.html == "" || set("history") && o.history == "":
				return inputf("report: --html and --history need the name of a file")
			case set("committed") && o.committed == policy.Unlimited:
				return inputf("report: --committed unlimited cannot be checked; write a rate such as 10mbit")
			}
			return e.report(o, time.Now())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.rule, "rule", "", "the `rule`: device, direction and network, in quotes")
	flags.StringVar(&o.name, "name", "", "all rules with this `name`, and the pool with this name")
	flags.StringVar(&o.pool, "pool", "", "the `pool`")
	flags.StringVar(&o.since, "since", "24h", "from this `time` on")
	flags.StringVar(&o.until, "until", "", "until this `time`; default: now")
	once(flags, &o.committed, "committed", "check this rate instead of the rule's or pool's own")
	flags.Lookup("committed").DefValue = ""
	flags.StringVar(&o.html, "html", "", "write a page to this `file`")
	must(cmd.MarkFlagFilename("html", "html"))
	flags.StringVar(&o.history, "history", "", "read this `file`; default: "+defaultHistory+", or else the memory of a running serve")
	must(cmd.MarkFlagFilename("history"))
	return cmd
}

func (e *env) report(o reportOptions, now time.Time) error {
	until, err := parseMoment(cmp.Or(o.until, "0s"), now)
	if err != nil {
		return inputf("report: --until: %w", err)
	}
	since, err := parseMoment(o.since, now)
	if err != nil {
		return inputf("report: --since: %w", err)
	}
	if until.After(now) {
		until = now
	}
	if !since.Before(until) {
		return inputf("report: --since %s is not before --until %s; give an earlier time", o.since, cmp.Or(o.until, "now"))
	}
	match, err := o.match()
	if err != nil {
		return inputf("report: %w", err)
	}
	if e.netns != "" && o.history == "" && e.contents == nil { // what is at the usual places is of another one
		return inputf("report: the history of network namespace %s is elsewhere; name the file that its serve records by --history", plain.Line(e.netns))
	}
	deliverer := report.Deliverer{Since: since, Until: until, Committed: o.committed}
	file, from := cmp.Or(o.history, defaultHistory), "the history"
	if e.history == nil {
		from = file
	}
	var found report.Deliveries
	if err := e.queryHistory(file, history.Query{From: since, To: until, Match: match}, deliverer.Add); o.history == "" && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission)) {
		if found, err = o.fromServe(since, until); err != nil {
			return err
		}
	} else if err != nil {
		return fmt.Errorf("report: %w", err)
	} else {
		found = deliverer.Deliveries()
	}
	if len(found) == 0 {
		return inputf("report: %s has no readings of %s from %s to %s; check the name, or run 'shapectl serve' to record them",
			from, o.what(), since.Format(time.DateTime), until.Format(time.DateTime))
	}
	if o.committed != 0 && len(found) > 1 && !found.BothDirections() { // it is the rate of one of them
		return inputf("report: --committed %s is the rate of one rule or pool, but %s match: %s; choose one by --rule 'DEV DIRECTION NETWORK' or --pool", o.committed, found.Count(), found.Names())
	}
	if o.html != "" {
		if err := writePage(o.html, found); err != nil {
			return fmt.Errorf("report: write the page: %w", err)
		}
		_, err := fmt.Fprintf(e.out, "wrote %s, with %s\n", plain.Line(o.html), found.Count())
		return err
	}
	return e.print(found, found.Text)
}

// queryHistory reads a history: that of this process if it records one, else that in a file.
func (e *env) queryHistory(file string, q history.Query, add func(history.Interval) error) error {
	var tooMany error
	visit := func(it history.Interval) {
		if tooMany == nil {
			tooMany = add(it)
		}
	}
	var err error
	switch {
	case e.history != nil:
		err = e.history.Query(q, visit)
	case e.contents != nil:
		err = errors.New("this server keeps no history; start it without --history none, and ask it about its own namespace")
	default:
		var r *history.Reader
		if r, err = history.NewReader(file); err == nil {
			err = r.Query(q, visit)
		}
	}
	if err == nil {
		err = tooMany
	}
	if err == nil || errors.Is(err, fs.ErrPermission) {
		return err
	}
	return inputError(err)
}

// fromServe asks for a report, as serve may keep its history in memory, or in a file that only root can read.
func (o *reportOptions) fromServe(since, until time.Time) (found report.Deliveries, err error) {
	query := url.Values{"since": {since.Format(time.RFC3339Nano)}, "until": {until.Format(time.RFC3339Nano)}}
	for name, value := range map[string]string{"rule": o.rule, "name": o.name, "pool": o.pool} {
		if value != "" {
			query.Set(name, value)
		}
	}
	if o.committed != 0 {
		query.Set("committed", o.committed.String())
	}
	namespace, err := netns.ID("")
	if err != nil {
		return nil, err
	}
	answer, text, err := askServe("/api/v1/report?"+query.Encode(), http.Header{netnsHeader: {namespace}}, nil)
	if answer == nil {
		return nil, fmt.Errorf("report: there is no %s to read; name a file by --history, or %w", defaultHistory, err)
	}
	if err != nil {
		return nil, err // of serve, in its words
	}
	return found, json.Unmarshal(text, &found)
}

// match finds the rules or pools that are meant.
func (o *reportOptions) match() (func(*history.Series) bool, error) {
	switch {
	case o.pool != "":
		return func(s *history.Series) bool { return s.Pool == o.pool }, nil
	case o.name != "":
		return func(s *history.Series) bool { return s.Name == o.name || s.Pool == o.name }, nil
	}
	words := strings.Fields(o.rule)
	if len(words) != 3 {
		return nil, fmt.Errorf("--rule %q does not have three words; write device, direction and network, such as 'eth0 egress 10.0.0.7'", o.rule)
	}
	direction, err := policy.ParseDirection(words[1])
	if err != nil {
		return nil, err
	}
	networks, err := policy.ParseNetworks(words[2])
	if err != nil {
		return nil, err
	}
	var keys []report.Key
	for _, p := range networks {
		keys = append(keys, report.Key{Device: words[0], Direction: direction.String(), Network: p.String()})
	}
	return func(s *history.Series) bool { return slices.Contains(keys, s.Key) }, nil
}

// what names what is meant.
func (o *reportOptions) what() string {
	switch {
	case o.pool != "":
		return "pool " + plain.Line(o.pool)
	case o.name != "":
		return "the name " + plain.Line(o.name)
	}
	return plain.Line(o.rule)
}

// parseMoment reads a time, or how long ago it was.
func parseMoment(text string, now time.Time) (time.Time, error) {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		const most = 36500
		if n, err := strconv.ParseFloat(days, 64); err == nil && n >= 0 && n <= most {
			return now.Add(-time.Duration(n * float64(24*time.Hour))), nil
		}
	}
	if ago, err := time.ParseDuration(text); err == nil {
		if ago < 0 {
			return now, fmt.Errorf("%s is in the future", text)
		}
		return now.Add(-ago), nil
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04:05", "2006-01-02T15:04", time.DateTime, "2006-01-02 15:04", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, text, now.Location()); err == nil {
			return t, nil
		}
	}
	for _, layout := range []string{"15:04", time.TimeOnly} {
		if t, err := time.ParseInLocation(layout, text, now.Location()); err == nil {
			t = time.Date(now.Year(), now.Month(), now.Day(), t.Hour(), t.Minute(), t.Second(), 0, now.Location())
			if t.After(now) {
				t = t.AddDate(0, 0, -1)
			}
			return t, nil
		}
	}
	return now, fmt.Errorf("%.64q is not a time; write an age such as 24h or 7d, or a time such as '2026-11-23 14:00'", text)
}

// writePage writes a page as a whole or not at all.
func writePage(path string, found report.Deliveries) error {
	var page bytes.Buffer
	if err := found.HTML(&page, hostname()); err != nil {
		return err
	}
	if path == "-" {
		return errors.New("name a file, not -")
	}
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() { // such as /dev/stdout
		return os.WriteFile(path, page.Bytes(), 0o600)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".shapectl-report-*")
	if err != nil {
		return err
	}
	_, err = io.Copy(f, &page)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
