// Package serve is the HTTP server of 'shapectl serve'. It knows no rules: it listens, decides who may do
// what, and bounds what a client can take. Parts plug in before Run; newServer in cmd/shapectl/serve.go does it:
//
//	s.Handle("GET /metrics", serve.Reads, handler)        // whoever may read
//	s.Handle("POST /api/v1/set", serve.Changes, handler)  // root over the socket, or a token
//	s.Handle("GET /{$}", serve.Static, handler)           // files that are the same for everybody
//	s.HandleStream("GET /api/v1/events", serve.Reads, h)  // answers that do not end, such as server-sent events
//
// Patterns are those of net/http. A handler is called after all checks: the Host and Origin of the request, the
// rights of the client, the rate of changes. Body is the whole body, within the bound. What Handle's handlers write goes
// to an Answer, which is sent when they return: a header or status may follow the text. The context of a request ends
// when the client leaves; that of a stream, also when the server stops.
package serve

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Options are those of a Server.
type Options struct {
	Socket    string   // path of the Unix socket; "" for none
	SocketGID int      // of the group that may read over it; negative for none
	Listen    string   // TCP address; "" for none
	Hosts     []string // names and addresses in URLs of this server, besides localhost and the one that it listens on
	TokenFile string   // has the token that permits changes; "" for none
	Cert, Key string   // files for TLS; "" for none
	MaxBody   int64    // bytes of the largest body; 0 for 1 MiB

	Say func(string) // writes a message
}

// An Access says who may send a request.
type Access int

const (
	Static   Access = iota // everybody who can connect
	Reads                  // over the socket, over the loopback device, or with the token
	Computes               // as Reads: it takes much memory or time, so few requests at a time
	Measures               // as Changes: it changes nothing, but packets pay for it
	Changes                // root and the user of the server over the socket, or with the token
)

// Bounds on what clients can take.
const (
	maxHeader      = 16 << 10
	headerTime     = 5 * time.Second  // for the header of a request
	readTime       = 30 * time.Second // for all of it
	writeTime      = 30 * time.Second // for the answer, or a part of a stream
	idleTime       = time.Minute
	maxConnections = 256
	stopTime       = 10 * time.Second // for requests that are under way at the end
)

// A Server serves HTTP.
type Server struct {
	o         Options
	mux       *http.ServeMux
	http      *http.Server
	clients   *clients
	token     atomic.Pointer[token]
	cert      atomic.Pointer[tls.Certificate]
	addresses []net.Addr // on which it listens
	origin    *http.CrossOriginProtection

	places   [places]chan struct{} // have a value for each request that is under way
	ofUser   sync.Map              // those of a uid, likewise: a chan struct{}
	stopping chan struct{}         // is closed when the server stops
	changes  *rate.Limiter
	messages *rate.Limiter // that clients cause
}

