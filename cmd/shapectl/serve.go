package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/events"
	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/leases"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/internal/reconciler"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/sandbox"
	"github.com/shapectl/shapectl/internal/serve"
	"github.com/shapectl/shapectl/internal/serve/page"
	"github.com/shapectl/shapectl/pkg/loader"
)

// serveOptions are the flags of serve.
type serveOptions struct {
	file, lastGood string
	history        string // the directory; "" for memory, none for none
	historySize    int64
	buckets        int // of which /metrics tells the level
	metrics        int // rules and pools that /metrics has at most; negative for all
	events         bool
	rtt            bool
	rttOneIn       uint32
	cluster        storeFlags
	host           string // in clusters; "" for the usual one
	serve.Options
}

func serveCommand(e *env) *cobra.Command {
	o := serveOptions{metrics: 1000}
	var clusterFlags []string
	listenerFlags := []string{"token-file", "tls-cert", "tls-key", "host", "max-body", "metrics-buckets", "metrics-rules", "events", "rtt", "rtt-one-in"}
	cmd := &cobra.Command{
		Use:   "serve [FILE] [flags]",
		Short: "Limit devices as they appear; serve a page, an API and metrics",
		Long: `Limit devices as they appear, and serve a web page, an API and Prometheus metrics, until stopped. Limits do not
depend on it: they stay in force when it stops. Run one serve in each network namespace.

Devices that appear get the rules that FILE has for them; without FILE, those of the policy that was applied last. A
device appears when it is created, moved into the network namespace, or renamed to a name of the policy. serve changes no
direction that already has rules; 'shapectl apply' does. There are two exceptions. A device that was renamed and has
rules in the pool of its old name gets the rules and the pool of its new name. The rules of hosts with a MAC address
follow the neighbours of the device, with a message for each address, while the pool of the host is in force. serve adds pools that
the rules need, and changes none. If the rules need fq and the device lacks it, serve sets it up with --setup-fq.
Otherwise it warns, and sets no rules there. Devices whose rules could not be set are tried again within ten seconds.

If a pool has no room for the guarantees of a device, the device gets its rules without them, as with 'shapectl apply',
and 'shapectl doctor' says so. When there is room, serve gives them, to the oldest device first.

A device that appears after a change of 'shapectl apply' has the rules of the new policy, and after a revert or
rollback those of the old one. While the change is pending, serve deletes nothing, and a device that cannot have both
waits, for example because their 'match' differs. Once the change is confirmed, the device gets the new rules alone. If
they draw from pools, and the change concerns pools, it can then no longer be rolled back.

serve reads FILE, the token and the certificate again on SIGHUP, and FILE when a device appears after the file was
changed. While FILE is not valid, serve uses the copy in --last-good, or else the version that it read before. After a
change that was not confirmed or was rolled back, serve uses the policy from before it, or none if there was none, until
FILE is written again. While there is no FILE, serve sets no rules.

serve attaches programs again that something else has detached, within ten seconds. It adapts the rates of pools with
--adapt-min to the latency of the line. It removes the state of deleted devices and network namespaces, and an hour
after a change that of devices and directions without rules. It keeps what is used of quotas for a reboot. Rollback is
no longer possible once serve has freed that state, changed the rules of a host, given a guarantee, or removed the pool
of a deleted device.

With --cluster-store or SHAPECTL_STORE, serve gets leases on the rates of clusters from a store that hosts share: Redis
(6.2 or later) or Valkey. It reaches the store from the network namespace that it was started in, also with -n. Each host
needs a name that no other host of its clusters has.

Over the Unix socket, root can do everything, and the group shapectl can read. Over 127.0.0.1, all users of this host
can read; changes need the token in --token-file. On an address that other hosts can reach, every request needs the
token and TLS: give --tls-cert, --tls-key and --token-file. With --listen none --socket none, serve listens nowhere.`,
		Example: `  shapectl serve
  shapectl serve /etc/shapectl/policy.yaml
  curl --unix-socket /run/shapectl/serve.sock 'http://localhost/api/v1/show?device=eth0'`,
		Args:              args(0, 1),
		ValidArgsFunction: completePolicy,
		RunE: func(cmd *cobra.Command, given []string) error {
			if len(given) > 0 {
				o.file = given[0]
			}
			o.cluster.orEnvironment(e)
			set := cmd.Flags().Changed
			first := func(flags []string) string { // the first of these that was given; "" for none
				if at := slices.IndexFunc(flags, set); at >= 0 {
					return flags[at]
				}
				return ""
			}
			for _, address := range []*string{&o.Listen, &o.Socket} {
				if *address == "none" {
					*address = ""
				}
			}
			switch {
			case o.file == "" && set("last-good"):
				return inputf("serve: --last-good needs FILE; name the policy, or leave it out")
			case o.historySize < leastHistory:
				return inputf("serve: --history-size %d is too little; use at least %d", o.historySize, leastHistory)
			case !o.listens() && first(listenerFlags) != "":
				return inputf("serve: --%s is for the page, the API and metrics; remove --listen none or --socket none", first(listenerFlags))
			case o.MaxBody < 1<<10 || o.MaxBody > input.MaxBytes:
				return inputf("serve: --max-body %d is out of range; use %d to %d", o.MaxBody, 1<<10, input.MaxBytes)
			case o.buckets < 0 || o.buckets > mostBucketSeries:
				return inputf("serve: --metrics-buckets %d is out of range; use 0 to %d", o.buckets, mostBucketSeries)
			case o.cluster.URL == "" && first(clusterFlags) != "":
				return inputf("serve: --%s needs --cluster-store", first(clusterFlags))
			case !isOneIn(o.rttOneIn):
				return inputf("serve: --rtt-one-in %d is not a power of two up to 65536", o.rttOneIn)
			case set("rtt-one-in") && !o.rtt:
				return inputf("serve: --rtt-one-in needs --rtt")
			}
			return e.serve(o)
		},
	}
	f := cmd.Flags()
	e.addSetupFQ(f)
	f.StringVar(&o.lastGood, "last-good", "", "use the policy in this `file` while FILE is not valid")
	f.StringVar(&o.history, "history", "", "keep the history at this `path`, or none; default: in memory")
	must(cmd.MarkFlagDirname("history"))
	o.historySize, o.MaxBody = history.DefaultBytes, 1<<20
	f.Var(byteCount(&o.historySize), "history-size", "most `bytes` of the history, such as 500mb")
	f.StringVar(&o.Listen, "listen", "127.0.0.1:9824", "listen on this `address`, or none")
	f.StringVar(&o.Socket, "socket", serveSocket, "listen on this Unix socket: a `path`, or none")
	f.StringVar(&o.TokenFile, "token-file", "", "read the token for changes over TCP from this `file`")
	f.StringVar(&o.Cert, "tls-cert", "", "use TLS with the certificate in this `file`")
	f.StringVar(&o.Key, "tls-key", "", "read its private key from this `file`")
	f.StringSliceVar(&o.Hosts, "host", nil, "a `name` of this server in URLs, besides localhost")
	f.Var(byteCount(&o.MaxBody), "max-body", "largest request body in `bytes`, such as a policy")
	f.IntVar(&o.buckets, "metrics-buckets", 20, "export the levels of the `N` fullest buckets to /metrics; 0 for none")
	f.Var(countOrAll(&o.metrics), "metrics-rules", "export at most `N` rules, or all; pools that several names draw from do not count")
	f.BoolVar(&o.events, "events", false, "count events in /metrics, at a cost to each excess packet")
	f.BoolVar(&o.rtt, "rtt", false, "measure TCP round-trip times all the time, at a cost to each packet")
	f.Uint32Var(&o.rttOneIn, "rtt-one-in", 1, "follow one flow in `N` for that, a power of two")
	groupFlags(f, "Page, API and metrics", append([]string{"listen", "socket"}, listenerFlags...)...)
	o.cluster.add(f, "cluster-")
	f.StringVar(&o.host, "cluster-host", "", "the `name` of this host in its clusters (default: its host name, and that of -n)")
	clusterFlags = append(o.cluster.flags, "cluster-host")
	groupFlags(f, clusterFlagsTitle, clusterFlags...)
	return cmd
}

