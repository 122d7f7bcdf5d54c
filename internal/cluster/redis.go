package cluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed store.lua
var storeScript string

// Options say how to reach the store.
type Options struct {
	// URL is that of Redis or Valkey: redis://, rediss:// for TLS, or unix://. With the parameters master_name and addr it
	// is that of Sentinels.
	URL string
	// Password replaces that of the URL, if it is not empty.
	Password string
	// CA, Cert and Key are files in PEM; "" for the system's authorities, and for no certificate of the client.
	CA, Cert, Key string
	// Prefix begins all keys.
	Prefix string
}

// A Store is Redis or Valkey.
type Store struct {
	client  *redis.Client
	address string
	prefix  string
	script  *redis.Script
}

// Open returns the store, without connecting to it.
func Open(o Options) (*Store, error) {
	s := &Store{prefix: o.Prefix, script: redis.NewScript(storeScript)}
	if err := s.connect(o); err != nil {
		return nil, err
	}
	return s, nil
}

// connections are as many as a host has to the store at most: a thousand hosts share it.
const connections = 2

// A silent logger drops what the client of Redis would print beside the errors that it returns.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// connect makes the client, and says where the store is.
func (s *Store) connect(o Options) error {
	redis.SetLogger(silent{})
	u := redis.UniversalOptions{
		DialTimeout: Timeout, ReadTimeout: Timeout, WriteTimeout: Timeout, MaxRetries: -1, DialerRetries: 1,
		Protocol: 2, DisableIdentity: true, PoolSize: connections,
	}
	if strings.Contains(o.URL, "master_name=") {
		f, err := redis.ParseFailoverURL(o.URL)
		if err != nil {
			return errURL
		}
		u.MasterName, u.Addrs, u.SentinelUsername, u.SentinelPassword = f.MasterName, f.SentinelAddrs, f.SentinelUsername, f.SentinelPassword
		u.Username, u.Password, u.DB, u.TLSConfig = f.Username, f.Password, f.DB, f.TLSConfig
		s.address = fmt.Sprintf("%s, as Sentinel names it for %s", strings.Join(u.Addrs, ","), u.MasterName)
	} else {
		c, err := redis.ParseURL(o.URL)
		if err != nil {
			return errURL
		}
		u.Addrs, u.Username, u.Password, u.DB, u.TLSConfig = []string{c.Addr}, c.Username, c.Password, c.DB, c.TLSConfig
		s.address = c.Addr
	}
	if o.Password != "" {
		u.Password = o.Password
	}
	var err error
	if u.TLSConfig, err = o.tls(u.TLSConfig); err != nil {
		return err
	}
	if u.MasterName != "" {
		s.client = redis.NewFailoverClient(u.Failover())
	} else {
		s.client = redis.NewClient(u.Simple())
	}
	return nil
}

// errURL does not say what is wrong: the URL may have a password.
var errURL = errors.New("the URL of the store is not valid; write one such as redis://HOST:6379, rediss://HOST:6379 for TLS, or unix:///run/redis.sock, and put the password into a file")

func (o Options) tls(c *tls.Config) (*tls.Config, error) {
	if o.CA == "" && o.Cert == "" && o.Key == "" {
		return c, nil
	}
	if c == nil {
		return nil, errors.New("a certificate is only used with TLS; write rediss:// in the URL of the store")
	}
	if o.CA != "" {
		pem, err := os.ReadFile(o.CA)
		if err != nil {
			return nil, err
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s has no certificate in PEM", o.CA)
		}
	}
	if o.Cert != "" || o.Key != "" {
		pair, err := tls.LoadX509KeyPair(o.Cert, o.Key)
		if err != nil {
			return nil, fmt.Errorf("the client's certificate: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// explain says what an error of Redis means, and what to do.
func (s *Store) explain(err error) error {
	var says string
	switch text := err.Error(); {
	case redis.HasErrorPrefix(err, "WRONGPASS"), redis.HasErrorPrefix(err, "NOAUTH"):
		says = "it refuses the user or the password"
	case redis.HasErrorPrefix(err, "NOPERM"), strings.Contains(text, "can't run this command"):
		says = "the user lacks a right; docs/cluster.md lists all"
	case redis.HasErrorPrefix(err, "OOM"):
		says = "it has no memory left; raise its maxmemory"
	case redis.HasErrorPrefix(err, "NOREPLICAS"):
		says = "it has too few replicas that answer"
	case redis.HasErrorPrefix(err, "READONLY"):
		says = "it is a replica; name the primary, or Sentinels"
	case errors.Is(err, io.EOF):
		says = "it closed the connection"
		if o := s.client.Options(); o.TLSConfig == nil && o.Network != "unix" {
			says += "; if it speaks only TLS, write rediss://"
		}
	case errors.Is(err, context.DeadlineExceeded), os.IsTimeout(err):
		says = fmt.Sprintf("no answer within %v", Timeout)
		if s.client.Options().TLSConfig != nil {
			says += "; if it does not speak TLS, write redis://"
		}
	default:
		return err
	}
	return fmt.Errorf("%s (%w)", says, err)
}

// Close ends all connections.
func (s *Store) Close() error { return s.client.Close() }

// Address is that of the store, or of its Sentinels, without a password.
func (s *Store) Address() string { return s.address }

// key is that of a cluster. Redis Cluster has all keys of a prefix on one server, because of the braces.
func (s *Store) key(cluster string) string { return "{" + s.prefix + "}:" + cluster }

// batch is how many requests one run of the function takes at most. Others wait for so long.
const batch = 50

// Renew sends requests and returns their answers, in the same order. With an error come the answers to the first ones.
func (s *Store) Renew(ctx context.Context, calls []Call) ([]Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	answers := make([]Answer, 0, len(calls))
	for len(calls) > 0 {
		n := min(len(calls), batch)
		keys, args := make([]string, n), make([]any, 0, 2*n)
		for i, c := range calls[:n] {
			keys[i] = s.key(c.Cluster)
			args = append(args, c.Member, encode(c.Request))
		}
		got, err := s.script.Run(ctx, s.client, keys, args...).StringSlice()
		if err != nil {
			return answers, s.explain(err)
		}
		if len(got) != n {
			return answers, fmt.Errorf("%d answers to %d requests", len(got), n)
		}
		for _, text := range got {
			var a Answer
			if err := decode(text, &a); err != nil {
				return answers, err
			}
			answers = append(answers, a)
		}
		calls = calls[n:]
	}
	return answers, nil
}
