package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf16"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/serve"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// longestRequest is how long a request may measure: it takes a place among a few.
	longestRequest = 10 * time.Second
	// policyText is the argument of a request that has the text of a file instead of its name.
	policyText = "policy"
)

//go:embed openapi.json
var openAPI []byte

// An apiCommand is a command of the API. A request becomes a command line: the API can do what the command can.
type apiCommand struct {
	name     string // of the command: "import tc"
	changes  bool
	computes bool // it takes much memory or time
	// forms are the arguments of the command by name, in the orders that it takes them. The last of a form may be
	// left out. A name with ... is a list.
	forms   []string
	streams bool // the answer does not end
}

// someRules are the arguments of commands that show rules.
var someRules = []string{"device direction network", "address direction", "network direction", "named direction"}

// apiCommands are all commands that deal with the limits of this host.
var apiCommands = []apiCommand{
	{name: "set", changes: true, forms: []string{"device direction network", "named direction"}},
	{name: "delete", changes: true, forms: []string{"device direction network", "named direction"}},
	{name: "flush", changes: true, forms: []string{"device direction"}},
	{name: "topup", changes: true, forms: []string{"device direction network size", "device direction network host size", "named size", "named direction size", "named host size"}},
	{name: "line", changes: true, forms: []string{"device state"}},
	{name: "apply", changes: true, forms: []string{policyText}},
	{name: "confirm", changes: true},
	{name: "rollback", changes: true},
	{name: "show", computes: true, forms: someRules},
	{name: "explain", forms: []string{"device direction address", "device address", "address", "named direction"}},
	{name: "doctor", forms: []string{"device"}},
	{name: "report", computes: true, forms: []string{"device direction network", "named direction"}},
	{name: "diff", forms: []string{policyText}},
	{name: "export", computes: true},
	{name: "import tc", forms: []string{"device..."}},
	{name: "events", forms: []string{"name..."}, streams: true},
	{name: "version"},
}

// path is that of a command in the API.
func (c apiCommand) path() string { return "/api/v1/" + strings.ReplaceAll(c.name, " ", "/") }

// method is that of requests for a command. A GET has no body, so no policy.
func (c apiCommand) method() string {
	if c.changes || c.isArgument(policyText) {
		return http.MethodPost
	}
	return http.MethodGet
}

// access is what a request takes. What has a body takes as much memory and time as the client wants.
func (c apiCommand) access() serve.Access {
	switch {
	case c.changes:
		return serve.Changes
	case c.computes || c.method() == http.MethodPost:
		return serve.Computes
	}
	return serve.Reads
}

// isArgument reports whether a name is of an argument, and no flag.
func (c apiCommand) isArgument(name string) bool {
	return slices.ContainsFunc(c.forms, func(form string) bool { return slices.Contains(argumentNames(form), name) })
}

func argumentNames(form string) []string { return strings.Fields(strings.ReplaceAll(form, "...", "")) }

// flag finds a flag that requests may have: none that names a file of the server or something to run there.
func (c apiCommand) flag(cmd *cobra.Command, name string) *pflag.Flag {
	f := cmd.LocalNonPersistentFlags().Lookup(name)
	if f == nil || f.Name == "help" {
		return nil
	}
	if kind, _ := pflag.UnquoteUsage(f); slices.Contains([]string{"file", "command", "path"}, strings.ToLower(kind)) {
		return nil
	}
	return f
}

// parameters are the names that requests may have.
func (c apiCommand) parameters(cmd *cobra.Command) (names []string) {
	for _, form := range c.forms {
		names = append(names, argumentNames(form)...)
	}
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if c.flag(cmd, f.Name) != nil {
			names = append(names, f.Name)
		}
	})
	slices.Sort(names)
	return slices.Compact(names)
}