// New makes a server, and reads the token and the certificate.
func New(o Options) (*Server, error) {
	o.MaxBody = cmp.Or(o.MaxBody, 1<<20)
	s := &Server{
		o: o, mux: http.NewServeMux(), origin: http.NewCrossOriginProtection(), clients: newClients(), stopping: make(chan struct{}),
		changes: rate.NewLimiter(changesPerSecond, changeBurst), messages: rate.NewLimiter(messagesPerSecond, messageBurst),
	}
	for i, most := range mostAtOnce {
		s.places[i] = make(chan struct{}, most)
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	if err := s.Reload(); err != nil {
		return nil, err
	}
	only1 := new(http.Protocols)
	only1.SetHTTP1(true) // a connection is of one request at a time, which clients.go counts on
	s.http = &http.Server{
		Protocols: only1,
		Handler:   s.checked(s.mux), MaxHeaderBytes: maxHeader, ReadHeaderTimeout: headerTime, ReadTimeout: readTime, IdleTimeout: idleTime,
		ErrorLog: log.New(sayer(s.say), "", 0), ConnContext: withPeer, DisableGeneralOptionsHandler: true,
	}
	// Without waiting for a place: the service manager must not end a server that is only busy.
	s.mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	return s, nil
}

// say writes a message that clients can cause, unless there were too many.
func (s *Server) say(text string) {
	if s.messages.Allow() {
		s.o.Say(text)
	}
}

// sayer makes a message of each line of a log.
type sayer func(string)

func (say sayer) Write(line []byte) (int, error) {
	say(string(line))
	return len(line), nil
}

// check refuses options that would let strangers in.
func (s *Server) check() error {
	if (s.o.Cert == "") != (s.o.Key == "") {
		return errors.New("TLS needs both a certificate and its key")
	}
	for _, h := range s.o.Hosts {
		if h == "" || strings.HasSuffix(h, ".") || strings.ContainsAny(h, ":/[]") && net.ParseIP(h) == nil {
			return fmt.Errorf("--host %.100q is not the name of a host; leave out the scheme, the port, and a dot at the end", h)
		}
	}
	if s.o.Listen == "" {
		return nil
	}
	addr, err := net.ResolveTCPAddr("tcp", s.o.Listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", s.o.Listen, err)
	}
	if !addr.IP.IsLoopback() && (s.o.Cert == "" || s.o.TokenFile == "") {
		return fmt.Errorf("listen on %s: others can reach that address, so it needs TLS and a token; give --tls-cert, --tls-key and --token-file, or use 127.0.0.1", s.o.Listen)
	}
	s.o.Listen = addr.String() // a name might become another address
	return nil
}

// Reload reads the token and the certificate again. If that fails, the server keeps those that it has.
func (s *Server) Reload() error {
	var t *token
	var cert *tls.Certificate
	if s.o.TokenFile != "" {
		read, err := readToken(s.o.TokenFile)
		if err != nil {
			return err
		}
		t = read
	}
	if s.o.Cert != "" {
		pair, err := tls.LoadX509KeyPair(s.o.Cert, s.o.Key)
		if err != nil {
			return fmt.Errorf("read the certificate: %w", err)
		}
		cert = &pair
	}
	s.token.Store(t)
	s.cert.Store(cert)
	return nil
}

// Handle plugs in a handler.
func (s *Server) Handle(pattern string, who Access, h http.Handler) {
	s.mux.Handle(pattern, s.bounded(who, h))
}

// HandleBy plugs in a handler with the rights that a request takes.
func (s *Server) HandleBy(pattern string, who func(*http.Request) Access, h http.Handler) {
	s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.bounded(who(r), h).ServeHTTP(w, r) })
}

// HandleStream plugs in a handler whose answers do not end.
func (s *Server) HandleStream(pattern string, who Access, h http.Handler) {
	s.mux.Handle(pattern, s.streamed(who, h))
}

// Run listens, calls ready, and serves until ctx is done. Requests under way may then end.
func (s *Server) Run(ctx context.Context, ready func()) error {
	listeners, err := s.listen()
	if err != nil {
		return err
	}
	for _, l := range listeners {
		s.addresses = append(s.addresses, l.Addr())
	}
	inner, stop := context.WithCancel(context.Background())
	defer stop()
	s.http.BaseContext = func(net.Listener) context.Context { return inner }
	ended := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { ended <- s.http.Serve(l) }()
	}
	ready()
	select {
	case <-ctx.Done():
	case err = <-ended: // a listener failed
	}
	close(s.stopping) // streams end
	patience, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	if late := s.http.Shutdown(patience); late != nil {
		s.http.Close()
	}
	return err
}

// Addresses are those on which the server listens.
func (s *Server) Addresses() (all []string) {
	for _, a := range s.addresses {
		switch {
		case a.Network() == "unix":
			all = append(all, a.String())
		case s.o.Cert != "":
			all = append(all, "https://"+a.String())
		default:
			all = append(all, "http://"+a.String())
		}
	}
	return all
}

// Alive returns nil if the server answers.
func (s *Server) Alive(ctx context.Context) error {
	at := s.addresses[0]
	scheme := "http"
	if at.Network() != "unix" && s.o.Cert != "" {
		scheme = "https"
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // it is this server
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, at.Network(), at.String())
		},
	}}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://localhost/healthz", nil)
	if err != nil {
		return err
	}
	answer, err := client.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	return nil
}
