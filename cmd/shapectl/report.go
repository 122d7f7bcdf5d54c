package main

import (
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
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/serve/page"
	"github.com/shapectl/shapectl/pkg/policy"
)

// defaultHistory is what the unit of serve writes. A report reads it if no serve answers.
const defaultHistory = "/var/lib/shapectl/history"

type reportOptions struct {
	since, until  string
	committed     policy.Rate
	html, history string
	verbose       bool
}

func reportCommand(e *env) *cobra.Command {
	var o reportOptions
	cmd := &cobra.Command{
		Use:   "report NAME|ADDRESS|CIDR|DEV [ingress|egress [CIDR|any]] [flags]",
		Short: "Report what rules and pools delivered over time",
		Long: `Report what rules and pools passed and dropped over time, and whether the committed rate was delivered.
'shapectl serve' records the history. NAME is that of rules such as those of a subscriber, of a pool, or of a device.
The report has a part for each direction. Rules that have only the rate of the same pool are one part, and so are all
rules of a device. Pools that only these rules draw from are parts, too. The first line says whether the committed
rates were delivered. With several parts, each has a line; --verbose shows all of each.

The committed rate is the guarantee. Without a guarantee, it is the rate, unless the rule draws from a pool.
--committed checks another rate. Rules with a rate for each host, subnet or flow are checked only with --committed.

An interval of 10s delivered the committed rate if nothing was dropped in it, or if at least as much passed as the rate
allows in that time, less one burst. Otherwise the interval is missed if that rate was offered in it and in the intervals
before and after it: packets came in bursts, or a pool was full. If less was offered, nobody can judge.
Intervals without traffic do not count. Gaps are times without readings. Rates and checks leave them out, but sums
include the bytes counted meanwhile.

The report has the 95th percentile of 5-minute averages, as used for billing. --html writes a page with a picture to a
file.

--since and --until take an age such as 24h or 7d, or a time such as 2026-11-23, '2026-11-23 14:00' or 14:00.`,
		Example: `  shapectl report alice --since 7d --html alice.html
  shapectl report eth0 egress 10.0.0.7 --since 24h
  shapectl report uplink --committed 400mbit -j`,
		Args:              args(1, 3),
		ValidArgsFunction: e.completeNamed(false, nil),
		RunE: func(cmd *cobra.Command, given []string) error {
			set := cmd.Flags().Changed
			switch {
			case e.json && o.html != "":
				return inputf("report: -j and --html exclude each other; give one of them")
			case set("committed") && o.committed == policy.Unlimited:
				return inputf("report: --committed unlimited cannot be checked; write a rate such as 10mbit")
			}
			return e.report(given, o, time.Now())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.since, "since", "24h", "from this `time` on")
	flags.StringVar(&o.until, "until", "", "until this `time`; default: now")
	once(flags, &o.committed, "committed", "check this rate instead of the rule's or pool's own")
	flags.Lookup("committed").DefValue = ""
	flags.BoolVarP(&o.verbose, "verbose", "v", false, "show all of each part")
	flags.StringVar(&o.html, "html", "", "write a page to this `file`")
	must(cmd.MarkFlagFilename("html", "html"))
	flags.StringVar(&o.history, "history", "", "read the history at this `path`; default: that of a running serve, or else "+defaultHistory)
	must(cmd.MarkFlagDirname("history"))
	return cmd
}

func (e *env) report(given []string, o reportOptions, now time.Time) error {
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
	want, err := parseTarget("report", "", given)
	if err != nil {
		return err
	}
	q := history.Request{Since: since, Until: until, Device: want.name, Committed: uint64(o.committed)}
	if want.direction != nil {
		q.Direction = want.direction.String()
	}
	networks := want.networks
	if networks == nil {
		q.Name, q.Device = want.name, ""
		networks, _ = policy.ParseNetworks(q.Name) // it may be an address
	}
	for _, n := range networks {
		q.Networks = append(q.Networks, policy.CIDR(n))
	}
	if e.netns != "" && o.history == "" && e.contents == nil { // what is at the usual places is of another one
		return inputf("report: the history of network namespace %s is elsewhere; name the directory that its serve records by --history", plain.Line(e.netns))
	}
	found, err := e.findDeliveries(given, o, q)
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return inputf("report: the history has no readings of %q from %s to %s; check the name, or run 'shapectl serve' to record them",
			strings.Join(given, " "), since.Format(time.DateTime), until.Format(time.DateTime))
	}
	if o.html != "" {
		title, text, charts := found.Page(hostname())
		if err := writeFile(o.html, func(w io.Writer) error { return page.WriteChart(w, title, text, charts) }); err != nil {
			return fmt.Errorf("report: write the page: %w", err)
		}
		_, err := fmt.Fprintln(e.out, "wrote", plain.Line(o.html))
		return err
	}
	return e.print(found, func(w io.Writer) error { return found.Text(w, o.verbose, e.columns) })
}