// listens reports whether there is a page, an API and metrics.
func (o *serveOptions) listens() bool { return o.Listen != "" || o.Socket != "" }

// newServer makes the server with all its parts.
func (e *env) newServer(o serveOptions, shared *live.Shared, exporter http.Handler) (*serve.Server, error) {
	s, err := serve.New(o.Options)
	if err != nil {
		return nil, err
	}
	a := &api{e}
	a.addTo(s)
	s.HandleBy("GET /api/v1/top", a.topAccess, a.topHandler(shared))
	s.Handle("GET /api/v1/sandbox", serve.Reads, without(sandbox.Handler()))
	s.Handle("POST /api/v1/sandbox", serve.Reads, without(sandbox.Handler()))
	s.Handle("GET /metrics", serve.Reads, without(exporter))
	s.Handle("/", serve.Static, page.Handler())
	return s, nil
}

// looks reports whether a request to top looks at packets. That changes nothing, but slows packets down.
func looks(given url.Values) bool {
	return given["rtt"] != nil || slices.ContainsFunc(given["by"], func(by string) bool { return slices.Contains(lookViews, by) })
}

// onlyRunning reports whether a request only wants what serve measures anyway. It then takes no right to measure.
func onlyRunning(r *http.Request) bool { return r.URL.Query().Get("running") == "true" }