// without refuses requests with parameters, as the handler has none.
func without(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "" {
			serve.Fail(w, http.StatusBadRequest, exitInput, "%s takes no parameters", r.URL.Path)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// arguments are the values of a request, by name.
type arguments map[string][]string

// commandLine is the command line of a request, without -j.
func (c apiCommand) commandLine(cmd *cobra.Command, given arguments) (line []string, err error) {
	var positional []string
	for name, values := range given {
		f := c.flag(cmd, name)
		switch {
		case c.isArgument(name):
			positional = append(positional, name)
			continue
		case f == nil:
			if o := policy.FindOption(name); o != nil && o.Name != name && c.flag(cmd, o.Name) != nil {
				return nil, fmt.Errorf("unknown parameter %q; use %s", name, o.Name)
			}
			return nil, fmt.Errorf("unknown parameter %s; use %s", strconv.Quote(name), strings.Join(c.parameters(cmd), ", "))
		}
		for _, v := range values {
			if v == "" && f.NoOptDefVal != "" {
				v = f.NoOptDefVal // as in ?wide
			}
			line = append(line, "--"+f.Name+"="+v)
		}
	}
	slices.Sort(line) // so that a request is always the same command line
	if line = append(line, "--"); len(positional) == 0 {
		return line, nil
	}
	for _, form := range c.forms {
		names := argumentNames(form)
		if len(names) < len(positional) || slices.ContainsFunc(positional, func(p string) bool { return !slices.Contains(names[:len(positional)], p) }) {
			continue
		}
		for i, name := range names[:len(positional)] {
			values := given[name]
			if isList := strings.HasSuffix(strings.Fields(form)[i], "..."); len(values) != 1 && !isList {
				return nil, fmt.Errorf("%s was given %d times", name, len(values))
			}
			if name == policyText {
				values = []string{name}
			}
			line = append(line, values...)
		}
		return line, nil
	}
	return nil, fmt.Errorf("these arguments do not go together; use %s", strings.Join(c.forms, ", or "))
}

// argumentsOf are the values of a request.
func argumentsOf(r *http.Request) (arguments, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, errors.New("the query is not valid")
	}
	if r.Method != http.MethodPost {
		return arguments(query), nil
	}
	if len(query) > 0 {
		return nil, errors.New("a POST has its arguments in the body, and none in the query")
	}
	return argumentsIn(serve.Body(r))
}

// argumentsIn are the values in a body, a JSON object.
func argumentsIn(body []byte) (arguments, error) {
	wrong := errors.New("the body is not a JSON object")
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	if begin, _ := decoder.Token(); begin != json.Delim('{') {
		return nil, wrong
	}
	given, seen := arguments{}, map[string]bool{}
	for decoder.More() {
		token, err := decoder.Token()
		name, _ := token.(string)
		var member any
		switch {
		case err != nil || decoder.Decode(&member) != nil:
			return nil, wrong
		case seen[name]:
			return nil, fmt.Errorf("%s was given twice; use a list for several values", strconv.Quote(name))
		}
		seen[name] = true
		values, isList := member.([]any)
		if !isList && member != nil {
			values = []any{member}
		}
		for _, v := range values {
			switch v.(type) {
			case string, bool, json.Number:
				given[name] = append(given[name], fmt.Sprint(v))
			default:
				return nil, fmt.Errorf("%s is neither a string, a number, true, false nor a list of these", strconv.Quote(name))
			}
		}
	}
	if end, _ := decoder.Token(); end != json.Delim('}') {
		return nil, wrong
	}
	if _, err := decoder.Token(); err != io.EOF {
		return nil, errors.New("the body has more than one JSON object")
	}
	return given, nil
}

// An api answers requests by running commands.
type api struct {
	env *env // whose variables and network namespace commands have
}

// getenv hides the service manager from commands: it hears of serve.
func (a *api) getenv(name string) string {
	if name == "NOTIFY_SOCKET" {
		return ""
	}
	return a.env.getenv(name)
}

// addTo plugs the API into a server.
func (a *api) addTo(s *serve.Server) {
	paths := map[string]string{"/api/v1/openapi.json": http.MethodGet}
	for _, c := range apiCommands {
		paths[c.path()] = c.method()
		if c.streams {
			s.HandleStream("GET "+c.path(), c.access(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.stream(c, w, r) }))
			continue
		}
		s.Handle(c.method()+" "+c.path(), c.access(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.answer(c, w.(*serve.Answer), r) }))
	}
	s.Handle("GET /api/v1/openapi.json", serve.Reads, without(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Write(openAPI)
	})))
	// All else has an answer in JSON, too.
	s.Handle("/api/", serve.Static, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if method := paths[r.URL.Path]; method != "" {
			w.Header().Set("Allow", method)
			serve.Fail(w, http.StatusMethodNotAllowed, exitInput, "%s takes %s", r.URL.Path, method)
			return
		}
		serve.Fail(w, http.StatusNotFound, exitInput, "there is no %s; /api/v1/openapi.json lists what there is", plain.Line(r.URL.Path))
	}))
}

