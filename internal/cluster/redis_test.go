package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

func openRedis(t testing.TB, o Options) *Store {
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	testenv.Eventually(t, "Redis answers", func() bool {
		_, err := s.do(context.Background(), "PING")
		return err == nil
	})
	return s
}

// do runs a command of Redis that must succeed.
func do(t testing.TB, s *Store, command string, args ...any) string {
	t.Helper()
	reply, err := s.do(context.Background(), command, args...)
	testenv.Must(t, err)
	return fmt.Sprintf("%s", reply)
}

// TestStoreWithoutItsWrites restarts Redis with what it had saved before, and lets a replica take over: both may lack the
// last writes, so leases of the past must end first.
func TestStoreWithoutItsWrites(t *testing.T) {
	url := testenv.NewRedis(t).URL
	first := openRedis(t, Options{URL: url, Prefix: "t"})
	grant(t, first)
	socket := strings.TrimPrefix(url, "unix://")
	t.Run("restart", func(t *testing.T) {
		dir := filepath.Dir(socket)
		do(t, first, "SAVE")
		again := openRedis(t, Options{URL: testenv.NewRedis(t, "--dir", dir).URL, Prefix: "t"})
		isQuiet(t, again)
	})
	t.Run("failover", func(t *testing.T) {
		port := freePort(t)
		do(t, first, "CONFIG", "SET", "port", port)
		second := openRedis(t, Options{URL: testenv.NewRedis(t, "--replicaof", "127.0.0.1", port).URL, Prefix: "t"})
		for deadline := time.Now().Add(20 * time.Second); ; {
			if v, err := second.View(context.Background(), "c"); err == nil && v != nil && !v.Quiet {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("the replica does not get the state")
			}
			time.Sleep(time.Millisecond)
		}
		do(t, second, "REPLICAOF", "NO", "ONE")
		isQuiet(t, second)
	})
}

// TestSentinel loses the primary. Sentinel names another one, which grants nothing at first.
func TestSentinel(t *testing.T) {
	primary, replica, sentinel := freePort(t), freePort(t), freePort(t)
	start := func(args ...string) *exec.Cmd {
		cmd := exec.Command("redis-server", append(args, "--bind", "127.0.0.1", "--save", "", "--dir", t.TempDir(), "--repl-diskless-sync-delay", "0")...)
		testenv.Must(t, cmd.Start())
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		return cmd
	}
	first := start("--port", primary)
	start("--port", replica, "--replicaof", "127.0.0.1", primary)
	second := openRedis(t, Options{URL: "redis://127.0.0.1:" + replica}) // Sentinel looks for it every 10 s only
	testenv.Eventually(t, "the replica has all", func() bool {
		return strings.Contains(do(t, second, "INFO", "replication"), "master_link_status:up")
	})
	conf := filepath.Join(t.TempDir(), "sentinel.conf")
	testenv.Must(t, os.WriteFile(conf, []byte("sentinel monitor m 127.0.0.1 "+primary+" 1\nsentinel down-after-milliseconds m 500\n"), 0o600))
	start(conf, "--port", sentinel, "--sentinel")
	s := openRedis(t, Options{URL: "redis://127.0.0.1:1?master_name=m&addr=127.0.0.1:" + sentinel, Prefix: "t"}) // the first one is down
	if want := "127.0.0.1:1,127.0.0.1:" + sentinel + ", as Sentinel names it for m"; s.Address() != want {
		t.Errorf("the address is %s", s.Address())
	}
	s.conn, second.conn = second.conn, nil // as if this one was the primary before
	if _, err := s.Renew(t.Context(), []Call{ask(t, New("h", 1), testTime, testPool)}); err == nil || !strings.Contains(err.Error(), "it is a replica") {
		t.Errorf("to a replica: %v", err)
	}
	grant(t, s)
	watch := openRedis(t, Options{URL: "redis://127.0.0.1:" + sentinel})
	testenv.Eventually(t, "Sentinel knows the replica", func() bool {
		return strings.Contains(do(t, watch, "SENTINEL", "REPLICAS", "m"), "master-link-status ok")
	})
	testenv.Must(t, first.Process.Kill())
	testenv.Eventually(t, "the replica has taken over", func() bool {
		answers, err := s.Renew(t.Context(), []Call{ask(t, New("h", 1), testTime, testPool)})
		return err == nil && answers[0].Status == Quiet
	})
}

