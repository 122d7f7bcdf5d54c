package serve

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

const aToken = "0123456789abcdef0123456789abcdef"

// A rig is a server that runs.
type rig struct {
	t       *testing.T
	s       *Server
	socket  string
	tcp     string // host:port
	changes atomic.Int32
	said    *transcript
	end     func() error
}

type transcript struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *transcript) say(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text.WriteString(text + "\n")
}

func (s *transcript) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// file makes a file of a mode.
func file(t *testing.T, name, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	testenv.Must(t, os.WriteFile(path, []byte(text), mode))
	testenv.Must(t, os.Chmod(path, mode))
	return path
}

// newRig starts a server with a handler of each kind. with changes its options.
func newRig(t *testing.T, with func(*Options)) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "serve") // a socket's path may not be as long as t.TempDir's are
	testenv.Must(t, err)
	testenv.Must(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{t: t, socket: filepath.Join(dir, "s"), said: new(transcript)}
	o := Options{Socket: r.socket, SocketGID: -1, Listen: "127.0.0.1:0", Say: r.said.say}
	if with != nil {
		with(&o)
	}
	r.s, err = New(o)
	testenv.Must(t, err)
	text := func(text string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) })
	}
	r.s.Handle("GET /static", Static, text("static"))
	r.s.Handle("GET /read", Reads, text("read"))
	r.s.Handle("POST /ask", Reads, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) { w.Write(Body(q)) }))
	r.s.Handle("POST /change", Changes, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		r.changes.Add(1)
		io.WriteString(w, "changed")
	}))
	r.s.Handle("GET /panic", Reads, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("of the test") }))
	r.s.Handle("GET /large", Reads, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		part := make([]byte, 1<<20)
		rand.Read(part) // nobody compresses it
		for range MaxAnswer>>20 + 1 {
			if _, err := w.Write(part); err != nil {
				return
			}
		}
	}))
	r.s.HandleStream("GET /stream", Reads, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		io.WriteString(w, "begins\n")
		w.(http.Flusher).Flush()
		<-q.Context().Done()
	}))
	ctx, stop := context.WithCancel(t.Context())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- r.s.Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	for _, a := range r.s.addresses {
		if a.Network() == "tcp" {
			r.tcp = a.String()
		}
	}
	r.end = sync.OnceValue(func() error {
		stop()
		return <-ended
	})
	t.Cleanup(func() { r.end() })
	return r
}

// overSocket is a client over the Unix socket.
func (r *rig) overSocket() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", r.socket)
	}}}
}

// overSocketAs is a client of another user.
func (r *rig) overSocketAs(uid int) *http.Client {
	dial := func(context.Context, string, string) (c net.Conn, err error) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // and never unlocked: the thread ends with its user
			var fd int
			if fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
				return
			}
			f := os.NewFile(uintptr(fd), "socket")
			defer f.Close()
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
				err = errno
				return
			}
			if err = unix.Connect(fd, &unix.SockaddrUnix{Name: r.socket}); err != nil {
				return
			}
			c, err = net.FileConn(f)
		}()
		<-done
		return c, err
	}
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
}

// overTCP is a client over the loopback device.
func (r *rig) overTCP() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("tcp", r.tcp) }}}
}

// A request is one of the tests: "Name: value" in headers, and a Host among them.
type request struct {
	method, path, body string
	headers            []string
}

func (r *rig) do(c *http.Client, q request) (status int, text string, h http.Header) {
	r.t.Helper()
	scheme := "http"
	if r.s.o.Cert != "" {
		scheme = "https"
	}
	made, err := http.NewRequest(q.method, scheme+"://localhost"+q.path, strings.NewReader(q.body))
	testenv.Must(r.t, err)
	if q.method == "POST" {
		made.Header.Set("Content-Type", "application/json")
	}
	for _, line := range q.headers {
		name, value, _ := strings.Cut(line, ": ")
		if name == "Host" {
			made.Host = value
		} else {
			made.Header.Set(name, value)
		}
	}
	answer, err := c.Do(made)
	if err != nil {
		return 0, err.Error(), nil
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body) // the server may close a connection with bytes that it did not take
	return answer.StatusCode, string(body), answer.Header
}

