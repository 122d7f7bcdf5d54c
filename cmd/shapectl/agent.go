package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/cluster"
	"github.com/shapectl/shapectl/internal/leases"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/pkg/loader"
)

// storeFlags say how to reach the store of clusters.
type storeFlags struct {
	cluster.Options
	passwordFile string
	named        string   // how the names of the flags begin
	flags        []string // all of them, that for the URL first
}

func (s *storeFlags) add(f *pflag.FlagSet, named string) {
	s.named = named
	f.StringVar(&s.URL, named+"store", "", "`URL` of the store: redis://HOST:6379, rediss:// for TLS, or unix://PATH")
	f.StringVar(&s.passwordFile, named+"password-file", "", "read the password for the store from this `file`")
	f.StringVar(&s.CA, named+"ca", "", "trust the authorities in this `file` for the store's certificate")
	f.StringVar(&s.Cert, named+"cert", "", "show the store the certificate in this `file`")
	f.StringVar(&s.Key, named+"key", "", "read its private key from this `file`")
	f.StringVar(&s.Prefix, named+"prefix", "shapectl", "begin all keys in the store with this `word`")
	s.flags = []string{named + "store", named + "password-file", named + "ca", named + "cert", named + "key", named + "prefix"}
	for _, file := range []string{"password-file", "ca", "cert", "key"} {
		must(cobra.MarkFlagFilename(f, named+file))
	}
}

// open makes a client of the store, which connects later.
func (s *storeFlags) open() (*cluster.Store, error) {
	o := s.Options
	if strings.ContainsFunc(o.Prefix, func(c rune) bool {
		return strings.ContainsRune(`{}*?[]\`, c) || unicode.IsSpace(c) || !unicode.IsPrint(c)
	}) || o.Prefix == "" {
		return nil, inputf("--%sprefix %s: use a word without braces and * ? [ ]", s.named, plain.Line(strconv.Quote(o.Prefix)))
	}
	if s.passwordFile != "" {
		text, err := os.ReadFile(s.passwordFile)
		if err != nil {
			return nil, inputf("--%spassword-file: %w", s.named, err)
		}
		if o.Password = strings.TrimRight(string(text), "\r\n"); o.Password == "" {
			return nil, inputf("--%spassword-file: %s has no password", s.named, s.passwordFile)
		}
	}
	store, err := cluster.Open(o)
	if err != nil {
		return nil, inputError(err)
	}
	return store, nil
}

// fromEnvironment takes the URL from the environment, where ps does not show it, unless a flag says it.
func (s *storeFlags) fromEnvironment(e *env) error {
	if s.URL = cmp.Or(s.URL, e.getenv("SHAPECTL_STORE")); s.URL == "" {
		return inputf("there is no store; give its URL with --store, or in SHAPECTL_STORE, such as redis://HOST:6379")
	}
	return nil
}

func agentCommand(e *env) *cobra.Command {
	var store storeFlags
	var host string
	cmd := &cobra.Command{
		Use:   "agent [flags]",
		Short: "Share the rates of clusters with other hosts",
		Long: `Share the rates of clusters with other hosts, until stopped. Once a second, agent tells the store what each pool with a
cluster uses and wants, and gets a lease on a part of the cluster's rate. Run one agent on each host.

The kernel ends a lease after two seconds unless it was renewed. The pool then has its safe share, also if the agent was
killed or stopped, or the store cannot be reached. All hosts together never have more than the rate.

Each host needs a name that no other host of its clusters has. The store is Redis (6.2 or later) or Valkey. agent reaches
it from the network namespace that it was started in, also with -n.

'shapectl serve --cluster-store' does the same: run one or the other.`,
		Example: `  shapectl set customer --new --rate 10gbit --cluster customer-7
  SHAPECTL_STORE=redis://redis.example.net:6379 shapectl agent
  shapectl cluster status`,
		Args: args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := store.fromEnvironment(e); err != nil {
				return inputf("agent: %w", err)
			}
			return e.runAgent(&store, host)
		},
	}
	store.add(cmd.Flags(), "")
	addHost(cmd.Flags(), &host, "")
	return cmd
}

func addHost(f *pflag.FlagSet, host *string, named string) {
	f.StringVar(host, named+"host", "", "the `name` of this host in its clusters (default: its host name, and that of -n)")
}

// longestHost is how long the name of a host may be.
const longestHost = 255

// hostIn is the name of this host in its clusters.
func (e *env) hostIn(given string) (string, error) {
	name := given
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
			return "", inputf("%w; name this host with --host", err)
		}
		if e.netns != "" {
			name += "/" + e.netns
		}
	}
	if len(name) > longestHost || !utf8.ValidString(name) || strings.ContainsFunc(name, func(c rune) bool { return !unicode.IsPrint(c) }) {
		return "", inputf("--host %s: use at most %d printable characters", plain.Line(strconv.Quote(name)), longestHost)
	}
	return name, nil
}

func (e *env) runAgent(store *storeFlags, host string) error {
	e.out, e.err = &lockedWriter{to: e.out}, &lockedWriter{to: e.err}
	say := func(text string) { e.say("shapectl: agent: %s", text) }
	r, err := e.clusterLeases(store, host, say)
	if err != nil {
		return prefixed("agent", err)
	}
	defer r.Store.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	d := &daemon{env: e, say: say, started: r.Started}
	d.add("leases", r.Run, r.Alive)
	if err := d.run(ctx, nil); err != nil {
		return fmt.Errorf("agent: %w", e.advise(err))
	}
	return nil
}

// prefixed says in which command an error was made.
func prefixed(command string, err error) error {
	if err == nil {
		return nil
	}
	var own exitError
	if errors.As(err, &own) {
		return exitError{fmt.Errorf("%s: %w", command, err), own.code}
	}
	return fmt.Errorf("%s: %w", command, err)
}

// keeper is for the pools of this network namespace.
func (e *env) keeper(o loader.Options, say func(string)) leases.Keeper {
	return leases.Keeper{Options: o, Netns: e.netns, Say: say, Advise: e.advise, Pulse: make(pulse.Pulse)}
}

// clusterLeases renews the leases of clusters.
func (e *env) clusterLeases(from *storeFlags, host string, say func(string)) (*leases.Cluster, error) {
	o, err := e.options()
	if err != nil {
		return nil, e.advise(err)
	}
	if host, err = e.hostIn(host); err != nil {
		return nil, err
	}
	store, err := from.open()
	if err != nil {
		return nil, err
	}
	return &leases.Cluster{Keeper: e.keeper(o, say), Store: store, Host: host}, nil
}
