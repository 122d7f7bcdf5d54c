package serve

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/input"
)

// Bounds on requests.
const (
	changesPerSecond, changeBurst   = 5, 20
	messagesPerSecond, messageBurst = 1, 20

	leastToken = 16 // bytes: too many to guess, however fast
	maxToken   = 1024
)

// A token permits changes to whoever knows it. It is kept as a hash, so that comparing takes the same time for all.
type token [sha256.Size]byte

func readToken(path string) (*token, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO has nobody who writes
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the token: %w", err)
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("read the token: %s is not a regular file", path)
	case info.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("read the token: others can read or write %s; run 'chmod 600' on it", path)
	}
	if err := input.Trusted(f); err != nil {
		return nil, fmt.Errorf("read the token: %s: %w", path, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxToken+1))
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	text = bytes.TrimSpace(text)
	if len(text) < leastToken || len(text) > maxToken {
		return nil, fmt.Errorf("read the token: %s has %d bytes; use %d to %d random ones", path, len(text), leastToken, maxToken)
	}
	if slices.ContainsFunc(text, func(b byte) bool { return b <= ' ' || b > '~' }) {
		return nil, fmt.Errorf("read the token: %s has characters other than letters, digits and punctuation", path)
	}
	t := token(sha256.Sum256(text))
	return &t, nil
}

func (t *token) is(given string) bool {
	sum := sha256.Sum256([]byte(given))
	return subtle.ConstantTimeCompare(t[:], sum[:]) == 1
}

// A peer is the other end of a connection.
type peer struct {
	conn *conn // nil only in tests
}

type peerKey struct{}

func withPeer(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	own, _ := c.(*conn)
	return context.WithValue(ctx, peerKey{}, peer{own})
}

func peerOf(r *http.Request) peer {
	p, _ := r.Context().Value(peerKey{}).(peer)
	return p
}

// overSocket reports whether the peer came over the Unix socket.
func (p peer) overSocket() bool { return p.conn != nil && p.conn.unix }

// isOwner reports whether the peer is root, or the user that the server runs as, over the socket.
func (p peer) isOwner() bool {
	return p.overSocket() && p.conn.known && (p.conn.uid == 0 || int(p.conn.uid) == os.Geteuid())
}

// isLocal reports whether the peer is on this host.
func (p peer) isLocal() bool {
	if p.conn == nil {
		return false
	}
	if p.conn.unix {
		return true
	}
	to, _ := p.conn.LocalAddr().(*net.TCPAddr)
	from, _ := p.conn.RemoteAddr().(*net.TCPAddr)
	return to != nil && from != nil && to.IP.IsLoopback() && from.IP.IsLoopback()
}

// forwarded reports whether the peer says that it asks for somebody else, who may be anywhere.
func forwarded(r *http.Request) bool {
	return slices.ContainsFunc([]string{"Forwarded", "X-Forwarded-For", "X-Real-Ip"}, func(name string) bool { return r.Header[name] != nil })
}

// Fail answers with an error as the commands print it with -j. A handler may have begun another answer before.
func Fail(w http.ResponseWriter, status int, exitCode int, format string, args ...any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("Shapectl-Exit-Code", strconv.Itoa(exitCode))
	w.WriteHeader(status)
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(struct {
		Error    string `json:"error"`
		ExitCode int    `json:"exit_code"`
	}{fmt.Sprintf(format, args...), exitCode})
}

const (
	exitInput   = 1
	exitKernel  = 2
	exitMissing = 5
)

// checked does what all requests need.
func (s *Server) checked(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			if p := recover(); p != nil {
				if p == http.ErrAbortHandler {
					panic(p)
				}
				s.say(fmt.Sprintf("%s %s: panic: %v\n%s", r.Method, r.URL.Path, p, debug.Stack()))
				Fail(w, http.StatusInternalServerError, exitKernel, "internal error; see the log of serve")
			}
		}()
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Permissions-Policy", "camera=(), microphone=(), geolocation=()")
		p := peerOf(r)
		if !p.overSocket() && !s.isOurs(r, p) {
			Fail(w, http.StatusMisdirectedRequest, exitInput, "this server is not %.100q; use its address, localhost, or a name given by --host", r.Host)
			return
		}
		if err := s.origin.Check(r); err != nil {
			Fail(w, http.StatusForbidden, exitMissing, "requests from pages of other sites are refused")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isOurs reports whether the Host of a request names this server. A page that makes its own name point here
// (DNS rebinding) is told by that name.
func (s *Server) isOurs(r *http.Request, p peer) bool {
	name, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		name = strings.TrimSuffix(strings.TrimPrefix(r.Host, "["), "]")
	}
	name = strings.TrimSuffix(name, ".")
	if slices.ContainsFunc(append([]string{"localhost"}, s.o.Hosts...), func(h string) bool { return strings.EqualFold(h, name) }) {
		return true
	}
	ip := net.ParseIP(name)
	if p.conn == nil {
		return ip.IsLoopback()
	}
	to, _ := p.conn.LocalAddr().(*net.TCPAddr)
	return ip != nil && to != nil && to.IP.Equal(ip)
}

// permitted answers and returns false if the client may not send this request.
func (s *Server) permitted(who Access, w http.ResponseWriter, r *http.Request) bool {
	p := peerOf(r)
	if who != Static && slices.Contains([]string{"cross-site", "same-site"}, r.Header.Get("Sec-Fetch-Site")) {
		Fail(w, http.StatusForbidden, exitMissing, "requests from pages of other sites are refused")
		return false
	}
	if mayWithoutToken(who, p, forwarded(r)) {
		return true
	}
	t := s.token.Load()
	scheme, given, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	hasToken := strings.EqualFold(scheme, "Bearer")
	switch {
	case t == nil:
		Fail(w, http.StatusForbidden, exitMissing, "only root may do this, over the Unix socket; to permit it here, start serve with --token-file")
		return false
	case hasToken && t.is(given):
		return true
	}
	text := "this needs the token: send it as 'Authorization: Bearer TOKEN'"
	if hasToken {
		text = "wrong token"
	}
	w.Header().Set("WWW-Authenticate", `Bearer realm="shapectl"`)
	Fail(w, http.StatusUnauthorized, exitMissing, "%s", text)
	return false
}

func mayWithoutToken(who Access, p peer, forwarded bool) bool {
	switch who {
	case Static:
		return true
	case Reads, Computes:
		return p.isLocal() && !forwarded
	}
	return p.isOwner() && !forwarded
}