// renew sends one request of a host, in virtual time.
func renew(t *testing.T, s *Store, a *Agent, now uint64, p Pool) Answer {
	t.Helper()
	c := ask(t, a, now, p)
	answers, err := s.Renew(context.Background(), []Call{c})
	if err != nil {
		t.Fatal(err)
	}
	a.Hear(now, c, answers[0])
	return answers[0]
}

// grant asks until there is a lease.
func grant(t *testing.T, s *Store) {
	t.Helper()
	a, now := New("h", 1), testTime
	for ; renew(t, s, a, now, testPool).Status == Quiet; now += uint64(time.Second) {
		if now > testTime+uint64(Length+Interval) {
			t.Fatal("no lease after one lease length")
		}
	}
}

func isQuiet(t *testing.T, s *Store) {
	t.Helper()
	if a := renew(t, s, New("h", 1), testTime, testPool); a.Status != Quiet {
		t.Errorf("%+v", a)
	}
}

func freePort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// TestTLSAndUser uses a Redis that wants a certificate, and a user with no more rights than docs/cluster.md gives him.
func TestTLSAndUser(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writeCertificate(t, cert, key)
	port := freePort(t)
	unix := testenv.NewRedis(t, "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert,
		"--user", "shapectl", "on", ">secret", "~{prod}:*", "resetchannels", "+evalsha", "+eval", "+hmget", "+hgetall", "+hset", "+hdel",
		"+del", "+info", "+time", "+scan", "+ping").URL
	openRedis(t, Options{URL: unix, Prefix: "prod"})
	o := Options{URL: "rediss://shapectl@127.0.0.1:" + port, Password: "secret", CA: cert, Cert: cert, Key: key, Prefix: "prod"}
	s := openRedis(t, o)
	grant(t, s)
	ctx := context.Background()
	if names, err := s.Clusters(ctx); err != nil || len(names) != 1 || names[0] != "c" {
		t.Errorf("%q %v", names, err)
	}
	if v, err := s.View(ctx, "c"); err != nil || len(v.Members) != 1 || v.Members[0].Host != "h" || v.RateBits != 1e9 {
		t.Errorf("%+v %v", v, err)
	}
	if err := s.Forget(ctx, "c", "h", "p", 0); !errors.Is(err, ErrLive) {
		t.Error(err)
	}
	for name, change := range map[string]func(*Options){
		"another password": func(o *Options) { o.Password = "guess" },
		"another prefix":   func(o *Options) { o.Prefix = "other" },
		"no certificate":   func(o *Options) { o.Cert, o.Key = "", "" },
		"no authority":     func(o *Options) { o.CA = "" },
	} {
		bad := o
		change(&bad)
		s, err := Open(bad)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Renew(ctx, []Call{ask(t, New("h", 1), testTime, testPool)}); err == nil {
			t.Errorf("%s: no error", name)
		}
		s.Close()
	}
}

