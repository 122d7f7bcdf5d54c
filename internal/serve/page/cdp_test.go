package page

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A browser is a headless Chromium, driven by the DevTools protocol over pipes.
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

// newBrowser starts Chromium in the namespace of the calling thread. It has one tab.
func newBrowser(tb testing.TB) *tab {
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
	t := &tab{b, session.SessionID}
	for _, domain := range []string{"Page", "Runtime", "Network", "Log", "Accessibility", "DOM"} {
		t.call(domain+".enable", nil, nil)
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

// A tab is a page in a browser.
type tab struct {
	*browser
	session string
}

func (t *tab) call(method string, params, result any) {
	t.tb.Helper()
	t.browser.call(t.session, method, params, result)
}

func (t *tab) open(url string) {
	t.tb.Helper()
	t.call("Page.navigate", map[string]any{"url": url}, nil)
}

// size makes the page so wide and high, dark or light.
func (t *tab) size(width, height int, theme string) {
	t.tb.Helper()
	t.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}, nil)
	t.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": theme}}}, nil)
}

// eval evaluates an expression, and waits for a promise. The value goes through JSON.
func (t *tab) eval(expression string, value any) {
	t.tb.Helper()
	if err := t.tryEval(expression, value); err != nil {
		t.tb.Fatalf("browser: %s: %v", expression, err)
	}
}

func (t *tab) tryEval(expression string, value any) error {
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

// text is the text that an element shows, and its tree below.
func (t *tab) text(selector string) (text string) {
	t.tb.Helper()
	t.eval(fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector), &text)
	return text
}

// until waits until an expression is true.
func (t *tab) until(what, expression string) {
	t.tb.Helper()
	testenv.Eventually(t.tb, what, func() bool {
		is := false
		return t.tryEval("!!("+expression+")", &is) == nil && is
	})
}

func (t *tab) click(selector string) {
	t.tb.Helper()
	t.eval(fmt.Sprintf("document.querySelector(%q).click()", selector), nil)
}

// key presses a key.
func (t *tab) key(key string, code int) {
	t.tb.Helper()
	for _, kind := range []string{"rawKeyDown", "keyUp"} {
		t.call("Input.dispatchKeyEvent", map[string]any{"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}, nil)
	}
}

// picture writes a picture of the whole page to a file.
func (t *tab) picture(path string) {
	t.tb.Helper()
	var got struct{ Data string }
	t.call("Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true}, &got)
	png, err := base64.StdEncoding.DecodeString(got.Data)
	testenv.Must(t.tb, err)
	testenv.Must(t.tb, os.WriteFile(path, png, 0o644))
}

// harmless ends the test if something went wrong in the page, or if it asked another host.
func (t *tab) harmless(base string) {
	t.tb.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.problems {
		t.tb.Errorf("the console says: %s", p)
	}
	for _, url := range t.requested {
		if !strings.HasPrefix(url, base) && url != "about:blank" {
			t.tb.Errorf("the page asked for %s", url)
		}
	}
}
