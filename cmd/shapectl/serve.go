package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/events"
	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/leases"
	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/sandbox"
	"github.com/shapectl/shapectl/internal/serve"
	"github.com/shapectl/shapectl/internal/serve/page"
	"github.com/shapectl/shapectl/pkg/loader"
)

// serveOptions are the flags of serve.
type serveOptions struct {
	file, lastGood string
	listen         string
	history        string // the directory; "" for memory, none for none
	historySize    int64
	anyNetns       bool
	buckets        int // of which /metrics tells the level
	events         bool
	rtt            bool
	rttOneIn       uint32
	cluster        storeFlags
	host           string // in clusters; "" for the usual one
	serve.Options
}

func serveCommand(e *env) *cobra.Command {
	var o serveOptions
	cmd := &cobra.Command{
		Use:   "serve [FILE] [flags]",
		Short: "Serve a web page, an API and metrics over HTTP",
		Long: `Serve a web page, an API for all commands, and Prometheus metrics over HTTP, until stopped. Limits do not depend on
it: they stay in force when it stops.

With FILE, serve also does the work of 'shapectl watch': run one or the other. While FILE does not exist, it sets no
rules. With --cluster-store, serve does the work of 'shapectl agent' in the same way.

serve listens on a Unix socket and on 127.0.0.1. Over the socket, root can do everything, and the group shapectl can
read. Over 127.0.0.1, all users of this host can read; changes need the token in --token-file. On an address that other
hosts can reach, every request needs the token and TLS: give --tls-cert, --tls-key and --token-file.

On SIGHUP, it reads FILE, the token and the certificate again.`,
		Example: `  shapectl serve /etc/shapectl/policy.yaml
  curl --unix-socket /run/shapectl/serve.sock 'http://localhost/api/v1/show?device=eth0'`,
		Args:              args(0, 1),
		ValidArgsFunction: completePolicy,
		RunE: func(cmd *cobra.Command, given []string) error {
			if len(given) > 0 {
				o.file = given[0]
			}
			set := cmd.Flags().Changed
			switch {
			case o.file == "" && (set("last-good") || set("setup-fq")):
				return inputf("serve: --last-good and --setup-fq need FILE; name the policy, or leave them out")
			case set("last-good") && o.lastGood == "":
				return inputf("serve: --last-good needs the name of a file; leave it out to use none")
			}
			if set("history") && o.history == "" {
				return inputf("serve: --history needs the name of a directory; leave it out to keep the history in memory")
			}
			if o.historySize < leastHistory {
				return inputf("serve: --history-size %d is too little; use at least %d", o.historySize, leastHistory)
			}
			if o.MaxBody < 1<<10 || o.MaxBody > input.MaxBytes {
				return inputf("serve: --max-body %d is out of range; use %d to %d", o.MaxBody, 1<<10, input.MaxBytes)
			}
			if o.buckets < 0 || o.buckets > mostBucketSeries {
				return inputf("serve: --metrics-buckets %d is out of range; use 0 to %d", o.buckets, mostBucketSeries)
			}
			if o.cluster.URL == "" {
				if at := slices.IndexFunc(o.cluster.flags, set); at >= 0 {
					return inputf("serve: --%s needs --%s", o.cluster.flags[at], o.cluster.flags[0])
				}
			}
			if !isOneIn(o.rttOneIn) {
				return inputf("serve: --rtt-one-in %d is not a power of two up to 65536", o.rttOneIn)
			}
			if set("rtt-one-in") && !o.rtt {
				return inputf("serve: --rtt-one-in needs --rtt")
			}
			if o.listen != "none" {
				o.Listen = o.listen
			}
			if o.Socket == "none" {
				o.Socket = ""
			}
			if o.Listen == "" && o.Socket == "" {
				return inputf("serve: there is nothing to listen on; remove --listen none or --socket none")
			}
			return e.serve(o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.listen, "listen", "127.0.0.1:9824", "listen on this `address`, or none")
	f.StringVar(&o.Socket, "socket", serveSocket, "listen on this Unix socket: a `path`, or none")
	f.StringVar(&o.TokenFile, "token-file", "", "read the token for changes over TCP from this `file`")
	f.StringVar(&o.Cert, "tls-cert", "", "use TLS with the certificate in this `file`")
	f.StringVar(&o.Key, "tls-key", "", "read its private key from this `file`")
	f.StringSliceVar(&o.Hosts, "host", nil, "a `name` of this server in URLs, besides localhost")
	f.Int64Var(&o.MaxBody, "max-body", 1<<20, "largest request body in `bytes`, such as a policy")
	f.StringVar(&o.history, "history", "", "keep the history at this `path`, or none; default: in memory")
	must(cmd.MarkFlagDirname("history"))
	f.Int64Var(&o.historySize, "history-size", history.DefaultBytes, "most `bytes` of the history")
	f.BoolVar(&o.anyNetns, "any-netns", false, "requests may name another network namespace")
	f.IntVar(&o.buckets, "metrics-buckets", 20, "export the levels of the `N` fullest buckets to /metrics; 0 for none")
	f.BoolVar(&o.events, "events", false, "count events in /metrics, at a cost to each excess packet")
	f.BoolVar(&o.rtt, "rtt", false, "measure TCP round-trip times all the time, at a cost to each packet")
	f.Uint32Var(&o.rttOneIn, "rtt-one-in", 1, "follow one flow in `N` for that, a power of two")
	o.cluster.add(f, "cluster-")
	addHost(f, &o.host, "cluster-")
	o.cluster.flags = append(o.cluster.flags, "cluster-host")
	groupFlags(f, clusterFlagsTitle, o.cluster.flags...)
	e.addSetupFQ(f)
	f.StringVar(&o.lastGood, "last-good", "", "use the policy in this `file` while FILE is not valid")
	return cmd
}

// newServer makes the server with all its parts.
func (e *env) newServer(o serveOptions, options loader.Options, exporter http.Handler) (*serve.Server, error) {
	s, err := serve.New(o.Options)
	if err != nil {
		return nil, err
	}
	a := &api{env: e, anyNetns: o.anyNetns}
	a.addTo(s)
	s.Handle("GET /api/v1/top", serve.Reads, a.topHandler(options))
	s.Handle("GET /api/v1/sandbox", serve.Reads, sandbox.Handler())
	s.Handle("POST /api/v1/sandbox", serve.Reads, sandbox.Handler())
	s.Handle("GET /metrics", serve.Reads, exporter)
	s.Handle("/", serve.Static, page.Handler())
	return s, nil
}

// topHandler answers with what all rules do now. All who ask share one reading a second, and its text: with thousands of
// rules it is megabytes, and a tenth of that compressed.
func (a *api) topHandler(options loader.Options) http.Handler {
	e := a.env
	live := measure.NewLive(&measure.Reader{Options: options, Netns: e.netns}, measure.What{Fullest: fullestBuckets}, usualInterval)
	var mu sync.Mutex
	var last *measure.Reading
	var text, packed []byte
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(columnsHeader) != "" && slices.Equal(r.URL.Query()["once"], []string{"true"}) {
			a.answer(topOnce, w.(*serve.Answer), r)
			return
		}
		if r.URL.RawQuery != "" {
			serve.Fail(w, http.StatusBadRequest, exitInput, "top: it takes no parameters, and has all rules; use show to choose some")
			return
		}
		now, err := live.Latest(r.Context())
		if now == nil {
			err = fmt.Errorf("top: %w", e.advise(err))
			serve.Fail(w, status(exitCode(err), err), exitCode(err), "%v", err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		mu.Lock()
		if now != last {
			var all bytes.Buffer
			must(json.NewEncoder(&all).Encode(now.Top()))
			last, text, packed = now, all.Bytes(), nil
		}
		answer := text
		if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
			if packed == nil {
				packed = compressed(text)
			}
			w.Header().Set("Content-Encoding", "gzip")
			answer = packed
		}
		mu.Unlock()
		w.Header().Set("Vary", "Accept-Encoding")
		w.Write(answer)
	})
}

func compressed(text []byte) []byte {
	var all bytes.Buffer
	w, err := gzip.NewWriterLevel(&all, gzip.BestSpeed)
	must(err)
	w.Write(text) // to memory
	must(w.Close())
	return all.Bytes()
}

func (e *env) serve(o serveOptions) error {
	options, err := e.options()
	if err == nil {
		o.SocketGID, err = socketGroup()
	}
	if err != nil {
		return fmt.Errorf("serve: %w", e.advise(err))
	}
	e.out, e.err = &lockedWriter{to: e.out}, &lockedWriter{to: e.err}
	o.Say = func(text string) {
		for line := range strings.Lines(text) {
			e.say("shapectl: serve: %s", line)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)

	if o.history != "none" {
		if e.history = openHistory(&o); e.history != nil {
			defer e.history.Close()
		}
	}
	e.feed = events.NewFeed(e.netns, events.Options{Loader: options, OnProblem: func(err error) { o.Say(fmt.Sprintf("events: %v", e.advise(err))) }})
	if o.rtt {
		reader := &measure.Reader{Options: options, Netns: e.netns}
		defer reader.Close()
		e.rtts = observe.NewLive(observe.Options{Netns: e.netns, OneIn: o.rttOneIn}, func() (report.Rules, error) {
			r, err := reader.Read(measure.What{})
			if r == nil {
				return nil, err
			}
			return r.Rules, err
		}, func(text string) { o.Say("rtt: " + text) })
	}
	counted := newEventCounter()
	exporter, err := e.exporter(o, options)
	if err != nil {
		return inputf("serve: %w", err)
	}
	if o.events {
		exporter.Register(counted.total)
	}
	s, err := e.newServer(o, options, exporter)
	if err != nil {
		return inputf("serve: %w", err)
	}
	reread := make(chan os.Signal, 1)
	d := &daemon{env: e, say: o.Say}
	d.started = func() string {
		where := "listening on " + plain.List(s.Addresses())
		o.Say(where)
		return where
	}
	d.reload = func() {
		if err := s.Reload(); err != nil {
			o.Say(fmt.Sprintf("%v; still using the one that was read before", err))
		}
		select {
		case reread <- syscall.SIGHUP:
		default: // it will read it anyway
		}
	}
	d.add("HTTP", s.Run, s.Alive)
	if e.history != nil {
		c := &recorder{env: e, reader: &measure.Reader{Options: options, Netns: e.netns}, say: o.Say, Pulse: make(pulse.Pulse)}
		d.add("history", c.run, c.Alive)
	}
	if e.rtts != nil {
		d.add("rtt", e.rtts.Run, e.rtts.Alive)
	}
	if o.events {
		d.add("events", func(ctx context.Context, ready func()) error { return counted.run(ctx, e, ready, o.Say) }, func(context.Context) error { return nil })
	}
	if o.cluster.URL != "" {
		r, err := e.clusterLeases(&o.cluster, o.host, func(text string) { o.Say("cluster: " + text) })
		if err != nil {
			return prefixed("serve", err)
		}
		defer r.Store.Close()
		d.alsoStarts(r.Started)
		d.add("leases", r.Run, r.Alive)
	}
	if o.file != "" {
		r := e.reconciler(options)
		r.Pulse = make(pulse.Pulse)
		if err := r.Load(o.file, o.lastGood); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return inputf("serve: %w", err)
		}
		d.alsoStarts(func() string {
			e.note(watchesFor(r, o.file))
			return watchesFor(r, o.file)
		})
		d.add("watch", func(ctx context.Context, ready func()) error {
			return netns.Stay(ctx, e.netns, func(ctx context.Context) error { return r.Run(ctx, reread, ready) })
		}, r.Alive)
		a := leases.Line{Keeper: e.keeper(options, e.note)}
		d.add("adapt", a.Run, a.Alive)
	}
	if err := d.run(ctx, hangup); err != nil {
		return fmt.Errorf("serve: %w", e.advise(err))
	}
	return nil
}

// leastHistory is what --history-size needs at least.
const leastHistory = 1_000_000

// openHistory opens the history. Limits do not depend on it: if it cannot be at its path it is in memory, and without memory
// there is none.
func openHistory(o *serveOptions) *history.History {
	options := history.Options{Bytes: o.historySize}
	h, err := history.Open(o.history, options, o.Say)
	if err != nil && o.history != "" {
		o.Say(fmt.Sprintf("%v; the history is in memory until serve is started again: mend that, and restart serve", err))
		h, err = history.Open("", options, o.Say)
	}
	if err != nil {
		o.Say(fmt.Sprintf("%v; there is no history", err))
		return nil
	}
	return h
}

// A daemon runs loops until one of them ends, and tells the service manager about them.
type daemon struct {
	env     *env
	say     func(string)
	started func() (status string) // is called when all loops are ready
	reload  func()                 // reads all files again

	loops []loop
}

// A loop calls ready once, and runs until ctx is done. alive returns nil if it makes progress now.
type loop struct {
	name  string
	run   func(ctx context.Context, ready func()) error
	alive func(ctx context.Context) error
}

func (d *daemon) add(name string, run func(context.Context, func()) error, alive func(context.Context) error) {
	d.loops = append(d.loops, loop{name, run, alive})
}

// alsoStarts adds to what started does.
func (d *daemon) alsoStarts(another func() (status string)) {
	before := d.started
	d.started = func() string { return before() + "; " + another() }
}

func (d *daemon) run(ctx context.Context, hangup <-chan os.Signal) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ready, ended := make(chan struct{}, len(d.loops)), make(chan error, len(d.loops))
	for _, l := range d.loops {
		go func() { ended <- l.run(ctx, sync.OnceFunc(func() { ready <- struct{}{} })) }()
	}
	waits, running := len(d.loops), len(d.loops)
	var dogs <-chan time.Time
	var patience time.Duration
	var failed error
	done := ctx.Done()
	for running > 0 {
		select {
		case <-ready:
			if waits--; waits > 0 {
				continue
			}
			d.env.notify("READY=1\nSTATUS=" + d.started())
			if patience = d.watchdog(); patience > 0 {
				ticker := time.NewTicker(patience / 2)
				defer ticker.Stop()
				dogs = ticker.C
			}
		case <-dogs:
			d.checkLoops(ctx, patience/2)
		case <-hangup:
			d.reloads()
		case err := <-ended:
			running--
			if failed == nil {
				failed = err
			}
			stop()
		case <-done:
			done = nil
			d.env.notify("STOPPING=1")
		}
	}
	return failed
}

