package main

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/serve"
	"github.com/shapectl/shapectl/pkg/loader"
)

// maxAnswer is the size of the largest answer of the API.
const maxAnswer = 64 << 20

// An apiCommand is a command of the API. A request becomes a command line: the API can do what the command can.
type apiCommand struct {
	name    string // of the command: "pool set"
	changes bool
	// forms are the arguments of the command by name, in the orders that it takes them. The last of a form may be
	// left out. A name with ... is a list.
	forms []string
	// contents are the names of files whose contents come with the request: of an argument or a flag.
	contents []string
	lines    func(given map[string][]string) bool // the answer is an object on each line
}

// apiCommands are all commands but those that make no sense in a request.
var apiCommands = []apiCommand{
	{name: "set", changes: true, forms: []string{"device direction network", "named direction"}},
	{name: "delete", changes: true, forms: []string{"device direction network", "named direction"}},
	{name: "flush", changes: true, forms: []string{"device direction"}},
	{name: "pool set", changes: true, forms: []string{"name"}},
	{name: "pool delete", changes: true, forms: []string{"name"}},
	{name: "pool show", forms: []string{"name"}},
	{name: "apply", changes: true, forms: []string{"policy"}, contents: []string{"policy"}},
	{name: "confirm", changes: true},
	{name: "rollback", changes: true},
	{name: "show", forms: []string{"device direction network", "address direction", "network direction", "named direction"}},
	{name: "ask", forms: []string{"device direction address", "address direction", "named direction"}},
	{name: "explain", forms: []string{"device direction address", "device address", "address", "named direction"}},
	{name: "doctor", forms: []string{"device"}},
	{name: "diff", forms: []string{"policy"}, contents: []string{"policy"}},
	{name: "export", contents: []string{"like"}},
	{name: "replay", forms: []string{"trace network..."}, contents: []string{"trace", "policy"}, lines: func(given map[string][]string) bool {
		return !slices.Equal(given["summary"], []string{"true"})
	}},
	{name: "import libreqos", forms: []string{"devices"}, contents: []string{"devices", "network"}},
	{name: "import nft", forms: []string{"ruleset"}, contents: []string{"ruleset"}},
	{name: "import tc", forms: []string{"device..."}},
	{name: "version"},
}

// inBase64 are the contents that are no text.
var inBase64 = []string{"trace"}

// path is that of a command in the API.
func (c apiCommand) path() string { return "/api/v1/" + strings.ReplaceAll(c.name, " ", "/") }

// methods are those of requests for a command. A GET has no body, so no contents.
func (c apiCommand) methods() []string {
	switch {
	case c.changes, slices.ContainsFunc(c.contents, c.isArgument):
		return []string{http.MethodPost}
	case len(c.contents) > 0:
		return []string{http.MethodGet, http.MethodPost}
	}
	return []string{http.MethodGet}
}

func (c apiCommand) access() serve.Access {
	if c.changes {
		return serve.Changes
	}
	return serve.Reads
}

// isArgument reports whether a name is of an argument, and no flag.
func (c apiCommand) isArgument(name string) bool {
	return slices.ContainsFunc(c.forms, func(form string) bool { return slices.Contains(argumentNames(form), name) })
}

func argumentNames(form string) []string { return strings.Fields(strings.ReplaceAll(form, "...", "")) }

// flag finds a flag that requests may have: none of those that name files of the server.
func (c apiCommand) flag(cmd *cobra.Command, name string) *pflag.Flag {
	f := cmd.LocalNonPersistentFlags().Lookup(name)
	if f == nil || f.Hidden && name == "version" || name == "help" {
		return nil
	}
	switch kind, _ := pflag.UnquoteUsage(f); {
	case slices.Contains(c.contents, name):
		return f
	case slices.Contains([]string{"file", "command", "path"}, strings.ToLower(kind)):
		return nil
	}
	return f
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
			return nil, fmt.Errorf("%s: unknown parameter %s", c.name, plain.Quoted(name))
		}
		for _, v := range values {
			if slices.Contains(c.contents, name) {
				v = name
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
				return nil, fmt.Errorf("%s: %s was given %d times", c.name, name, len(values))
			}
			if slices.Contains(c.contents, name) {
				values = []string{name}
			}
			line = append(line, values...)
		}
		return line, nil
	}
	return nil, fmt.Errorf("%s: the arguments are of no form of this command; use %s", c.name, plain.List(c.forms))
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
	given := arguments{}
	decoder := json.NewDecoder(bytes.NewReader(serve.Body(r)))
	decoder.UseNumber()
	var object map[string]any
	if err := decoder.Decode(&object); err != nil || object == nil {
		return nil, errors.New("the body is not a JSON object")
	}
	if _, err := decoder.Token(); err != io.EOF {
		return nil, errors.New("the body has more than one JSON object")
	}
	for name, value := range object {
		list, isList := value.([]any)
		if !isList {
			list = []any{value}
		}
		for _, v := range list {
			switch v := v.(type) {
			case nil:
			case string:
				given[name] = append(given[name], v)
			case bool:
				given[name] = append(given[name], strconv.FormatBool(v))
			case json.Number:
				given[name] = append(given[name], v.String())
			default:
				return nil, fmt.Errorf("%s is neither a string, a number, true, false nor a list of these", plain.Quoted(name))
			}
		}
	}
	return given, nil
}

// An api answers requests by running commands.
type api struct {
	env      *env // whose variables and network namespace commands have
	anyNetns bool // requests may name another network namespace
	say      func(string)
}

