// Package browser drives a headless Chromium. Only tests import it.
package browser

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A Tab is the page of a browser.
type Tab struct {
	tb  testing.TB
	ctx context.Context

	mu        sync.Mutex
	requested []string // URLs
	problems  []string // errors in the console, exceptions and reports of the security policy
}

// New starts Chromium in the network namespace of the calling thread.
func New(tb testing.TB) *Tab {
	tb.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		testenv.Skip(tb, "needs chromium: apt-get install chromium")
	}
	namespace := fmt.Sprintf("--net=/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
	ctx, end := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.UserDataDir(tb.TempDir()), chromedp.DisableGPU, chromedp.Flag("hide-scrollbars", true),
		chromedp.ModifyCmdFunc(func(cmd *exec.Cmd) { // another thread starts it
			cmd.Args = append([]string{"nsenter", namespace, path}, cmd.Args[1:]...)
			cmd.Path, cmd.Err = exec.LookPath("nsenter")
		}))...)
	ctx, cancel := chromedp.NewContext(ctx)
	tb.Cleanup(func() {
		cancel()
		end()
	})
	t := &Tab{tb: tb, ctx: ctx}
	testenv.Must(tb, chromedp.Listen(ctx, t.note))
	return t
}

// note keeps what went wrong, and what was asked for.
func (t *Tab) note(event any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	problem := func(level string, text ...any) {
		if level == "error" || level == "warning" || level == "assert" {
			t.problems = append(t.problems, fmt.Sprint(text...))
		}
	}
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		t.requested = append(t.requested, e.Request.URL)
	case *runtime.EventExceptionThrown:
		problem("error", e.ExceptionDetails.Text, " ", e.ExceptionDetails.Exception.Description)
	case *runtime.EventConsoleAPICalled:
		for _, a := range e.Args {
			problem(string(e.Type), e.Type, " ", string(a.Value))
		}
	case *log.EventEntryAdded:
		problem(string(e.Entry.Level), e.Entry.Text, " ", e.Entry.URL)
	}
}

// must ends the test if the browser refuses something or does not answer.
func (t *Tab) must(what string, err error) {
	t.tb.Helper()
	if err != nil {
		t.tb.Fatalf("browser: %s: %v", what, err)
	}
}

// call calls a method of the DevTools protocol.
func call[P, R any](t *Tab, command cdp.Command[P, R], params P) R {
	t.tb.Helper()
	ctx, cancel := context.WithTimeout(t.ctx, 30*time.Second)
	defer cancel()
	result, err := chromedp.Call(ctx, command, params)
	t.must(string(command.Method), err)
	return result
}

// Open goes to an address.
func (t *Tab) Open(url string) {
	t.tb.Helper()
	call(t, page.Navigate, page.NavigateParams{URL: url})
}

// Size makes the page so wide and high, dark or light.
func (t *Tab) Size(width, height int, theme string) {
	t.tb.Helper()
	call(t, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{Width: int64(width), Height: int64(height), DeviceScaleFactor: 1, Mobile: width < 500})
	call(t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: theme}}})
}

// Eval evaluates an expression, and waits for a promise. The value goes through JSON.
func (t *Tab) Eval(expression string, value any) {
	t.tb.Helper()
	t.must(expression, t.try(expression, value))
}

func (t *Tab) try(expression string, value any) error {
	ctx, cancel := context.WithTimeout(t.ctx, 30*time.Second)
	defer cancel()
	gesture := func(p *runtime.EvaluateParams) { p.UserGesture = new(true) }
	text, err := chromedp.Run(ctx, chromedp.Evaluate[[]byte](expression, chromedp.EvalAwaitPromise, gesture))
	if err != nil || value == nil {
		return err
	}
	return json.Unmarshal(text, value)
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
		return t.try("!!("+expression+")", &is) == nil && is
	})
}

// Click clicks on the first element of a selector.
func (t *Tab) Click(selector string) {
	t.tb.Helper()
	t.Eval(fmt.Sprintf("document.querySelector(%q).click()", selector), nil)
}

// Key presses a key: a character, or one of package kb.
func (t *Tab) Key(key string) {
	t.tb.Helper()
	t.must("press a key", chromedp.Do(t.ctx, chromedp.KeyEvent(key)))
}

// Picture writes a picture of the page to a file, whose name ends in .png or .webp.
func (t *Tab) Picture(path string) {
	t.tb.Helper()
	format := page.CaptureScreenshotFormat(strings.TrimPrefix(filepath.Ext(path), "."))
	got := call(t, page.CaptureScreenshot, page.CaptureScreenshotParams{Format: format, Quality: new(int64(80))})
	testenv.Must(t.tb, os.WriteFile(path, got.Data, 0o644))
}

// Roles are the lines "role name" of the accessibility tree.
func (t *Tab) Roles() string {
	t.tb.Helper()
	lines := "\n"
	for _, n := range call(t, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{}).Nodes {
		if !n.Ignored {
			lines += valueOf(n.Role) + " " + valueOf(n.Name) + "\n"
		}
	}
	return lines
}

func valueOf(v *accessibility.Value) (text string) {
	if v != nil {
		json.Unmarshal(v.Value, &text)
	}
	return text
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
