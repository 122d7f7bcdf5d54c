package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/cluster"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
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

// orEnvironment takes the URL from the environment, where ps does not show it, unless a flag says it.
func (s *storeFlags) orEnvironment(e *env) {
	s.URL = cmp.Or(s.URL, e.getenv("SHAPECTL_STORE"))
}

// open makes a client of the store, which connects later.
func (s *storeFlags) open() (*cluster.Store, error) {
	o := s.Options
	if o.URL == "" {
		return nil, inputf("there is no store; give its URL with --store, or in SHAPECTL_STORE, such as redis://HOST:6379")
	}
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

func clusterCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster status|forget ...",
		Short: "See how hosts share the rate of a cluster",
		Long: `See how hosts share the rate of a cluster, and remove hosts that will not come back.

A pool with --cluster NAME shares its rate with the pools of other hosts that have the same cluster. 'shapectl serve' on
each host gets its part from the store.`,
		Example: `  shapectl cluster status --store redis://redis.example.net:6379
  shapectl cluster forget customer-7 gateway-3`,
		RunE: needsCommand,
	}
	cmd.AddCommand(clusterStatusCommand(e), clusterForgetCommand(e))
	return cmd
}

func clusterStatusCommand(e *env) *cobra.Command {
	var store storeFlags
	cmd := &cobra.Command{
		Use:   "status [NAME] [flags]",
		Short: "Show each host's demand, use and lease",
		Long: `Show each host's demand, use and lease, as the store knows them; of one cluster, or of all.

DEMAND is what senders would use without a limit, at most the whole rate. LEASE is what the host has now, and SAFE what it
has without a lease. AGE is the time since its last request. A host is silent when its lease has ended. Its safe share stays
reserved, because it may still use that.`,
		Example: `  shapectl cluster status
  shapectl cluster status customer-7 -j`,
		Args: args(0, 1),
		RunE: func(_ *cobra.Command, given []string) error {
			return e.withStore(&store, "cluster status", func(ctx context.Context, s *cluster.Store) error {
				return e.clusterStatus(ctx, s, given)
			})
		},
	}
	store.add(cmd.Flags(), "")
	return cmd
}

func clusterForgetCommand(e *env) *cobra.Command {
	var store storeFlags
	var missing bool
	cmd := &cobra.Command{
		Use:   "forget NAME HOST [POOL] | NAME --missing [flags]",
		Short: "Free what is reserved for a host that will not come back",
		Long: `Free what is reserved for a host that will not come back, so that the other hosts get it. forget refuses while the
host is live. If the host still runs with its safe share, all hosts together can exceed the rate by that. With POOL, only
what is reserved for this pool of the host is freed.

--missing frees what is reserved for hosts that have not come back since the store was emptied.`,
		Example: `  shapectl cluster forget customer-7 gateway-3
  shapectl cluster forget customer-7 --missing`,
		Args: args(1, 3),
		RunE: func(_ *cobra.Command, given []string) error {
			if missing != (len(given) == 1) {
				return inputf("cluster forget: give either a host or --missing")
			}
			return e.withStore(&store, "cluster forget", func(ctx context.Context, s *cluster.Store) error {
				if missing {
					return e.forgetMissing(ctx, s, given[0])
				}
				return e.forgetHost(ctx, s, given[0], given[1], given[2:])
			})
		},
	}
	cmd.Flags().BoolVar(&missing, "missing", false, "hosts that the store does not know any more")
	store.add(cmd.Flags(), "")
	return cmd
}

// storePatience is how long a command waits for the store.
const storePatience = 5 * time.Second