// addTo plugs the API into a server.
func (a *api) addTo(s *serve.Server) {
	for _, c := range apiCommands {
		for _, method := range c.methods() {
			s.Handle(method+" "+c.path(), c.access(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.answer(c, w, r) }))
		}
	}
}

func (a *api) answer(c apiCommand, w http.ResponseWriter, r *http.Request) {
	given, err := argumentsOf(r)
	if err != nil {
		serve.Fail(w, http.StatusBadRequest, exitInput, "%v", err)
		return
	}
	netns := a.env.netns
	if other := given["netns"]; other != nil {
		if !a.anyNetns || len(other) != 1 {
			serve.Fail(w, http.StatusForbidden, exitMissing, "requests may name no network namespace; start serve with --any-netns to permit it")
			return
		}
		netns = other[0]
		delete(given, "netns")
	}
	e := &env{in: strings.NewReader(""), getenv: a.env.getenv, contents: map[string][]byte{}}
	for _, name := range c.contents {
		if text := given[name]; len(text) == 1 {
			e.contents[name] = []byte(text[0])
			if slices.Contains(inBase64, name) {
				if e.contents[name], err = base64.StdEncoding.DecodeString(text[0]); err != nil {
					serve.Fail(w, http.StatusBadRequest, exitInput, "%s: %s is not in base64", c.name, name)
					return
				}
			}
		}
	}
	cmd, _, err := e.command().Find(strings.Fields(c.name))
	must(err)
	line, err := c.commandLine(cmd, given)
	if err != nil {
		serve.Fail(w, http.StatusBadRequest, exitInput, "%v", err)
		return
	}
	line = append(strings.Fields(c.name), line...)
	asText := c.name == "export" && strings.Contains(r.Header.Get("Accept"), "yaml")
	if !asText {
		line = append([]string{"-j"}, line...)
	}
	out, told := &answerBuffer{most: maxAnswer}, &answerBuffer{most: 1 << 20}
	e.out, e.err = out, told
	code := exitKernel
	err = loader.In(netns, func() error {
		defer func() {
			if p := recover(); p != nil {
				a.say(fmt.Sprintf("%s: panic: %v\n%s", c.name, p, debug.Stack()))
				code = exitKernel
				told.Reset()
				fmt.Fprintln(told, `{"error":"an error of the program; its log says more","exit_code":2}`)
			}
		}()
		code = e.run(line)
		return nil
	})
	if err != nil {
		code = exitInput
		serve.Fail(w, http.StatusNotFound, code, "%v", err)
		return
	}
	if out.over {
		serve.Fail(w, http.StatusBadRequest, exitInput, "%s: the answer has more than %d bytes; ask for less", c.name, maxAnswer)
		return
	}
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("Shapectl-Exit-Code", strconv.Itoa(code))
	last, warnings := toldOnStderr(told.Bytes())
	if len(warnings) > 0 {
		h.Set("Shapectl-Warnings", warnings)
	}
	body := out.Bytes()
	switch {
	case len(body) == 0:
		body = last
		h.Set("Content-Type", "application/json")
	case asText:
		h.Set("Content-Type", "application/yaml; charset=utf-8")
	case c.lines != nil && c.lines(given):
		h.Set("Content-Type", "application/x-ndjson")
	default:
		h.Set("Content-Type", "application/json")
	}
	w.WriteHeader(status(code, e.cause))
	w.Write(body)
}

// toldOnStderr is the last error among lines of JSON, or {}, and the warnings as a list in ASCII.
func toldOnStderr(lines []byte) (last []byte, warnings string) {
	last = []byte("{}\n")
	var all []json.RawMessage
	const most = 4 << 10 // headers are small
	size := 0
	for line := range bytes.Lines(lines) {
		var object struct{ Error, Warning string }
		if json.Unmarshal(line, &object) != nil {
			continue
		}
		if object.Error != "" {
			last = line
		}
		if size += len(line); size < most {
			all = append(all, bytes.TrimSpace(line))
		}
	}
	if all == nil {
		return last, ""
	}
	text, err := json.Marshal(all)
	must(err)
	return last, ascii(text)
}

// ascii escapes other characters in JSON.
func ascii(text []byte) string {
	var s strings.Builder
	for _, r := range string(text) {
		switch {
		case r < 0x7f:
			s.WriteRune(r)
		case r < 0x10000:
			fmt.Fprintf(&s, `\u%04x`, r)
		default:
			r -= 0x10000
			fmt.Fprintf(&s, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		}
	}
	return s.String()
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
		case errors.As(cause, new(missingError)), errors.Is(cause, loader.ErrNoChange):
			return http.StatusNotFound
		}
		return http.StatusBadRequest
	case exitDegraded:
		return http.StatusMultiStatus
	case exitMissing:
		return http.StatusNotImplemented
	}
	return cmp.Or(map[bool]int{true: http.StatusServiceUnavailable}[errors.Is(cause, loader.ErrBusy)], http.StatusInternalServerError)
}

// A missingError says that what was asked for does not exist.
type missingError struct{ error }

func (e missingError) Unwrap() error { return e.error }

// An answerBuffer keeps what a command prints, up to a bound.
type answerBuffer struct {
	bytes.Buffer
	most int
	over bool
}

func (b *answerBuffer) Write(text []byte) (int, error) {
	if b.over = b.over || b.Len()+len(text) > b.most; b.over {
		return 0, errors.New("the answer is too large")
	}
	return b.Buffer.Write(text)
}