// wants ends the test unless a request has that status; if it is an error, as the commands print it.
func (r *rig) wants(status int, c *http.Client, q request) {
	r.t.Helper()
	got, text, h := r.do(c, q)
	if got != status {
		r.t.Errorf("%s %s %q: %d, not %d: %s", q.method, q.path, q.headers, got, status, text)
	}
	if status < 400 {
		return
	}
	var told struct {
		Error    string `json:"error"`
		ExitCode int    `json:"exit_code"`
	}
	if json.Unmarshal([]byte(text), &told) != nil || told.Error == "" || told.ExitCode == 0 || h.Get("Content-Type") != "application/json" {
		r.t.Errorf("%s %s: the error is %s %q", q.method, q.path, h.Get("Content-Type"), text)
	}
}

func TestWhoMayChange(t *testing.T) {
	testenv.Root(t)
	const member = 64998
	r := newRig(t, func(o *Options) { o.SocketGID = member })
	var st unix.Stat_t
	testenv.Must(t, unix.Stat(r.socket, &st))
	if st.Mode&0o777 != 0o660 || st.Gid != member {
		t.Errorf("the socket has mode %o and group %d", st.Mode&0o777, st.Gid)
	}
	testenv.Must(t, os.Chmod(r.socket, 0o666)) // so that others than members connect, too
	change, read, static := request{method: "POST", path: "/change", body: "{}"}, request{method: "GET", path: "/read"}, request{method: "GET", path: "/static"}
	r.wants(200, r.overSocket(), change)
	r.wants(200, r.overSocket(), read)
	other := r.overSocketAs(65534)
	r.wants(403, other, change)
	r.wants(200, other, read)
	r.wants(403, r.overTCP(), change)
	r.wants(200, r.overTCP(), read)
	r.wants(200, r.overTCP(), static)
	for _, name := range []string{"X-Forwarded-For: 192.0.2.1", "Forwarded: for=192.0.2.1", "X-Real-IP: 192.0.2.1"} {
		asked := read
		asked.headers = []string{name}
		r.wants(403, r.overSocket(), asked) // it is for somebody who may be anywhere
		asked = change
		asked.headers = []string{name}
		r.wants(403, r.overSocket(), asked)
	}
	if n := r.changes.Load(); n != 1 {
		t.Errorf("%d changes were made", n)
	}
	if info, err := os.Stat(r.socket); err != nil || info.Mode()&os.ModeSocket == 0 {
		t.Errorf("the socket: %v, %v", info, err)
	}
	testenv.Must(t, r.end())
	if _, err := os.Stat(r.socket); !os.IsNotExist(err) {
		t.Errorf("the socket stays: %v", err)
	}
}

// TestNewFolder sees that the umask of whoever starts the server does not keep the group from the socket.
func TestNewFolder(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	var folder string
	newRig(t, func(o *Options) {
		folder = filepath.Join(filepath.Dir(o.Socket), "new")
		o.Socket = filepath.Join(folder, "s")
	})
	info, err := os.Stat(folder)
	testenv.Must(t, err)
	if info.Mode().Perm() != 0o755 {
		t.Errorf("the folder of the socket: %v", info.Mode())
	}
}

func TestOnlyTheOwnerConnects(t *testing.T) {
	r := newRig(t, nil)
	var st unix.Stat_t
	testenv.Must(t, unix.Stat(r.socket, &st))
	if st.Mode&0o777 != 0o600 {
		t.Errorf("without a group, the socket has mode %o", st.Mode&0o777)
	}
}