// reloads reloads, and tells the service manager so.
func (d *daemon) reloads() {
	var now unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	d.env.notify(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", now.Nano()/1000))
	d.reload()
	d.env.notify("READY=1")
}

// watchdog is how long the service manager waits for a sign of life; 0 for ever.
func (d *daemon) watchdog() time.Duration {
	if pid := d.env.getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return 0
	}
	us, err := strconv.ParseUint(d.env.getenv("WATCHDOG_USEC"), 10, 50)
	if err != nil {
		return 0
	}
	return time.Duration(us) * time.Microsecond
}

// checkLoops tells the service manager that all loops make progress, if they do.
func (d *daemon) checkLoops(ctx context.Context, patience time.Duration) {
	asked, cancel := context.WithTimeout(ctx, patience)
	go func() {
		defer cancel()
		for _, l := range d.loops {
			if err := l.alive(asked); err != nil {
				if !errors.Is(ctx.Err(), context.Canceled) {
					d.say(fmt.Sprintf("%s does not answer: %v", l.name, err))
				}
				return
			}
		}
		d.env.notify("WATCHDOG=1")
	}()
}

// A lockedWriter is for several goroutines.
type lockedWriter struct {
	mu sync.Mutex
	to io.Writer
}

func (w *lockedWriter) Write(text []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(text)
}