// topAccess is what a request to top takes.
func (a *api) topAccess(r *http.Request) serve.Access {
	given := r.URL.Query()
	if looks(given) {
		if given["rtt"] != nil && given["by"] == nil && (a.env.rtts != nil || onlyRunning(r)) {
			return serve.Reads
		}
		return serve.Measures
	}
	view, err := topView(given)
	rows := view.Top
	if view.By == "tree" && view.Of == "" { // each pool has so many
		rows = view.Most
	}
	if err != nil || rows == 0 || rows > manyRows {
		return serve.Computes
	}
	return serve.Reads
}

// manyRows is how many rows an answer can have that takes little memory.
const manyRows = 1000

// topHandler answers with what rules and pools do now. All who ask share one reading a second.
func (a *api) topHandler(shared *live.Shared) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given := r.URL.Query()
		if looks(given) || r.Header.Get(columnsHeader) != "" && slices.Equal(given["once"], []string{"true"}) {
			a.answer(topOnce, w.(*serve.Answer), r)
			return
		}
		view, err := topView(given)
		if err != nil {
			serve.Fail(w, http.StatusBadRequest, exitInput, "top: %v", err)
			return
		}
		now, err := shared.Watch(r.Context(), live.What{Fullest: fullestBuckets})
		if now != nil {
			err = checkView(now, view)
		}
		if now == nil || err != nil {
			err = fmt.Errorf("top: %w", a.env.advise(err))
			serve.Fail(w, status(exitCode(err), err), exitCode(err), "%v", err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		text, err := json.Marshal(report.NewTop(now, view))
		now.Release()
		must(err)
		w.Write(text)
	})
}

// topParameters are what a request can ask of the rows. values are those that exist; nil for any.
var topParameters = []struct {
	name, help string
	values     []string
	text       func(*live.View) *string // one of these
	number     func(*live.View) *int
	list       func(*live.View) *[]string
}{
	{name: "by", help: "what the rows are", values: live.Views, text: func(v *live.View) *string { return &v.By }},
	{name: "sort", help: "their order", values: live.Orders, text: func(v *live.View) *string { return &v.Sort }},
	{name: "search", help: "words in names, plans, notes, pools, devices and networks, and addresses in networks", text: func(v *live.View) *string { return &v.Search }},
	{name: "show", help: "only rows with this activity; near includes dropping, and busy both", values: live.Activities, text: func(v *live.View) *string { return &v.Show }},
	{name: "kind", help: "only rules or pools; of a tree, pool leaves out rules in no pool", values: live.Kinds, text: func(v *live.View) *string { return &v.Kind }},
	{name: "under", help: "the pool that a tree is of", text: func(v *live.View) *string { return &v.Under }},
	{name: "name", help: "only rules with this name; of a tree, with the pools above them", text: func(v *live.View) *string { return &v.Name }},
	{name: "of", help: "only this rule ('DEVICE DIRECTION NETWORK') or pool ('pool NAME'); of a tree, with the pools above it and what is directly within it", text: func(v *live.View) *string { return &v.Of }},
	{name: "open", help: "of a tree, show only what is directly within these pools; several times, and empty for none", list: func(v *live.View) *[]string { return &v.Open }},
	{name: "top", help: "only so many rows; of a tree, in each pool", number: func(v *live.View) *int { return &v.Top }},
	{name: "most", help: "of a tree, only so many rows in all", number: func(v *live.View) *int { return &v.Most }},
}

