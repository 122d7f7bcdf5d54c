package testenv

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// A Redis is a server that keeps nothing on disk.
type Redis struct {
	URL string

	t      testing.TB
	socket string
	args   []string
	cmd    *exec.Cmd
}

// NewRedis starts a Redis on a Unix socket, with further arguments.
func NewRedis(t testing.TB, args ...string) *Redis {
	t.Helper()
	dir, err := os.MkdirTemp("", "redis") // a socket's path may not be as long as t.TempDir's are
	Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "socket")
	r := &Redis{URL: "unix://" + socket, t: t, socket: socket, args: append([]string{
		"--port", "0", "--unixsocket", socket, "--save", "", "--dir", dir, "--loglevel", "warning",
	}, args...)}
	r.Start()
	t.Cleanup(r.Kill)
	return r
}

// Start starts the server, again after Kill, and waits until it listens.
func (r *Redis) Start() {
	r.t.Helper()
	r.cmd = exec.Command("redis-server", r.args...)
	Must(r.t, r.cmd.Start())
	Eventually(r.t, "Redis listens", func() bool {
		c, err := net.Dial("unix", r.socket)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// Kill kills the server. All that it knew is lost.
func (r *Redis) Kill() {
	r.cmd.Process.Kill()
	r.cmd.Wait()
}