func writeCertificate(t *testing.T, cert, key string) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: raw}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRollingUpgrade has hosts with two builds. The newer one knows one more field and another version of the records, which
// come into use when the last old host is gone. An old host that comes back then is told so.
func TestRollingUpgrade(t *testing.T) {
	url := testenv.NewRedis(t).URL
	old := openRedis(t, Options{URL: url, Prefix: "t"})
	script := storeScript
	for _, change := range [][2]string{
		{"local VERSION = 1\n", "local VERSION = 2\n"},
		{"local MEMBER = fields(25)", "local MEMBER = fields(26)"},
		{"q[A.used], 0}\n", "q[A.used], 0, 42}\n"},
		{"STATE = fields(31)", "STATE = fields(32)"},
		{"spentSeen = 31}", "spentSeen = 31, added = 32}"},
	} {
		if strings.Count(script, change[0]) != 1 {
			t.Fatalf("%q is not in the script once", change[0])
		}
		script = strings.ReplaceAll(script, change[0], change[1])
	}
	newer := openRedis(t, Options{URL: url, Prefix: "t"})
	newer.script = script
	hosts := map[string]*Agent{}
	now := testTime
	ask := func(s *Store, host string, speaks float64) Answer {
		t.Helper()
		a := hosts[host]
		if a == nil {
			a = New(host, 1)
			hosts[host] = a
		}
		c := ask(t, a, now, testPool)
		c.Request.Speaks = speaks
		answers, err := s.Renew(context.Background(), []Call{c})
		if err != nil {
			t.Fatal(err)
		}
		a.Hear(now, c, answers[0])
		return answers[0]
	}
	for range 10 {
		now += uint64(time.Second)
		if a, b := ask(old, "old", 1), ask(newer, "new", 2); a.Status == Newer || b.Status == Newer {
			t.Fatalf("%v %v", a, b)
		}
	}
	if a, b := ask(old, "old2", 1), ask(newer, "new2", 2); a.Members != 3 || b.Members != 4 {
		t.Fatalf("%v %v", a, b)
	}
	for range 10 { // without the old hosts
		now += uint64(time.Second)
		if a := ask(newer, "new", 2); a.Status != OK || a.Lease == 0 {
			t.Fatalf("%+v", a)
		}
	}
	if a := ask(old, "old", 1); a.Status != Newer {
		t.Errorf("%+v", a)
	}
	if _, err := old.View(context.Background(), "c"); err == nil || !strings.Contains(err.Error(), "install a newer build") {
		t.Error(err)
	}
}

// TestForgottenHostReturns has a host that an operator has forgotten. It must not make the store believe that others are
// missing.
func TestForgottenHostReturns(t *testing.T) {
	s := openRedis(t, Options{URL: testenv.NewRedis(t).URL, Prefix: "t"})
	pools := map[string]Pool{"a": testPool, "b": testPool}
	agents := map[string]*Agent{"a": New("a", 1), "b": New("b", 2)}
	now := testTime
	step := func(host string) {
		t.Helper()
		c := ask(t, agents[host], now, pools[host])
		answers, err := s.Renew(context.Background(), []Call{c})
		if err != nil {
			t.Fatal(err)
		}
		if _, l, ok := agents[host].Hear(now, c, answers[0]); ok {
			p := pools[host]
			p.Lease = l
			pools[host] = p
		}
	}
	for range 8 {
		now += uint64(time.Second)
		step("a")
		step("b")
	}
	if err := s.Forget(context.Background(), "c", "b", "p", 0); !errors.Is(err, ErrLive) {
		t.Fatal(err)
	}
	for range 4 {
		now += uint64(time.Second)
		step("a")
	}
	if err := s.Forget(context.Background(), "c", "b", "p", 0); err != nil {
		t.Fatal(err)
	}
	agents["b"] = New("b", 3) // another process
	for range 4 {
		now += uint64(time.Second)
		step("a")
		step("b")
	}
	if v, err := s.View(context.Background(), "c"); err != nil || v.MissingBits != 0 || len(v.Members) != 2 {
		t.Errorf("%+v %v", v, err)
	}
	for _, a := range agents {
		if _, err := s.Renew(context.Background(), a.Ask(now+uint64(time.Second), nil, false)); err != nil {
			t.Error(err)
		}
	}
	if names, err := s.Clusters(context.Background()); err != nil || len(names) != 0 {
		t.Errorf("all have left: %q %v", names, err)
	}
}