// findDeliveries asks a running serve before the usual directory, which may be of an earlier one.
func (e *env) findDeliveries(given []string, o reportOptions, q history.Request) (report.Deliveries, error) {
	var unasked error
	if o.history == "" && e.contents == nil && e.history == nil {
		found, asked, err := askReport(given, o, q)
		if asked {
			return found, err
		}
		unasked = err
	}
	found, err := e.deliveries(cmp.Or(o.history, defaultHistory), q)
	if unasked != nil && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission)) {
		err = fmt.Errorf("there is no %s to read; name a directory by --history, or %w", defaultHistory, unasked)
	}
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	return found, nil
}

// deliveries reads a history: that of this process if it records one, else that at a path.
func (e *env) deliveries(path string, q history.Request) (report.Deliveries, error) {
	open := func() (*history.Reader, error) { return history.NewReader(path) }
	switch {
	case e.history != nil:
		open = e.history.Reader
	case e.contents != nil:
		return nil, inputf("this server keeps no history; start it without --history none, and ask it about its own namespace")
	}
	r, err := open()
	if err != nil {
		return nil, inputError(err)
	}
	defer r.Close()
	found, err := r.Deliveries(q)
	switch {
	case errors.Is(err, history.ErrUnknown):
		return nil, missingf("%w", err)
	case err != nil:
		return nil, inputError(err)
	}
	return found, nil
}

// askReport asks a running serve, as it may keep its history in memory, or where only root can read it. It reports whether one answers.
func askReport(given []string, o reportOptions, q history.Request) (found report.Deliveries, asked bool, err error) {
	query := url.Values{"since": {q.Since.Format(time.RFC3339Nano)}, "until": {q.Until.Format(time.RFC3339Nano)}}
	names := []string{"named", "direction", "network"}
	if len(given) == len(names) {
		names[0] = "device"
	}
	for i, value := range given {
		query.Set(names[i], value)
	}
	if o.committed != 0 {
		query.Set("committed", o.committed.String())
	}
	answer, text, err := askServe("/api/v1/report?"+query.Encode(), http.Header{}, nil)
	if err == nil {
		err = json.Unmarshal(text, &found) // else the error is in the words of serve
	}
	return found, answer != nil, err
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
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04", time.DateTime, "2006-01-02 15:04", time.DateOnly, "15:04"} {
		t, err := time.ParseInLocation(layout, text, now.Location())
		if err != nil {
			continue
		}
		if t.Year() == 0 { // the last time that it was that time
			t = time.Date(now.Year(), now.Month(), now.Day(), t.Hour(), t.Minute(), 0, 0, now.Location())
			if t.After(now) {
				t = t.AddDate(0, 0, -1)
			}
		}
		return t, nil
	}
	return now, fmt.Errorf("%.64q is not a time; write an age such as 24h or 7d, or a time such as '2026-11-23 14:00'", text)
}

// checkRegular refuses to write into a link, which another user may have put there, or a FIFO.
func checkRegular(path string) error {
	if info, err := os.Lstat(path); path == "-" || err == nil && !info.Mode().IsRegular() {
		return inputf("%s is not a regular file; name one that is, or that does not exist", plain.Line(path))
	}
	return nil
}

// writeFile writes a file as a whole or not at all.
func writeFile(path string, write func(io.Writer) error) error {
	if err := checkRegular(path); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".shapectl-*")
	if err != nil {
		return err
	}
	if err = errors.Join(write(f), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
