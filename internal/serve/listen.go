package serve

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// A conn is a connection, with who is at the other end of a Unix socket.
type conn struct {
	net.Conn
	unix  bool
	known bool // uid is
	uid   uint32

	clients *clients
	place   *list.Element // among those that may go; nil for one that may not
	held    int           // bytes of its body and answer
	gone    bool
}

// Close closes the connection.
func (c *conn) Close() error {
	c.clients.remove(c)
	return c.Conn.Close()
}

// listen opens the listeners.
func (s *Server) listen() (all []net.Listener, err error) {
	defer func() {
		if err != nil {
			for _, l := range all {
				l.Close()
			}
		}
	}()
	if s.o.Socket != "" {
		l, err := s.listenUnix()
		if err != nil {
			return all, err
		}
		all = append(all, listener{l, true, s.clients})
	}
	if s.o.Listen != "" {
		l, err := net.Listen("tcp", s.o.Listen)
		if errors.Is(err, unix.EADDRNOTAVAIL) { // the service starts before the network
			s.o.Say(fmt.Sprintf("listen on %s: no device has that address yet", s.o.Listen))
			l, err = (&net.ListenConfig{Control: freebind}).Listen(context.Background(), "tcp", s.o.Listen)
		}
		if err != nil {
			return all, fmt.Errorf("listen on %s: %w", s.o.Listen, err)
		}
		var own net.Listener = listener{l, false, s.clients}
		if s.o.Cert != "" {
			own = tls.NewListener(own, &tls.Config{
				MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
				GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.cert.Load(), nil },
			})
		}
		all = append(all, own)
	}
	return all, nil
}

// freebind lets a socket have an address that no device has yet.
func freebind(network, _ string, c syscall.RawConn) (err error) {
	failed := c.Control(func(fd uintptr) {
		if network == "tcp6" {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1)
		} else {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
		}
	})
	return errors.Join(failed, err)
}

// listenUnix listens on the socket. One that no process listens on any more is replaced.
func (s *Server) listenUnix() (net.Listener, error) {
	path := s.o.Socket
	folder := filepath.Dir(path)
	err := os.Mkdir(folder, 0o755)
	if err == nil {
		err = os.Chmod(folder, 0o755) // whatever the umask
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: the folder above %s does not exist", path, folder)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	// A socket gets its name with the rights that it shall have: nobody connects before.
	l, err := listenOwn(path)
	if errors.Is(err, unix.EADDRINUSE) {
		if c, dialed := net.Dial("unix", path); dialed == nil {
			c.Close()
			return nil, fmt.Errorf("listen on %s: another process listens there; stop it, or give another --socket", path)
		}
		if info, err := os.Lstat(path); err != nil || info.Mode()&fs.ModeSocket == 0 {
			return nil, fmt.Errorf("listen on %s: the path exists and is not a socket", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("listen on %s: %w", path, err)
		}
		l, err = listenOwn(path)
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if s.o.SocketGID >= 0 {
		err = os.Lchown(path, -1, s.o.SocketGID)
		if err == nil {
			err = os.Chmod(path, 0o660)
		}
		if err != nil {
			s.o.Say(fmt.Sprintf("%s: set the group: %v", path, err))
		}
	}
	return l, nil
}

// listenOwn listens on a socket that only this user may connect to.
func listenOwn(path string) (net.Listener, error) {
	was := unix.Umask(0o177)
	defer unix.Umask(was)
	return net.Listen("unix", path)
}

// A listener accepts connections and asks who is at the other end.
type listener struct {
	net.Listener
	unix    bool
	clients *clients
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	own := &conn{Conn: c, unix: l.unix, clients: l.clients}
	if raw, ok := c.(syscall.Conn); ok && l.unix {
		own.uid, own.known = peerUID(raw)
	}
	l.clients.add(own)
	return own, nil
}

// peerUID is the user who opened the other end of a Unix socket.
func peerUID(c syscall.Conn) (uid uint32, known bool) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, false
	}
	err = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			uid, known = cred.Uid, true
		}
	})
	return uid, known && err == nil
}