func TestToken(t *testing.T) {
	path := file(t, "token", aToken+"\n", 0o600)
	r := newRig(t, func(o *Options) { o.TokenFile = path })
	with := func(token string) request {
		return request{method: "POST", path: "/change", body: "{}", headers: []string{"Authorization: Bearer " + token}}
	}
	r.wants(200, r.overTCP(), with(aToken))
	r.wants(401, r.overTCP(), request{method: "POST", path: "/change", body: "{}"})
	for _, wrong := range []string{"", aToken[:31], aToken + "0", strings.ToUpper(aToken), " " + aToken} {
		r.wants(401, r.overTCP(), with("x"+wrong))
	}
	const next = "another-token-0123456789"
	testenv.Must(t, os.WriteFile(path, []byte(next), 0o600))
	testenv.Must(t, r.s.Reload())
	r.wants(200, r.overTCP(), with(next))
	testenv.Must(t, os.Chmod(path, 0o640))
	if err := r.s.Reload(); err == nil || !strings.Contains(err.Error(), "others can read") {
		t.Errorf("a token that others can read: %v", err)
	}
	r.wants(200, r.overTCP(), with(next))
	for text, mode := range map[string]os.FileMode{"short": 0o600, "": 0o600, aToken + " " + aToken: 0o600, strings.Repeat("x", maxToken+1): 0o600, aToken: 0o604} {
		if _, err := readToken(file(t, "token", text, mode)); err == nil {
			t.Errorf("%.20q of mode %o is a token", text, mode)
		}
	}
}

func TestHost(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Hosts = []string{"limits.example", "203.0.113.5", "2001:db8::5"} })
	_, port, _ := net.SplitHostPort(r.tcp)
	for host, status := range map[string]int{
		"localhost": 200, "localhost:" + port: 200, "LOCALHOST.": 200, "127.0.0.1": 200, "127.0.0.1:" + port: 200, "limits.example": 200, "Limits.Example:443": 200,
		"203.0.113.5": 200, "[2001:db8::5]:443": 200, "[2001:db8::5]": 200, "127.0.0.1.": 200, // the first two by an address translation
		"evil.example": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421, "192.0.2.1": 421, "[::1]": 421, "0x7f000001": 421, "127.1": 421,
	} {
		r.wants(status, r.overTCP(), request{method: "GET", path: "/read", headers: []string{"Host: " + host}})
	}
	r.wants(200, r.overSocket(), request{method: "GET", path: "/read", headers: []string{"Host: any"}})
	for _, h := range []string{"", "limits.example:443", "https://limits.example", "limits.example.", "[2001:db8::5]"} {
		if _, err := New(Options{Hosts: []string{h}}); err == nil || !strings.Contains(err.Error(), "leave out the scheme") {
			t.Errorf("--host %q: %v", h, err)
		}
	}
}

func TestOtherSites(t *testing.T) {
	token := file(t, "token", aToken, 0o600)
	r := newRig(t, func(o *Options) { o.TokenFile = token })
	for _, c := range []*http.Client{r.overTCP(), r.overSocket()} {
		for _, from := range [][]string{
			{"Sec-Fetch-Site: cross-site"}, {"Sec-Fetch-Site: same-site"}, {"Origin: https://evil.example"}, {"Origin: null"},
			{"Origin: http://localhost:1", "Host: localhost:2"},
		} {
			from = append(from, "Authorization: Bearer "+aToken)
			r.wants(403, c, request{"POST", "/change", "{}", from})
		}
		own := []string{"Origin: http://localhost", "Sec-Fetch-Site: same-origin", "Authorization: Bearer " + aToken}
		r.wants(200, c, request{"POST", "/change", "{}", own})
		r.wants(403, c, request{"GET", "/read", "", []string{"Sec-Fetch-Site: cross-site"}})
		r.wants(200, c, request{"GET", "/static", "", []string{"Sec-Fetch-Site: cross-site"}}) // a link to the page
		for _, kind := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""} {
			r.wants(415, c, request{"POST", "/change", "{}", []string{"Content-Type: " + kind, "Authorization: Bearer " + aToken}})
		}
		_, _, h := r.do(c, request{"GET", "/read", "", []string{"Origin: https://evil.example"}})
		for name := range h {
			if strings.HasPrefix(name, "Access-Control") {
				t.Errorf("the answer has %s", name)
			}
		}
	}
}

func TestHeaders(t *testing.T) {
	r := newRig(t, nil)
	for _, path := range []string{"/static", "/read", "/missing", "/panic", "/large"} {
		_, _, h := r.do(r.overTCP(), request{method: "GET", path: path})
		if !strings.Contains(h.Get("Content-Security-Policy"), "default-src 'none'") || !strings.Contains(h.Get("Content-Security-Policy"), "frame-ancestors 'none'") {
			t.Errorf("%s: the policy is %q", path, h.Get("Content-Security-Policy"))
		}
		for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"} {
			if h.Get(name) != want {
				t.Errorf("%s: %s is %q", path, name, h.Get(name))
			}
		}
	}
}

