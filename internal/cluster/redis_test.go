package cluster

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// startRedis starts a Redis that keeps nothing on disk, and returns its URL.
func startRedis(t testing.TB, args ...string) (url string) {
	socket := filepath.Join(t.TempDir(), "redis.sock")
	cmd := exec.Command("redis-server", append([]string{
		"--port", "0", "--unixsocket", socket, "--save", "", "--dir", filepath.Dir(socket), "--loglevel", "warning",
	}, args...)...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return "unix://" + socket
}

func openRedis(t testing.TB, o Options) *Store {
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	for deadline := time.Now().Add(10 * time.Second); s.client.Ping(context.Background()).Err() != nil; {
		if time.Now().After(deadline) {
			t.Fatal("Redis does not answer")
		}
		time.Sleep(time.Millisecond)
	}
	return s
}

// TestStoreAsInLua compares the answers of Redis with those of the store in Go, which the simulations use.
func TestStoreAsInLua(t *testing.T) {
	s := openRedis(t, Options{URL: startRedis(t), Prefix: "t"})
	ctx, compared := context.Background(), 0
	for seed := range uint64(30) {
		randomHistory(t, seed, func(w *world) {
			server := ""
			w.compare = func(c Call, want Answer) {
				if server != w.store.server { // emptied, or another one
					server = w.store.server
					if err := s.client.FlushAll(ctx).Err(); err != nil {
						t.Fatal(err)
					}
				}
				got, err := s.Renew(ctx, []Call{c})
				if err != nil {
					t.Fatal(err)
				}
				if compared++; got[0] != want {
					w.fail("%+v: Redis says %+v, Go %+v", c, got[0], want)
				}
			}
		})
	}
	t.Logf("%d answers", compared)
}