// prepare returns an environment for the command of a request, and the command line.
func (a *api) prepare(c apiCommand, r *http.Request) (*env, []string, error) {
	given, err := argumentsOf(r)
	if err != nil {
		return nil, nil, err
	}
	e := &env{in: strings.NewReader(""), getenv: a.getenv, netns: a.env.netns}
	e.history, e.rtts, e.feed, e.follows = a.env.history, a.env.rtts, a.env.feed, a.env.follows
	if asked := r.Header.Get(netnsHeader); asked != "" {
		if here, err := netns.ID(e.netns); err != nil || here != asked {
			return nil, nil, errors.New("serve is for another network namespace; run the command there, or as root")
		}
	}
	if !c.changes {
		e.ctx = r.Context()
	}
	if c.name == topOnce.name {
		given["once"] = []string{"true"}
		if given["rtt"] != nil {
			if e.rtts != nil && (given["interval"] != nil || given["one-in"] != nil) {
				return nil, nil, errors.New("serve measures all the time, as --rtt says; leave interval and one-in out")
			}
			delete(given, "running")
		}
	}
	line, err := e.requested(c, given)
	return e, line, err
}

// refuse answers with the error of a request that is not run.
func refuse(c apiCommand, w http.ResponseWriter, err error) {
	serve.Fail(w, http.StatusBadRequest, exitInput, "%s: %v", c.name, err)
}

// answer runs the command of a request. It ends also if the client leaves: no change is left half made.
func (a *api) answer(c apiCommand, w *serve.Answer, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	if c.name == topOnce.name && r.URL.Query().Has("rtt") && a.env.rtts == nil && onlyRunning(r) {
		must(json.NewEncoder(w).Encode(report.RTTs{Rules: []report.RTT{}}))
		return
	}
	e, line, err := a.prepare(c, r)
	if err != nil {
		refuse(c, w, err)
		return
	}
	accepted := r.Header.Get("Accept")
	asText := strings.HasPrefix(accepted, "text/plain") || c.name == "export" && strings.Contains(accepted, "yaml")
	if !asText {
		line = append([]string{"-j"}, line...)
	}
	h.Set("Cache-Control", "no-store")
	if r.Header.Get(columnsHeader) != "" {
		a.runFor(c, e, line, w, r)
		return
	}
	told := new(messages)
	e.out, e.err = w, told
	code := e.run(line)
	if code == exitInput {
		w.Discard() // or nobody hears of the error
	}
	h.Set("Shapectl-Exit-Code", strconv.Itoa(code))
	if text := told.warnings(); text != "" {
		h.Set("Shapectl-Warnings", text)
	}
	w.WriteHeader(status(code, e.cause))
	switch {
	case w.Len() > 0 && asText && c.name == "export":
		h.Set("Content-Type", "application/yaml; charset=utf-8")
	case w.Len() > 0 && asText:
		h.Set("Content-Type", "text/plain; charset=utf-8")
	case w.Len() == 0 && told.last != nil:
		w.Write(told.last)
	case w.Len() == 0 && e.cause != nil:
		serve.Fail(w, status(code, e.cause), code, "%v", e.cause)
	case w.Len() == 0:
		w.Write([]byte("{}\n"))
	}
}

// stream answers with what a command prints, as it prints it: lines of JSON, or server-sent events.
func (a *api) stream(c apiCommand, w http.ResponseWriter, r *http.Request) {
	e, line, err := a.prepare(c, r)
	if err != nil {
		refuse(c, w, err)
		return
	}
	told := new(messages)
	out := &streamWriter{w: w, events: strings.HasPrefix(r.Header.Get("Accept"), "text/event-stream")}
	e.out, e.err = out, told
	out.begins(2 * time.Second) // an error comes before, with its status
	defer out.ends()            // also after a panic
	code := e.run(append([]string{"-j"}, line...))
	if out.ends() || code == exitDone {
		return
	}
	serve.Fail(w, status(code, e.cause), code, "%v", e.cause)
}

// A streamWriter sends each line when it is written.
type streamWriter struct {
	w      http.ResponseWriter
	events bool

	mu    sync.Mutex
	begun bool
	ended bool
	timer *time.Timer
}