func TestBounds(t *testing.T) {
	r := newRig(t, func(o *Options) { o.MaxBody = 1000 })
	r.wants(200, r.overTCP(), request{method: "POST", path: "/ask", body: strings.Repeat(" ", 1000)})
	r.wants(413, r.overTCP(), request{method: "POST", path: "/ask", body: strings.Repeat(" ", 1001)})
	r.wants(400, r.overTCP(), request{method: "GET", path: "/large"})
	r.wants(400, r.overTCP(), request{method: "GET", path: "/read", body: "x"})
	chunked, err := http.NewRequest("GET", "http://localhost/read", io.MultiReader(strings.NewReader("x"))) // of unknown length
	testenv.Must(t, err)
	answer, err := r.overTCP().Do(chunked)
	testenv.Must(t, err)
	if answer.Body.Close(); answer.StatusCode != 400 {
		t.Errorf("a GET with a body: %s", answer.Status)
	}
	if status, text, _ := r.do(r.overTCP(), request{method: "GET", path: "/read", headers: []string{"X: " + strings.Repeat("x", 2*maxHeader)}}); status != 431 && status != 0 {
		t.Errorf("a large header: %d %s", status, text) // or the connection is closed before all of it was sent
	}
	made := 0
	for range 3 * changeBurst {
		if status, _, _ := r.do(r.overSocket(), request{method: "POST", path: "/change", body: "{}"}); status == 200 {
			made++
		} else if status != 429 {
			t.Fatalf("a change too many: %d", status)
		}
	}
	if made < changeBurst || made >= 3*changeBurst {
		t.Errorf("%d changes at once", made)
	}
}

// TestPanic sees that an error of a handler ends neither the server nor what it has to say.
func TestPanic(t *testing.T) {
	r := newRig(t, nil)
	for range 2 * mostAtOnce[readingTCP] { // it must not keep its place either
		r.wants(500, r.overTCP(), request{method: "GET", path: "/panic"})
	}
	r.wants(200, r.overTCP(), request{method: "GET", path: "/read"})
	if !strings.Contains(r.said.String(), "panic: of the test") {
		t.Errorf("it said %s", r.said)
	}
}

// TestSlowClients sees that clients who send or take bytes slowly keep nobody else away.
func TestSlowClients(t *testing.T) {
	r := newRig(t, nil)
	for _, begin := range []string{"GET /rea", "POST /ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"} {
		var slow []net.Conn
		for range 3 * maxConnections {
			c, err := net.Dial("tcp", r.tcp)
			testenv.Must(t, err)
			io.WriteString(c, begin) // the server may have closed it
			slow = append(slow, c)
		}
		r.wants(200, r.overTCP(), request{method: "GET", path: "/read"})
		r.wants(200, r.overSocket(), request{method: "POST", path: "/ask", body: "{}"})
		for _, c := range slow {
			c.Close()
		}
	}
}

// TestSlowReaders sees that clients who take no answers keep no place, and a bounded amount of memory.
func TestSlowReaders(t *testing.T) {
	c, k := newClients(), []*conn{}
	for range 6 {
		a, b := net.Pipe()
		defer b.Close()
		n := &conn{Conn: a, clients: c}
		c.add(n)
		k = append(k, n)
	}
	var over []func()
	for i, n := range k[:5] {
		c.busy(k[1])() // which has an answer in between
		over = append(over, c.holds(n, MaxAnswer))
		if want := i == 4; k[0].gone != want {
			t.Errorf("with %d answers to take, the first client is gone: %v", i+1, k[0].gone)
		}
	}
	if k[1].gone || k[4].gone || k[5].gone {
		t.Error("others than the first are gone")
	}
	for i, f := range over {
		f()
		c.remove(k[i])
	}
	if c.held != [2]int{} {
		t.Errorf("%v bytes are held for nobody", c.held)
	}
}