// topView is the view that a request asks for.
func topView(given url.Values) (v live.View, err error) {
	for _, p := range topParameters {
		values := given[p.name]
		delete(given, p.name)
		switch {
		case len(values) == 0:
		case p.list != nil:
			*p.list(&v) = values
		case len(values) > 1:
			return v, fmt.Errorf("%s was given %d times", p.name, len(values))
		case p.number != nil:
			if *p.number(&v), err = strconv.Atoi(values[0]); err != nil || *p.number(&v) < 1 {
				return v, fmt.Errorf("%s %.20q is not a number of rows; use 1 or more", p.name, values[0])
			}
		case p.values != nil && values[0] != "" && !slices.Contains(p.values, values[0]):
			return v, fmt.Errorf("%s %.20q is unknown; use one of %s", p.name, values[0], strings.Join(p.values, ", "))
		default:
			*p.text(&v) = values[0]
		}
	}
	for name := range given {
		names := make([]string, len(topParameters))
		for i, p := range topParameters {
			names[i] = p.name
		}
		return v, fmt.Errorf("unknown parameter %q; use %s", name, strings.Join(names, ", "))
	}
	if n := len(strings.Fields(v.Search)); n > mostWords { // each is sought in all rules
		return v, fmt.Errorf("search has %d words; use at most %d", n, mostWords)
	}
	return v, nil
}

const mostWords = 10

// checkView returns an error that names the nearest if a view is of something that does not exist.
func checkView(r *live.Reading, v live.View) error {
	for _, is := range []struct {
		what, wanted string
		of           func(*live.Item) string
	}{
		{"pool", v.Under, func(it *live.Item) string { return it.Key.Pool }},
		{"rule or pool", v.Of, func(it *live.Item) string { return it.Key.String() }},
		{"rule with the name", v.Name, func(it *live.Item) string {
			if it.IsPool() {
				return ""
			}
			return it.Who()
		}},
	} {
		found := is.wanted == ""
		for i := 0; i < len(r.Items) && !found; i++ { // without a list of all: pages ask each second
			found = is.of(&r.Items[i]) == is.wanted
		}
		if found {
			continue
		}
		var others []string
		for i := range r.Items {
			others = append(others, is.of(&r.Items[i]))
		}
		advice := "by=tree lists what there is"
		if similar := plain.SimilarName(is.wanted, others); similar != "" {
			advice = "did you mean " + plain.Line(similar) + "?"
		}
		return missingf("there is no %s %s; %s", is.what, plain.Line(is.wanted), advice)
	}
	return nil
}

func (e *env) serve(o serveOptions) error {
	options, err := e.options()
	if err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	e.out, e.err = &lockedWriter{to: e.out}, &lockedWriter{to: e.err}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)

	o.Say = e.note
	d := &daemon{env: e}
	reread := make(chan os.Signal, 1)
	d.reload = func() {
		select {
		case reread <- syscall.SIGHUP:
		default: // it will read it anyway
		}
	}
	shared := live.NewShared(&live.Reader{Options: options, Netns: e.netns}, usualInterval)
	if err := e.follow(d, o, options, reread); err != nil {
		return inputf("serve: %w", err)
	}
	if o.listens() {
		if err := e.listen(ctx, d, o, options, shared); err != nil {
			return fmt.Errorf("serve: %w", e.advise(err))
		}
	}
	if o.history != "none" && (o.listens() || o.history != "") {
		e.history = history.Open(o.history, history.Options{Bytes: o.historySize}, o.Say)
		defer e.history.Close()
		c := &recorder{env: e, shared: shared, say: e.note, Pulse: make(pulse.Pulse)}
		d.add("history", c.run, c.Alive, func() string { return "recording a history for 'shapectl report'" })
	}
	k := &quotaKeeper{env: e, options: options, Pulse: make(pulse.Pulse)}
	d.add("quotas", k.run, k.Alive, func() string { return "" })
	if o.cluster.URL != "" {
		r, err := e.clusterLeases(&o.cluster, o.host, options)
		if err != nil {
			return fmt.Errorf("serve: %w", err)
		}
		defer r.Store.Close()
		d.add("leases", r.Run, r.Alive, r.Asks)
	}
	if err := d.run(ctx, hangup); err != nil {
		return fmt.Errorf("serve: %w", e.advise(err))
	}
	return nil
}