// begins sends the header after a time, so that a client knows that it is heard also while nothing happens, and then
// a sign of life from time to time, so that the server notices clients that are gone.
func (s *streamWriter) begins(after time.Duration) {
	const alive = 15 * time.Second
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(after, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.ended {
			return
		}
		s.begin()
		if s.events {
			io.WriteString(s.w, ":\n\n")
		} else {
			io.WriteString(s.w, "\n")
		}
		s.w.(http.Flusher).Flush()
		s.timer.Reset(alive)
	})
}

func (s *streamWriter) begin() {
	if s.begun {
		return
	}
	s.begun = true
	kind := "application/x-ndjson"
	if s.events {
		kind = "text/event-stream"
	}
	s.w.Header().Set("Content-Type", kind)
	s.w.Header().Set("Cache-Control", "no-store")
}

// ends reports whether anything was sent. Nothing is from now on.
func (s *streamWriter) ends() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.timer.Stop()
	return s.begun
}

func (s *streamWriter) Write(text []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begin()
	for line := range bytes.Lines(text) {
		if s.events {
			line = append(append([]byte("data: "), bytes.TrimSpace(line)...), "\n\n"...)
		}
		if _, err := s.w.Write(line); err != nil {
			return 0, err
		}
	}
	s.w.(http.Flusher).Flush()
	return len(text), nil
}

// requested is the command line of a request, and keeps its policy.
func (e *env) requested(c apiCommand, given arguments) (line []string, err error) {
	e.contents = map[string][]byte{}
	if text := given[policyText]; len(text) > 0 && c.isArgument(policyText) {
		e.contents[policyText] = []byte(text[0])
	}
	for _, interval := range given["interval"] { // any may be the one that counts
		if d, err := time.ParseDuration(interval); err == nil && d > longestRequest {
			return nil, fmt.Errorf("interval %v is too long for a request; use at most %v", d, longestRequest)
		}
	}
	cmd, _, err := e.command().Find(strings.Fields(c.name))
	must(err)
	line, err = c.commandLine(cmd, given)
	return append(strings.Fields(c.name), line...), err
}

// Messages are what a command writes on stderr: with -j, an object on each line.
type messages struct {
	last []byte // the last error
	all  []json.RawMessage
	size int
	part []byte // of a line
}

// mostTold is how much of messages is kept: they are sent in a header.
const mostTold = 4 << 10

func (m *messages) Write(text []byte) (int, error) {
	m.part = append(m.part, text...)
	for {
		line, rest, found := bytes.Cut(m.part, []byte("\n"))
		if !found {
			return len(text), nil
		}
		m.part = rest
		var object struct{ Error string }
		if json.Unmarshal(line, &object) != nil {
			continue
		}
		if object.Error != "" {
			m.last = append(bytes.Clone(line), '\n')
		} else if m.size += len(line); m.size < mostTold {
			m.all = append(m.all, bytes.Clone(line))
		}
	}
}

// warnings are all that are no errors, as a list in ASCII; "" for none.
func (m *messages) warnings() string {
	if m.all == nil {
		return ""
	}
	text, err := json.Marshal(m.all)
	must(err)
	return ascii(text)
}

// ascii escapes other characters in JSON.
func ascii(text []byte) string {
	var s []byte
	for _, unit := range utf16.Encode([]rune(string(text))) {
		if unit < 0x7f {
			s = append(s, byte(unit))
		} else {
			s = fmt.Appendf(s, `\u%04x`, unit)
		}
	}
	return string(s)
}

// status is the HTTP status of an exit code.
func status(code int, cause error) int {
	switch code {
	case exitDone, exitDiffers:
		return http.StatusOK
	case exitInput:
		switch {
		case errors.Is(cause, loader.ErrPending), errors.Is(cause, loader.ErrPoolInUse), errors.Is(cause, loader.ErrTooLate):
			return http.StatusConflict
		case errors.As(cause, new(missingError)), errors.Is(cause, loader.ErrNoChange), errors.Is(cause, netns.ErrNone):
			return http.StatusNotFound
		}
		return http.StatusBadRequest
	case exitDegraded:
		return http.StatusMultiStatus
	case exitMissing:
		if errors.Is(cause, fs.ErrPermission) {
			return http.StatusForbidden
		}
		return http.StatusNotImplemented
	}
	if errors.Is(cause, loader.ErrBusy) || errors.Is(cause, unix.EWOULDBLOCK) { // the host, or other commands
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}