// TestManyBodies sees that bodies that do not end take a bounded amount of memory, and keep nobody away.
func TestManyBodies(t *testing.T) {
	r := newRig(t, func(o *Options) { o.MaxBody = maxHeld / 4 })
	var first net.Conn
	for i := range 5 {
		c, err := net.Dial("tcp", r.tcp)
		testenv.Must(t, err)
		defer c.Close()
		if first == nil {
			first = c
		}
		fmt.Fprintf(c, "POST /ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", r.s.o.MaxBody)
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "100 Continue") {
			t.Fatalf("body %d: %q, %v", i, line, err)
		}
	}
	testenv.Must(t, first.SetReadDeadline(time.Now().Add(10*time.Second)))
	if _, err := io.Copy(io.Discard, first); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the server waits for more bodies than it has memory for")
	}
	r.wants(200, r.overTCP(), request{method: "POST", path: "/ask", body: "{}"})
}

func TestPlaces(t *testing.T) {
	testenv.Root(t)
	r := newRig(t, nil)
	testenv.Must(t, os.Chmod(r.socket, 0o666))
	other := r.overSocketAs(65534)
	hold := make(chan struct{})
	var once sync.Once
	free := func() { once.Do(func() { close(hold) }) }
	defer free()
	busy := make(chan struct{}, 100)
	handler := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		busy <- struct{}{}
		<-hold
	})
	r.s.Handle("GET /hold", Reads, handler)
	r.s.Handle("GET /measure", Measures, handler)
	r.s.Handle("GET /compute", Computes, handler)
	var all sync.WaitGroup
	for range mostAtOnce[readingTCP] {
		all.Go(func() { r.do(r.overTCP(), request{method: "GET", path: "/hold"}) })
	}
	for range mostOfUser {
		all.Go(func() { r.do(other, request{method: "GET", path: "/hold"}) })
	}
	all.Go(func() { r.do(r.overSocket(), request{method: "GET", path: "/measure"}) })
	for range mostAtOnce[computing] {
		all.Go(func() { r.do(r.overSocket(), request{method: "GET", path: "/compute"}) })
	}
	for range mostAtOnce[readingTCP] + mostOfUser + 1 + mostAtOnce[computing] {
		<-busy
	}
	var late sync.WaitGroup
	late.Go(func() { r.wants(503, other, request{method: "GET", path: "/read"}) })
	r.wants(200, r.overSocketAs(65533), request{method: "GET", path: "/read"})
	late.Go(func() { r.wants(503, r.overSocket(), request{method: "GET", path: "/compute"}) })
	r.wants(200, r.overSocket(), request{method: "GET", path: "/read"})
	r.wants(200, r.overSocket(), request{method: "POST", path: "/change", body: "{}"})
	testenv.Must(t, r.s.Alive(t.Context()))
	r.wants(503, r.overTCP(), request{method: "GET", path: "/read"})
	late.Wait()
	free()
	all.Wait()
	r.wants(200, r.overTCP(), request{method: "GET", path: "/read"})
}

// TestStreamsOverTCP sees that streams over TCP keep nobody from one over the socket.
func TestStreamsOverTCP(t *testing.T) {
	r := newRig(t, nil)
	open := func(c *http.Client) int {
		answer, err := c.Get("http://localhost/stream")
		testenv.Must(t, err)
		t.Cleanup(func() { answer.Body.Close() })
		return answer.StatusCode
	}
	for range mostAtOnce[streamingTCP] {
		if status := open(r.overTCP()); status != 200 {
			t.Fatalf("a stream: %d", status)
		}
	}
	if status := open(r.overTCP()); status != 503 {
		t.Errorf("a stream too many: %d", status)
	}
	if status := open(r.overSocket()); status != 200 {
		t.Errorf("a stream over the socket: %d", status)
	}
}

func TestStreamsEndWithTheServer(t *testing.T) {
	r := newRig(t, nil)
	answer, err := r.overSocket().Get("http://localhost/stream")
	testenv.Must(t, err)
	defer answer.Body.Close()
	if line, err := bufio.NewReader(answer.Body).ReadString('\n'); line != "begins\n" {
		t.Fatalf("the stream says %q: %v", line, err)
	}
	testenv.Must(t, r.end())
	if _, err := io.ReadAll(answer.Body); err != nil {
		t.Errorf("the stream ends with %v", err)
	}
}

