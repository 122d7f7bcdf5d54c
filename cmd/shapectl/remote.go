package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/user"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/serve"
)

// serveSocket is where serve listens, and whom commands ask. Only root can make a socket there.
var serveSocket = "/run/shapectl/serve.sock"

// serveGroup may connect to the socket.
const serveGroup = "shapectl"

// A request of a command has these headers, besides those of the API. Its answer is what the command writes to its output,
// which is that long, and then what it writes to its standard error.
const (
	columnsHeader = "Shapectl-Columns" // of its terminal; 0 for none
	netnsHeader   = "Shapectl-Netns"   // where it runs
	outputHeader  = "Shapectl-Output"
)

const mostColumns = 1000

// askable are the commands that serve runs for who may not read the rules. report asks by itself.
var askable = []string{"show", "explain", "doctor", "diff", "export", topOnce.name}

// topOnce is 'top --once', for commands and for requests that look at packets: to others, the API has another answer at its path.
var topOnce = apiCommand{name: "top", forms: someRules}

// socketGroup is the number of the group that may connect to the socket; negative if there is none.
func socketGroup() (int, error) {
	g, err := user.LookupGroup(serveGroup)
	if errors.As(err, new(user.UnknownGroupError)) {
		return -1, nil
	}
	if err != nil {
		return -1, fmt.Errorf("look up the group %s: %w", serveGroup, err)
	}
	return strconv.Atoi(g.Gid)
}

// askServe sends a request to serve: a POST if it has a body. If serve refuses it, there is an answer, and the error is that
// of serve. Without an answer, the error says what to do. Both have an exit code.
func askServe(path string, header http.Header, body []byte) (answer *http.Response, text []byte, err error) {
	namespace, err := netns.ID("")
	if err != nil {
		return nil, nil, err
	}
	header.Set(netnsHeader, namespace)
	stay := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	client := http.Client{Timeout: time.Minute, CheckRedirect: stay, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", serveSocket)
	}}}
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
		header.Set("Content-Type", "application/json")
	}
	r, err := http.NewRequest(method, "http://localhost"+path, bytes.NewReader(body))
	must(err)
	r.Header = header
	if answer, err = client.Do(r); err != nil {
		err = errors.Unwrap(err)
	} else {
		defer answer.Body.Close()
		const most = 1 << 30
		text, err = io.ReadAll(io.LimitReader(answer.Body, most))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		return nil, nil, inputf("ask root to start 'shapectl serve'")
	case errors.Is(err, fs.ErrPermission):
		return nil, nil, exitError{fmt.Errorf("ask root to add you to the group %s, which serve answers", serveGroup), exitMissing}
	case err != nil:
		return nil, nil, exitError{fmt.Errorf("try again: serve does not answer: %w", err), exitKernel}
	case answer.StatusCode != http.StatusOK:
		failed := failure{Error: "serve answers " + answer.Status, ExitCode: exitKernel}
		json.Unmarshal(text, &failed)
		err = exitError{errors.New(failed.Error), failed.ExitCode}
	}
	return answer, text, err
}

// runByServe has serve run a command line that only reads rules, which this process may not. It reports whether serve did.
func (e *env) runByServe(args []string) (code int, done bool) {
	have, err := program.Capabilities()
	if err != nil || program.Missing(have) == nil || e.contents != nil {
		return 0, false
	}
	c, given, asJSON := requestOf(args)
	if c == nil {
		return 0, false
	}
	e.json = asJSON
	if c.name == topOnce.name && given["once"] == nil {
		e.unserved = errors.New("run as root, or use --once, for which serve is asked")
		return 0, false
	}
	header := http.Header{columnsHeader: {strconv.Itoa(min(e.columns, mostColumns))}}
	if !asJSON {
		header.Set("Accept", "text/plain")
	}
	path, body := c.path(), []byte(nil)
	if c.method() == http.MethodPost {
		name := given[policyText][0]
		_, text, err := e.readPolicy(name)
		if text != nil {
			e.contents = map[string][]byte{name: text} // the command cannot read a pipe again
		}
		if err != nil {
			return 0, false // which the command tells
		}
		given[policyText] = []string{string(text)}
		body, err = json.Marshal(given)
		must(err)
	} else {
		path += "?" + url.Values(given).Encode()
	}
	answer, text, err := askServe(path, header, body)
	switch {
	case err == nil:
		code, err := strconv.Atoi(answer.Header.Get("Shapectl-Exit-Code"))
		printed, err2 := strconv.Atoi(answer.Header.Get(outputHeader))
		if errors.Join(err, err2) == nil && printed >= 0 && printed <= len(text) {
			_, err := bytes.NewReader(text[:printed]).WriteTo(e.out)
			e.err.Write(text[printed:])
			if err != nil {
				code = exitCode(e.degraded("%s: done, but the answer could not be written: %w", c.name, err))
			}
			return code, true
		}
		e.unserved = errors.New("run as root; serve is of another version")
	case answer == nil:
		e.unserved = errors.New("run as root, or " + err.Error()) // without its exit code
	case answer.StatusCode == http.StatusNotFound:
		e.unserved = errors.New("run as root; serve is of another version")
	case answer.StatusCode != http.StatusForbidden:
		e.fail(err, exitCode(err), nil)
		return exitCode(err), true
	}
	return 0, false
}

// requestOf makes a request of a command line that serve can run; nil for any other.
func requestOf(args []string) (c *apiCommand, given arguments, asJSON bool) {
	cmd, rest, err := (&env{getenv: os.Getenv}).command().Find(args)
	if err != nil || cmd.Parent() != cmd.Root() || !slices.Contains(askable, cmd.Name()) {
		return nil, nil, false
	}
	c = &topOnce
	if at := slices.IndexFunc(apiCommands, func(c apiCommand) bool { return c.name == cmd.Name() }); at >= 0 {
		c = &apiCommands[at]
	}
	given = arguments{}
	cmd.InheritedFlags() // makes them flags of the command
	err = cmd.Flags().ParseAll(rest, func(f *pflag.Flag, value string) (err error) {
		switch f.Name {
		case "netns", "help":
			return errors.ErrUnsupported // by serve
		case "json":
			asJSON, err = strconv.ParseBool(value)
			return err
		}
		given[f.Name] = append(given[f.Name], value)
		return nil
	})
	words := cmd.Flags().Args()
	if err != nil || cmd.ValidateArgs(words) != nil {
		return nil, nil, false
	}
	for i, word := range words {
		name := argumentNames(c.forms[0])[i] // only its place counts
		given[name] = append(given[name], word)
	}
	return c, given, asJSON
}

// runFor runs a command line for who asked by runByServe.
func (a *api) runFor(c apiCommand, e *env, line []string, w *serve.Answer, r *http.Request) {
	columns, err := strconv.Atoi(r.Header.Get(columnsHeader))
	if err != nil || columns < 0 || columns > mostColumns || !slices.Contains(askable, c.name) {
		serve.Fail(w, http.StatusBadRequest, exitInput, "%s: wrong %s", c.name, columnsHeader)
		return
	}
	e.getenv = func(name string) string {
		if name == "COLUMNS" {
			return strconv.Itoa(columns)
		}
		return a.getenv(name)
	}
	var told bytes.Buffer
	e.out, e.err = w, &told
	code := e.run(line)
	h := w.Header()
	h.Set("Shapectl-Exit-Code", strconv.Itoa(code))
	h.Set(outputHeader, strconv.Itoa(w.Len()))
	h.Set("Content-Type", "text/plain; charset=utf-8")
	w.Write(told.Bytes())
}