// TestForeignKey has something else where a cluster should be: other clusters keep their leases.
func TestForeignKey(t *testing.T) {
	s := openRedis(t, Options{URL: testenv.NewRedis(t).URL, Prefix: "t"})
	ctx := context.Background()
	do(t, s, "SET", s.key("other"), "boo")
	other := testPool
	other.Cluster = "other"
	answers, err := s.Renew(ctx, append(New("h", 1).Ask(testTime, []Pool{other}, false), ask(t, New("h", 2), testTime, testPool)))
	if err != nil || answers[0].Status != Broken || answers[1].Status != Quiet {
		t.Errorf("%+v %v", answers, err)
	}
}

// TestRefusals has a Redis that refuses to write. That is no fault of the records.
func TestRefusals(t *testing.T) {
	s := openRedis(t, Options{URL: testenv.NewRedis(t).URL, Prefix: "t"})
	grant(t, s)
	ctx := context.Background()
	refused := func(want string) {
		t.Helper()
		_, err := s.Renew(ctx, []Call{ask(t, New("h", 1), testTime, testPool)})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not %q", err, want)
		}
	}
	do(t, s, "CONFIG", "SET", "maxmemory", 1)
	refused("it has no memory left; raise its maxmemory (OOM")
	do(t, s, "CONFIG", "SET", "maxmemory", 0)
	do(t, s, "REPLICAOF", "127.0.0.1", 1)
	refused("it is a replica; name the primary, or Sentinels (READONLY")
	do(t, s, "REPLICAOF", "NO", "ONE")
	do(t, s, "ACL", "SETUSER", "default", "-hset")
	refused("the user lacks a right; docs/cluster.md lists all (")
}

// TestBrokenRecords has records that somebody else has written: no lease may come of them.
func TestBrokenRecords(t *testing.T) {
	s := openRedis(t, Options{URL: testenv.NewRedis(t).URL, Prefix: "t"})
	ctx := context.Background()
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1e300, 1e300} {
		a, p, now := New("h", 1), testPool, testTime
		p.Cluster = fmt.Sprint(bad)
		for i := range 8 {
			now += uint64(time.Second)
			if i == 4 {
				do(t, s, "HSET", s.key(p.Cluster), "other\tp", encode(record{Claim: bad, Safe: bad, Rate: bad, Order: 1000, Demand: bad}))
			}
			c := ask(t, a, now, p)
			c.Request.Rate += float64(i) // a change, for which the store looks at all members
			answers, err := s.Renew(ctx, []Call{c})
			if err != nil {
				t.Fatal(err)
			}
			_, l, ok := a.Hear(now, c, answers[0])
			if finite := bad-bad == 0; i > 4 && (!finite && answers[0].Status != Broken || bad > 0 && ok && l.Rate > leastRate) {
				t.Errorf("%v: the answer is %+v, and the lease %+v", bad, answers[0], l)
			}
			if ok {
				p.Lease = l
			}
			if i > 4 {
				if v, err := s.View(ctx, p.Cluster); err == nil {
					t.Errorf("%v: it is shown as %+v", bad, v)
				}
			}
			if uint64(p.Lease.Rate) > p.Rate || uint64(p.Lease.Safe) > p.Rate {
				t.Errorf("%v: the lease is %+v", bad, p.Lease)
			}
		}
	}
}

// TestBadURL sees that no password is printed.
func TestBadURL(t *testing.T) {
	for _, url := range []string{"redis://u:s3cr/et@h:6379", "redis://:s3cret%zz@h:1", "redis://:s3 cret@h:1", "redis://h?master_name=x&addr=:s3cr@h:p", "redis://:s3cr@h?master=x"} {
		if _, err := Open(Options{URL: url}); err == nil || strings.Contains(err.Error(), "s3") {
			t.Errorf("%s: %v", url, err)
		}
	}
}