func TestSecondServer(t *testing.T) {
	r := newRig(t, nil)
	s, err := New(Options{Socket: r.socket, SocketGID: -1, Say: r.said.say})
	testenv.Must(t, err)
	if err := s.Run(t.Context(), func() {}); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a second server on the socket: %v", err)
	}
	r.wants(200, r.overSocket(), request{method: "GET", path: "/read"})

	stale := filepath.Join(filepath.Dir(r.socket), "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale})
	testenv.Must(t, err)
	l.SetUnlinkOnClose(false)
	l.Close()
	newRig(t, func(o *Options) { o.Socket = stale })

	other := file(t, "file", "of somebody", 0o600)
	s, err = New(Options{Socket: other, SocketGID: -1, Say: r.said.say})
	testenv.Must(t, err)
	if err := s.Run(t.Context(), func() {}); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a file in place of the socket: %v", err)
	}
	if text, _ := os.ReadFile(other); string(text) != "of somebody" {
		t.Errorf("the file has %q", text)
	}
}

// certificate makes a certificate and its key.
func certificate(t *testing.T, name string) (cert, key []byte) {
	t.Helper()
	secret, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	testenv.Must(t, err)
	is := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour)}
	raw, err := x509.CreateCertificate(rand.Reader, is, is, &secret.PublicKey, secret)
	testenv.Must(t, err)
	hidden, err := x509.MarshalPKCS8PrivateKey(secret)
	testenv.Must(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: hidden})
}

func TestTLS(t *testing.T) {
	certText, keyText := certificate(t, "first")
	cert, key := file(t, "cert", string(certText), 0o600), file(t, "key", string(keyText), 0o600)
	token := file(t, "token", aToken, 0o600)
	r := newRig(t, func(o *Options) { o.Cert, o.Key, o.TokenFile = cert, key, token })
	shown := func() string {
		t.Helper()
		c, err := tls.Dial("tcp", r.tcp, &tls.Config{InsecureSkipVerify: true})
		testenv.Must(t, err)
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	r.wants(200, r.overTCP(), request{method: "GET", path: "/read"})
	testenv.Must(t, r.s.Alive(t.Context()))
	if name := shown(); name != "first" {
		t.Errorf("the certificate is %q", name)
	}
	if c, err := tls.Dial("tcp", r.tcp, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}); err == nil {
		c.Close()
		t.Error("it speaks TLS 1.1")
	}
	if answer, err := http.Get("http://" + r.tcp + "/read"); err == nil && answer.StatusCode == 200 {
		t.Error("it speaks without TLS, too")
	}
	certText, keyText = certificate(t, "second")
	testenv.Must(t, os.WriteFile(cert, certText, 0o600))
	testenv.Must(t, os.WriteFile(token, []byte(strings.ToUpper(aToken)), 0o600))
	if r.s.Reload() == nil {
		t.Error("a certificate without its key is used")
	}
	r.wants(200, r.overTCP(), request{"POST", "/change", "{}", []string{"Authorization: Bearer " + aToken}}) // nor the token beside it
	if name := shown(); name != "first" {
		t.Errorf("the certificate is %q after one that is not valid", name)
	}
	testenv.Must(t, os.WriteFile(key, keyText, 0o600))
	testenv.Must(t, r.s.Reload())
	if name := shown(); name != "second" {
		t.Errorf("the certificate is %q after a reload", name)
	}
}