// withStore runs f on the store. Errors begin with doing.
func (e *env) withStore(from *storeFlags, doing string, f func(context.Context, *cluster.Store) error) error {
	from.orEnvironment(e)
	s, err := from.open()
	if err == nil {
		defer s.Close()
		ctx, cancel := context.WithTimeout(e.context(), storePatience)
		defer cancel()
		err = f(ctx, s)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

func (e *env) clusterStatus(ctx context.Context, s *cluster.Store, names []string) (err error) {
	if len(names) == 0 {
		if names, err = s.Clusters(ctx); err != nil {
			return fromStore(s, err)
		}
	} else if _, err := viewOf(ctx, s, names[0]); err != nil {
		return err
	}
	all := report.Clusters{}
	var unread []error
	for _, name := range names {
		v, err := s.View(ctx, name)
		if err != nil {
			unread = append(unread, err)
		} else if v != nil { // else its last host has left just now
			v.ForgetHost, v.ForgetLost = e.suggest("cluster forget", name, "HOST"), e.suggest("cluster forget --missing", name)
			all = append(all, *v)
		}
	}
	err = e.print(all, func(w io.Writer) error { return all.Text(w, e.columns) })
	if err == nil && unread != nil {
		return e.degraded("cluster status: %w", fromStore(s, errors.Join(unread...)))
	}
	return err
}

// viewOf is what the store knows of a cluster, or an error if it knows nothing.
func viewOf(ctx context.Context, s *cluster.Store, name string) (*report.ClusterStatus, error) {
	v, err := s.View(ctx, name)
	if err != nil {
		return nil, fromStore(s, err)
	}
	if v != nil {
		return v, nil
	}
	names, _ := s.Clusters(ctx) // none if the store has gone since
	return nil, missingf("the store at %s has no cluster %s; %s", s.Address(), plain.Line(name),
		didYouMean(name, names, "its hosts may have another store or another --prefix"))
}

func fromStore(s *cluster.Store, err error) error {
	return fmt.Errorf("ask the store at %s: %w", s.Address(), err)
}

// A forgotten is a host that was forgotten, or all missing ones.
type forgotten struct {
	Cluster   string `json:"cluster"`               // its name
	Host      string `json:"host"`                  // "" for missing hosts
	Pool      string `json:"pool"`                  // the name of its pool; "" for missing hosts
	FreedBits uint64 `json:"freed_bits_per_second"` // what the other hosts can have now
}

func (e *env) forgetMissing(ctx context.Context, s *cluster.Store, name string) error {
	v, err := viewOf(ctx, s, name)
	if err != nil {
		return err
	}
	if v.MissingBits == 0 {
		return e.nothing([]forgotten{}, "nothing is reserved for missing hosts")
	}
	if err := s.Forget(ctx, name, "", "", v.MissingBits); err != nil {
		return fromStore(s, err)
	}
	return e.forgot([]forgotten{{Cluster: name, FreedBits: v.MissingBits}})
}

func (e *env) forgetHost(ctx context.Context, s *cluster.Store, name, host string, pool []string) error {
	v, err := viewOf(ctx, s, name)
	if err != nil {
		return err
	}
	var found []report.ClusterMember
	known := false
	for _, m := range v.Members {
		known = known || m.Host == host
		if m.Host == host && (len(pool) == 0 || m.Pool == pool[0]) {
			found = append(found, m)
		}
	}
	if len(found) == 0 {
		what := "host"
		if known {
			what = "pool of that host"
		}
		return e.nothing([]forgotten{}, fmt.Sprintf("nothing to forget: cluster %s has no such %s; %s lists all", plain.Line(name), what, e.suggest("cluster status", name)))
	}
	var all []forgotten
	for _, m := range found {
		if err := s.Forget(ctx, name, host, m.Pool, 0); err != nil {
			why := fromStore(s, err)
			if errors.Is(err, cluster.ErrLive) {
				why = inputf("host %s is live: it asked for a lease %v ago; end serve there first, or remove its pool %s",
					plain.Line(host), time.Duration(m.AgeNS), plain.Line(m.Pool))
			}
			if all != nil {
				why = errors.Join(e.forgot(all), why)
			}
			return why
		}
		all = append(all, forgotten{name, host, m.Pool, m.SafeBits})
	}
	return e.forgot(all)
}

// forgot writes the answer.
func (e *env) forgot(all []forgotten) error {
	return e.print(all, func(w io.Writer) error {
		for _, f := range all {
			who := "missing hosts"
			if f.Host != "" {
				who = "host " + plain.Line(f.Host)
			}
			fmt.Fprintf(w, "forgot %s of cluster %s; %s are free for the others\n", who, plain.Line(f.Cluster), report.Bits(f.FreedBits))
		}
		return nil
	})
}
