// Package browser drives a headless Chromium by the DevTools protocol. Only tests import it.
package browser

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A browser is a Chromium and its pipes.
type browser struct {
	tb      testing.TB
	to      io.Writer
	mu      sync.Mutex
	last    int
	waiting map[int]chan answer

	requested []string // URLs
	problems  []string // errors in the console, exceptions and reports of the security policy
}

type answer struct {
	Result json.RawMessage
	Error  *struct{ Message string }
}

// New starts Chromium in the network namespace of the calling thread. It has one tab.
func New(tb testing.TB) *Tab {
	tb.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		testenv.Skip(tb, "needs chromium: apt-get install chromium")
	}
	in, to, err := os.Pipe()
	testenv.Must(tb, err)
	from, out, err := os.Pipe()
	testenv.Must(tb, err)
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--user-data-dir="+tb.TempDir(), "about:blank")
	cmd.ExtraFiles = []*os.File{in, out} // 3 and 4
	testenv.Must(tb, cmd.Start())
	in.Close()
	out.Close()
	b := &browser{tb: tb, to: to, waiting: map[int]chan answer{}}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.read(from)
	}()
	tb.Cleanup(func() {
		to.Close() // ends it
		kill := time.AfterFunc(10*time.Second, func() { cmd.Process.Kill() })
		cmd.Wait()
		kill.Stop()
		from.Close()
		<-ended
	})
	var target struct{ TargetID string }
	b.call("", "Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var session struct{ SessionID string }
	b.call("", "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &session)
	t := &Tab{b, session.SessionID}
	for _, domain := range []string{"Page", "Runtime", "Network", "Log", "Accessibility", "DOM"} {
		t.Call(domain+".enable", nil, nil)
	}
	return t
}

func (b *browser) read(from io.Reader) {
	messages := bufio.NewReaderSize(from, 1<<20)
	for {
		text, err := messages.ReadBytes(0)
		if err != nil {
			b.mu.Lock()
			for id, c := range b.waiting {
				close(c)
				delete(b.waiting, id)
			}
			b.mu.Unlock()
			return
		}
		var m struct {
			ID     int
			Method string
			Params json.RawMessage
			answer
		}
		if json.Unmarshal(text[:len(text)-1], &m) != nil {
			continue
		}
		b.mu.Lock()
		if c := b.waiting[m.ID]; c != nil {
			c <- m.answer
			delete(b.waiting, m.ID)
		}
		b.note(m.Method, m.Params)
		b.mu.Unlock()
	}
}

// note keeps what went wrong, and what was asked for.
func (b *browser) note(method string, params json.RawMessage) {
	var p struct {
		Request struct{ URL string }
		Type    string
		Entry   struct{ Level, Text, URL string }
		Args    []struct {
			Value any
		}
		ExceptionDetails struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	if json.Unmarshal(params, &p) != nil {
		return
	}
	switch method {
	case "Network.requestWillBeSent":
		b.requested = append(b.requested, p.Request.URL)
	case "Runtime.exceptionThrown":
		b.problems = append(b.problems, p.ExceptionDetails.Text+" "+p.ExceptionDetails.Exception.Description)
	case "Runtime.consoleAPICalled":
		if p.Type == "error" || p.Type == "warning" || p.Type == "assert" {
			b.problems = append(b.problems, fmt.Sprint(p.Type, p.Args))
		}
	case "Log.entryAdded":
		if p.Entry.Level == "error" || p.Entry.Level == "warning" {
			b.problems = append(b.problems, p.Entry.Text+" "+p.Entry.URL)
		}
	}
}

func (b *browser) call(session, method string, params, result any) {
	b.tb.Helper()
	if err := b.try(session, method, params, result); err != nil {
		b.tb.Fatalf("browser: %s: %v", method, err)
	}
}

func (b *browser) try(session, method string, params, result any) error {
	b.mu.Lock()
	b.last++
	id, c := b.last, make(chan answer, 1)
	b.waiting[id] = c
	b.mu.Unlock()
	message := map[string]any{"id": id, "method": method}
	if params != nil {
		message["params"] = params
	}
	if session != "" {
		message["sessionId"] = session
	}
	text, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if _, err := b.to.Write(append(text, 0)); err != nil {
		return err
	}
	select {
	case a, alive := <-c:
		switch {
		case !alive:
			return errors.New("the browser ended")
		case a.Error != nil:
			return errors.New(a.Error.Message)
		case result == nil:
			return nil
		}
		return json.Unmarshal(a.Result, result)
	case <-time.After(30 * time.Second):
		return errors.New("no answer in 30 s")
	}
}

// A Tab is a page in a browser.
type Tab struct {
	*browser
	session string
}

// Call calls a method of the protocol.
func (t *Tab) Call(method string, params, result any) {
	t.tb.Helper()
	t.browser.call(t.session, method, params, result)
}

// Open goes to an address.
func (t *Tab) Open(url string) {
	t.tb.Helper()
	t.Call("Page.navigate", map[string]any{"url": url}, nil)
}

// Size makes the page so wide and high, dark or light.
func (t *Tab) Size(width, height int, theme string) {
	t.tb.Helper()
	t.Call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}, nil)
	t.Call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": theme}}}, nil)
}