// listen adds the page, the API and metrics.
func (e *env) listen(ctx context.Context, d *daemon, o serveOptions, options loader.Options, shared *live.Shared) (err error) {
	if o.SocketGID, err = socketGroup(); err != nil {
		return err
	}
	e.feed = events.NewFeed(e.netns, events.Options{Loader: options, OnProblem: func(err error) { e.note(fmt.Sprintf("events: %v", e.advise(err))) }})
	if o.rtt {
		e.rtts = observe.NewLive(observe.Options{Netns: e.netns, OneIn: o.rttOneIn}, func() ([]*live.Item, error) {
			r, err := shared.Now(ctx, live.What{})
			if r == nil {
				return nil, err
			}
			return r.Once(), err
		}, func(text string) { e.note("rtt: " + text) })
	}
	exporter := e.exporter(o, shared)
	s, err := e.newServer(o, shared, exporter)
	if err != nil {
		return inputError(err)
	}
	rereads := d.reload
	d.reload = func() {
		if err := s.Reload(); err != nil {
			e.note(fmt.Sprintf("%v; still using the one that was read before", err))
		}
		rereads()
	}
	d.add("HTTP", s.Run, s.Alive, func() string { return "listening on " + plain.List(s.Addresses()) })
	if o.rtt {
		d.add("rtt", e.rtts.Run, e.rtts.Alive, func() string { return "measuring round-trip times" })
	}
	if o.events {
		total := metrics.NewEvents()
		exporter.Register(total)
		d.add("events", func(ctx context.Context, ready func()) error { return e.countEvents(ctx, total, ready) }, func(context.Context) error { return nil },
			func() string { return "counting events" })
	}
	return nil
}

// follow adds what keeps rules and rates as they should be.
func (e *env) follow(d *daemon, o serveOptions, options loader.Options, reread <-chan os.Signal) error {
	r := &reconciler.Reconciler{Options: options, OnApply: e.reconciled, OnNotice: e.note, Pulse: make(pulse.Pulse)}
	r.OnWarning = func(err error) { e.note(e.advise(err).Error()) }
	if e.follows = o.file; o.file != "" {
		if err := r.Load(o.file, o.lastGood); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	watches := ""
	d.add("devices", func(ctx context.Context, ready func()) error {
		err := netns.Stay(ctx, e.netns, func(ctx context.Context) error {
			return r.Run(ctx, reread, func() {
				watches = r.Watches()
				ready()
			})
		})
		if o.file != "" || !errors.Is(err, fs.ErrPermission) {
			return err
		}
		r.OnWarning(fmt.Errorf("devices that appear get no rules: %w", err)) // the sandbox needs no rights
		ready()
		r.Pulse.Wait(ctx, nil)
		return nil
	}, r.Alive, func() string { return watches })
	a := leases.Line{Keeper: e.keeper(options, e.note)}
	d.add("adapt", a.Run, a.Alive, func() string { return "" })
	return nil
}

// leastHistory is what --history-size needs at least.
const leastHistory = 1_000_000

// longestHost is how long the name of a host may be.
const longestHost = 255

// hostIn is the name of this host in its clusters.
func (e *env) hostIn(given string) (string, error) {
	name := given
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
			return "", inputf("%w; name this host with --cluster-host", err)
		}
		if e.netns != "" {
			name += "/" + e.netns
		}
	}
	if len(name) > longestHost || !utf8.ValidString(name) || strings.ContainsFunc(name, func(c rune) bool { return !unicode.IsPrint(c) }) {
		return "", inputf("--cluster-host %s: use at most %d printable characters", plain.Line(strconv.Quote(name)), longestHost)
	}
	return name, nil
}

// keeper is for the pools of this network namespace.
func (e *env) keeper(o loader.Options, say func(string)) leases.Keeper {
	return leases.Keeper{Options: o, Netns: e.netns, Say: say, Advise: e.advise, Pulse: make(pulse.Pulse)}
}

// clusterLeases renews the leases of clusters.
func (e *env) clusterLeases(from *storeFlags, host string, o loader.Options) (*leases.Cluster, error) {
	host, err := e.hostIn(host)
	if err != nil {
		return nil, err
	}
	store, err := from.open()
	if err != nil {
		return nil, err
	}
	return &leases.Cluster{Keeper: e.keeper(o, func(text string) { e.note("cluster: " + text) }), Store: store, Host: host}, nil
}
