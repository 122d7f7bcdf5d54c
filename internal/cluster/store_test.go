package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gomodule/redigo/redis"

	"github.com/shapectl/shapectl/internal/testenv"
)

// What the tests know of store.lua.
const (
	slowUs    = 1e6
	floors    = 100
	leastRate = 8000
)

// A simStore is a Redis in which tests decide what the script takes for the identity of the server.
type simStore struct {
	*Store
	t      testing.TB
	server int
}

func newSimStore(t testing.TB) *simStore {
	s := openRedis(t, Options{URL: testenv.NewRedis(t).URL, Prefix: "t"})
	before, rest, _ := strings.Cut(storeScript, "local function server()\n")
	_, after, found := strings.Cut(rest, "\nend\n")
	if !found {
		t.Fatal("store.lua has no function that tells servers apart")
	}
	s.script = before + "local function server() return redis.call('GET', 'server') end\n" + after
	s.Close()
	s.login = append(s.login, redis.DialReadTimeout(time.Minute)) // time is virtual, and this machine may be busy
	return &simStore{Store: s, t: t}
}

// records are the fields of each cluster, by key.
type records map[string]map[string]string

func (s *simStore) records() records {
	all := records{}
	names, err := s.Clusters(context.Background())
	testenv.Must(s.t, err)
	for _, name := range names {
		all[s.key(name)], err = redis.StringMap(s.do(context.Background(), "HGETALL", s.key(name)))
		testenv.Must(s.t, err)
	}
	return all
}

// begin makes it another server, with these records.
func (s *simStore) begin(with records) {
	s.server++
	do(s.t, s.Store, "FLUSHALL")
	do(s.t, s.Store, "SET", "server", fmt.Sprint("server ", s.server))
	for key, fields := range with {
		do(s.t, s.Store, "HSET", redis.Args{key}.AddFlat(fields)...)
	}
}

// state is the record of a cluster; without one, all is 0.
func (s *simStore) state(cluster string) (c stateRecord) {
	text, err := redis.String(s.do(context.Background(), "HGET", s.key(cluster), ""))
	if err == redis.ErrNil {
		return c
	}
	testenv.Must(s.t, err)
	_, text, _ = strings.Cut(text, "\x00")
	testenv.Must(s.t, decode(text, &c))
	return c
}

func (s *simStore) renew(c Call) (a Answer) {
	got, err := redis.Strings(s.eval(context.Background(), []any{1, s.key(c.Cluster), c.Member, encode(c.Request)}))
	testenv.Must(s.t, err)
	testenv.Must(s.t, decode(got[0], &a))
	return a
}