// Eval evaluates an expression, and waits for a promise. The value goes through JSON.
func (t *Tab) Eval(expression string, value any) {
	t.tb.Helper()
	if err := t.tryEval(expression, value); err != nil {
		t.tb.Fatalf("browser: %s: %v", expression, err)
	}
}

func (t *Tab) tryEval(expression string, value any) error {
	var got struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	params := map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true, "userGesture": true}
	if err := t.try(t.session, "Runtime.evaluate", params, &got); err != nil {
		return err
	}
	if e := got.ExceptionDetails; e != nil {
		return errors.New(e.Text + " " + e.Exception.Description)
	}
	if value == nil {
		return nil
	}
	return json.Unmarshal(got.Result.Value, value)
}

// Text is the text that an element shows, and its tree below.
func (t *Tab) Text(selector string) (text string) {
	t.tb.Helper()
	t.Eval(fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector), &text)
	return text
}

// Until waits until an expression is true.
func (t *Tab) Until(what, expression string) {
	t.tb.Helper()
	testenv.Eventually(t.tb, what, func() bool {
		is := false
		return t.tryEval("!!("+expression+")", &is) == nil && is
	})
}

// Click clicks on the first element of a selector.
func (t *Tab) Click(selector string) {
	t.tb.Helper()
	t.Eval(fmt.Sprintf("document.querySelector(%q).click()", selector), nil)
}

// Key presses a key.
func (t *Tab) Key(key string, code int) {
	t.tb.Helper()
	text := map[bool]string{true: key}[len(key) == 1]
	if key == "Enter" {
		text = "\r"
	}
	for _, kind := range []string{"keyDown", "keyUp"} {
		event := map[string]any{"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
		if kind == "keyDown" && text != "" {
			event["text"] = text
		}
		t.Call("Input.dispatchKeyEvent", event, nil)
	}
}

// Picture writes a picture of the page to a file, whose name ends in .png or .webp.
func (t *Tab) Picture(path string) {
	t.tb.Helper()
	var got struct{ Data string }
	format := strings.TrimPrefix(filepath.Ext(path), ".")
	t.Call("Page.captureScreenshot", map[string]any{"format": format, "quality": 80}, &got)
	picture, err := base64.StdEncoding.DecodeString(got.Data)
	testenv.Must(t.tb, err)
	testenv.Must(t.tb, os.WriteFile(path, picture, 0o644))
}

// Roles are the lines "role name" of the accessibility tree.
func (t *Tab) Roles() string {
	t.tb.Helper()
	var got struct {
		Nodes []struct {
			Ignored    bool
			Role, Name struct{ Value any }
		}
	}
	t.Call("Accessibility.getFullAXTree", nil, &got)
	lines := "\n"
	for _, n := range got.Nodes {
		if !n.Ignored {
			lines += fmt.Sprintln(n.Role.Value, n.Name.Value)
		}
	}
	return lines
}

// Problems are what the console said.
func (t *Tab) Problems() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.problems)
}

// Harmless fails the test if something went wrong in the page, or if it asked another host.
func (t *Tab) Harmless(base string) {
	t.tb.Helper()
	for _, p := range t.Problems() {
		t.tb.Errorf("the console says: %s", p)
	}
	t.OnlyAsked(base)
}

// OnlyAsked fails the test if the page asked another host.
func (t *Tab) OnlyAsked(base string) {
	t.tb.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, url := range t.requested {
		if !strings.HasPrefix(url, base) && url != "about:blank" {
			t.tb.Errorf("the page asked for %s", url)
		}
	}
}