func TestOtherAddresses(t *testing.T) {
	certText, keyText := certificate(t, "name")
	cert, key, token := file(t, "cert", string(certText), 0o600), file(t, "key", string(keyText), 0o600), file(t, "token", aToken, 0o600)
	for _, listen := range []string{"0.0.0.0:0", ":0", "[::]:0", "192.0.2.1:0"} {
		for _, o := range []Options{{}, {TokenFile: token}, {Cert: cert, Key: key}} {
			o.Listen = listen
			if _, err := New(o); err == nil || !strings.Contains(err.Error(), "TLS and a token") {
				t.Errorf("listen on %s with %+v: %v", listen, o, err)
			}
		}
	}
	for _, o := range []Options{{Cert: cert}, {Key: key}, {Listen: "nonsense"}, {Listen: "127.0.0.1:70000"}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
	for _, later := range []string{"198.51.100.1:0", "[2001:db8::1]:0"} { // a service starts before the network
		r := newRig(t, func(o *Options) { o.Listen, o.TokenFile, o.Cert, o.Key = later, token, cert, key })
		if !strings.Contains(r.said.String(), "no device has that address yet") {
			t.Errorf("listen on %s: it says %q", later, r.said)
		}
	}
	r := newRig(t, func(o *Options) { o.Listen, o.TokenFile, o.Cert, o.Key = "0.0.0.0:0", token, cert, key })
	var own string // an address of this host that is not the loopback device's
	addresses, err := net.InterfaceAddrs()
	testenv.Must(t, err)
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			own = n.IP.String()
		}
	}
	_, port, _ := net.SplitHostPort(r.tcp)
	r.tcp = net.JoinHostPort("127.0.0.1", port)
	r.wants(200, r.overTCP(), request{method: "GET", path: "/read"})
	if own == "" {
		testenv.Skip(t, "this host has no other address")
	}
	r.tcp = net.JoinHostPort(own, port)
	host := "Host: " + r.tcp
	r.wants(401, r.overTCP(), request{method: "GET", path: "/read", headers: []string{host}})
	r.wants(200, r.overTCP(), request{method: "GET", path: "/static", headers: []string{host}})
	r.wants(200, r.overTCP(), request{method: "GET", path: "/read", headers: []string{host, "Authorization: Bearer " + aToken}})
	r.wants(200, r.overTCP(), request{method: "GET", path: "/read", headers: []string{host, "Authorization: bearer " + aToken}})
}

// FuzzRequest sends bytes to the server. It must answer the next request, and make no change.
func FuzzRequest(f *testing.F) {
	for _, text := range []string{
		"GET /read HTTP/1.1\r\nHost: localhost\r\n\r\n", "POST /change HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
		"GET /read HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\nGET /change HTTP/1.1\r\n",
		"POST /change HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\nContent-Type: application/json\r\n\r\n", "GET //../read%00?%zz HTTP/1.0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	} {
		f.Add([]byte(text))
	}
	token := filepath.Join(f.TempDir(), "token")
	testenv.Must(f, os.WriteFile(token, []byte(aToken), 0o600))
	s, err := New(Options{TokenFile: token, Say: func(string) {}, SocketGID: -1})
	testenv.Must(f, err)
	var changes atomic.Int32
	s.Handle("GET /read", Reads, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "read") }))
	s.Handle("POST /change", Changes, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { changes.Add(1) }))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testenv.Must(f, err)
	go s.http.Serve(listener{l, false, s.clients})
	f.Cleanup(func() { s.http.Close() })
	f.Fuzz(func(t *testing.T, text []byte) {
		if bytes.Contains(text, []byte(aToken)) {
			t.Skip()
		}
		c, err := net.Dial("tcp", l.Addr().String())
		testenv.Must(t, err)
		defer c.Close()
		c.Write(text) // the server may have closed it
		c.(*net.TCPConn).CloseWrite()
		testenv.Must(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
		if _, err := io.Copy(io.Discard, c); err != nil && strings.Contains(err.Error(), "timeout") {
			t.Fatalf("no answer to %q", text)
		}
		if changes.Load() != 0 {
			t.Fatalf("%q changes something", text)
		}
	})
}

func TestAcceptsGzip(t *testing.T) {
	for accept, want := range map[string]bool{
		"gzip": true, "gzip;q=0": false, "gzip; q=0.000": false, "deflate, gzip;q=0.5": true, "": false, "x-gzip": false, "identity,gzip ;q=1": true,
	} {
		if got := acceptsGzip(http.Header{"Accept-Encoding": {accept}}); got != want {
			t.Errorf("%q: %t", accept, got)
		}
	}
}

// TestFail sees that an error is what the commands print.
func TestFail(t *testing.T) {
	w := httptest.NewRecorder()
	w.Header().Set("Shapectl-Exit-Code", "0")
	Fail(w, 400, 1, "%s", "a <b>")
	if h := w.Header(); h.Get("Shapectl-Exit-Code") != "1" {
		t.Errorf("the header is %v", h)
	}
	if got := strings.TrimSpace(w.Body.String()); got != `{"error":"a <b>","exit_code":1}` || w.Code != 400 {
		t.Errorf("%d %s", w.Code, got)
	}
}
