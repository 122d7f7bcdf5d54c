package cluster

import (
	"cmp"
	"context"
	"crypto/sha1"
	"crypto/tls"
	"crypto/x509"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/gomodule/redigo/redis"
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

// A Store is Redis or Valkey. It has one connection, because a thousand hosts share it, so it must be used by one
// goroutine at a time.
type Store struct {
	network   string   // "tcp" or "unix"
	addresses []string // of the store, or of its Sentinels
	primary   string   // its name for Sentinels; "" without them
	tls       *tls.Config
	dialing   []redis.DialOption
	login     []redis.DialOption // not for Sentinels
	prefix    string
	script    string
	conn      redis.Conn // nil if there is none
}

// Open returns the store, without connecting to it.
func Open(o Options) (*Store, error) {
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, errURL
	}
	s := &Store{network: "tcp", prefix: o.Prefix, script: storeScript}
	query := u.Query()
	database := query.Get("db")
	switch u.Scheme {
	case "unix":
		s.network, s.addresses = "unix", []string{u.Path}
	case "rediss":
		s.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		fallthrough
	case "redis":
		database, s.primary = cmp.Or(database, strings.Trim(u.Path, "/")), query.Get("master_name")
		for _, address := range append([]string{u.Host}, query["addr"]...) {
			host, port, err := net.SplitHostPort(address)
			if err != nil {
				host, port = strings.Trim(address, "[]"), "6379"
			}
			if _, err := strconv.ParseUint(port, 10, 16); err != nil || strings.Contains(host, "@") {
				return nil, errURL
			}
			s.addresses = append(s.addresses, net.JoinHostPort(cmp.Or(host, "localhost"), port))
		}
	}
	number, err := strconv.ParseUint(cmp.Or(database, "0"), 10, 16)
	for _, known := range []string{"db", "master_name", "addr"} {
		query.Del(known)
	}
	if err != nil || len(query) > 0 || len(s.addresses) == 0 || s.addresses[0] == "" || s.primary == "" && len(s.addresses) > 1 {
		return nil, errURL
	}
	if s.tls, err = o.tls(s.tls); err != nil {
		return nil, err
	}
	s.dialing = []redis.DialOption{
		redis.DialConnectTimeout(Timeout), redis.DialTLSHandshakeTimeout(Timeout), redis.DialReadTimeout(Timeout), redis.DialWriteTimeout(Timeout),
		redis.DialUseTLS(s.tls != nil), redis.DialTLSConfig(s.tls),
	}
	password, _ := u.User.Password()
	s.login = append(slices.Clone(s.dialing),
		redis.DialUsername(u.User.Username()), redis.DialPassword(cmp.Or(o.Password, password)), redis.DialDatabase(int(number)))
	return s, nil
}

// do runs a command. An error may wrap a redis.Error.
func (s *Store) do(ctx context.Context, command string, args ...any) (reply any, err error) {
	if s.conn == nil {
		address := s.addresses[0]
		if s.primary != "" {
			if address, err = s.askSentinels(ctx); err != nil {
				return nil, err
			}
		}
		if s.conn, err = redis.DialContext(ctx, s.network, address, s.login...); err != nil {
			return nil, err
		}
	}
	reply, err = redis.DoContext(s.conn, ctx, command, args...)
	if s.conn.Err() != nil || s.primary != "" && begins(err, "READONLY") { // Sentinel may name another one
		s.conn.Close()
		s.conn = nil
	}
	return reply, err
}

// askSentinels returns the address of the primary, as the first Sentinel says that knows it.
func (s *Store) askSentinels(ctx context.Context) (address string, err error) {
	type answer struct {
		address []string
		err     error
	}
	answers := make(chan answer, len(s.addresses))
	for _, sentinel := range s.addresses {
		go func() {
			c, err := redis.DialContext(ctx, "tcp", sentinel, s.dialing...)
			if err != nil {
				answers <- answer{err: err}
				return
			}
			defer c.Close()
			address, err := redis.Strings(redis.DoContext(c, ctx, "SENTINEL", "get-master-addr-by-name", s.primary))
			answers <- answer{address, err}
		}()
	}
	for range s.addresses {
		a := <-answers
		if len(a.address) == 2 {
			return net.JoinHostPort(a.address[0], a.address[1]), nil
		}
		err = a.err
	}
	if err == redis.ErrNil {
		err = fmt.Errorf("no Sentinel knows %s", s.primary)
	}
	return "", err
}

// begins reports whether an error is one of Redis that begins so.
func begins(err error, code string) bool {
	var e redis.Error
	return errors.As(err, &e) && strings.HasPrefix(string(e), code)
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
	switch {
	case begins(err, "WRONGPASS"), begins(err, "NOAUTH"):
		says = "it refuses the user or the password"
	case begins(err, "NOPERM"), strings.Contains(err.Error(), "can't run this command"):
		says = "the user lacks a right; docs/cluster.md lists all"
	case begins(err, "OOM"):
		says = "it has no memory left; raise its maxmemory"
	case begins(err, "NOREPLICAS"):
		says = "it has too few replicas that answer"
	case begins(err, "READONLY"):
		says = "it is a replica; name the primary, or Sentinels"
	case errors.Is(err, io.EOF):
		says = "it closed the connection"
		if s.tls == nil && s.network != "unix" {
			says += "; if it speaks only TLS, write rediss://"
		}
	case errors.Is(err, context.DeadlineExceeded), os.IsTimeout(err):
		says = fmt.Sprintf("no answer within %v", Timeout)
		if s.tls != nil {
			says += "; if it does not speak TLS, write redis://"
		}
	default:
		return err
	}
	return fmt.Errorf("%s (%w)", says, err)
}

// Close ends the connection.
func (s *Store) Close() {
	if s.conn != nil {
		s.conn.Close()
		s.conn = nil
	}
}

// Address is that of the store, or of its Sentinels, without a password.
func (s *Store) Address() string {
	if s.primary != "" {
		return fmt.Sprintf("%s, as Sentinel names it for %s", strings.Join(s.addresses, ","), s.primary)
	}
	return s.addresses[0]
}

// key is that of a cluster. Redis Cluster has all keys of a prefix on one server, because of the braces.
func (s *Store) key(cluster string) string { return "{" + s.prefix + "}:" + cluster }

// batch is how many requests one run of the function takes at most. Others wait for so long.
const batch = 50

// eval runs the script, which Redis keeps by its hash.
func (s *Store) eval(ctx context.Context, args []any) (any, error) {
	hash := fmt.Sprintf("%x", sha1.Sum([]byte(s.script)))
	reply, err := s.do(ctx, "EVALSHA", append([]any{hash}, args...)...)
	if begins(err, "NOSCRIPT") {
		return s.do(ctx, "EVAL", append([]any{s.script}, args...)...)
	}
	return reply, err
}

// Renew sends requests and returns their answers, in the same order. With an error come the answers to the first ones.
func (s *Store) Renew(ctx context.Context, calls []Call) ([]Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	answers := make([]Answer, 0, len(calls))
	for len(calls) > 0 {
		n := min(len(calls), batch)
		keys, args := []any{n}, make([]any, 0, 2*n)
		for _, c := range calls[:n] {
			keys = append(keys, s.key(c.Cluster))
			args = append(args, c.Member, encode(c.Request))
		}
		got, err := redis.Strings(s.eval(ctx, append(keys, args...)))
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
