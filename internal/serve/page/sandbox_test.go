package page

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"

	"github.com/shapectl/shapectl/internal/sandbox"
	"github.com/shapectl/shapectl/internal/testenv/browser"
)

// newSandbox serves the page with the real model.
func newSandbox(t *testing.T) string {
	mux := http.NewServeMux()
	mux.Handle("/", Handler())
	mux.Handle("/api/v1/sandbox", sandbox.Handler())
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}

const verdicts = `[...document.querySelectorAll("#panels .tally")].map((e) => e.innerText.replace(/\s+/g, " ").trim()).join(" | ")`

// A visitor chooses an example, drags a slider, and gets a link that shows the same again.
func TestSandboxPage(t *testing.T) {
	base := newSandbox(t)
	tab := browser.New(t)
	tab.Size(1280, 900, "light")
	tab.Open(base + "/sandbox")
	tab.Until("the first example", `document.querySelectorAll("#panels .tally").length === 3 && `+verdicts+` === "20 passed | 20 passed | 20 passed"`)

	tab.Click(`[data-name="five-per-second"]`)
	tab.Until("the example", verdicts+` === "12 passed 8 dropped | 12 passed 8 dropped | 1 passed 11 delayed 8 dropped"`)
	tab.Until("the link of the example", `location.hash === "#five-per-second"`)
	if text := tab.Text("#panels"); !strings.Contains(text, "12 of 20 requests pass; dropped: 8, the first at 275ms.") || !strings.Contains(text, "shapectl set eth0 egress 10.0.0.0/24 --rate 40kbit --capacity 10000b") {
		t.Errorf("the panels say %s", text)
	}
	tab.Eval(`document.querySelector("#panels details").open = true`, nil)
	tab.Until("the packets", `document.querySelectorAll("#panels tbody tr").length === 20`)
	if row := tab.Text("#panels tbody tr:nth-child(12)"); strings.Join(strings.Fields(row), " ") != "0.275 s 1 000 drop 9 625 9 625 –" {
		t.Errorf("the row of a dropped packet is %q", row)
	}

	// By keyboard: the slider of the burst is pushed to its end.
	tab.Eval(`document.querySelectorAll("#limit input[type=range]")[1].focus()`, nil)
	tab.Key(kb.End)
	tab.Until("a burst of 1000", verdicts+` === "20 passed | 20 passed | "`)
	if text := tab.Text("#panels"); !strings.Contains(text, "delays packets for up to 200 s") {
		t.Errorf("the queue does not say why it cannot be so long: %s", text)
	}
	tab.Until("a link of the case", `location.hash.startsWith("#case=")`)
	var link string
	tab.Eval("location.href", &link)

	other := browser.New(t)
	other.Open(link)
	other.Until("the case of the link", verdicts+` === "20 passed | 20 passed | "`)
	other.Harmless(base)

	// What is wrong is said, the field is marked, and the last result stays.
	tab.Eval(`{ const e = document.querySelector("[data-option=rate]"); e.value = "x"; e.dispatchEvent(new Event("input")); }`, nil)
	tab.Until("the error", `!document.querySelector("#wrong").hidden && document.querySelector("[data-option=rate]").getAttribute("aria-invalid") === "true"`)
	tab.Eval(`{ const e = document.querySelector("[data-option=rate]"); e.value = "5"; e.dispatchEvent(new Event("input")); }`, nil)
	tab.Until("no error", `document.querySelector("#wrong").hidden`)
	tab.Until("a status for screen readers", `document.querySelector("#told").textContent.includes("Queue: ")`)

	var nameless []string
	tab.Eval(`[...document.querySelectorAll("input, select, textarea, button, canvas, a")].filter((e) => e.checkVisibility() && !e.labels?.length && !e.ariaLabel && !e.innerText).map((e) => e.outerHTML)`, &nameless)
	for _, e := range nameless {
		t.Errorf("a screen reader has no name for %s", e)
	}

	tab.Click("#add")
	tab.Until("a second sender", `document.querySelectorAll("#senders fieldset").length === 2 && document.querySelector("#panels").innerText.includes("sender 2: ")`)
	tab.Click("#paste")
	tab.Until("a trace", `document.querySelector("#senders textarea") && `+verdicts+`.startsWith("3 passed")`)
	harmlessButRefused(t, tab, base)
}

// harmlessButRefused allows what the browser says of requests that were refused.
func harmlessButRefused(t *testing.T, tab *browser.Tab, base string) {
	t.Helper()
	for _, p := range tab.Problems() {
		if !strings.Contains(p, "status of 400") {
			t.Errorf("the console says: %s", p)
		}
	}
	tab.OnlyAsked(base)
}

// Links of strangers do no harm.
func TestSandboxHostileLinks(t *testing.T) {
	base := newSandbox(t)
	tab := browser.New(t)
	for i, request := range []string{
		`{"limit":{"rate":"1mbit","__proto__":"x"},"senders":[{"name":"<img src=x onerror=alert(1)>","kind":"burst","bytes":100,"packets":3},{"name":"` + "\u202e" + `evil","kind":"burst","bytes":100,"packets":1}]}`,
		`{"limit":{"rate":"1mbit","each":"<b>"},"senders":[{"kind":"steady","bytes":"9","packets_per_second":{}}]}`,
		`{"limit":null,"senders":"x"}`,
		`[[[]]]`,
		`null`,
		`{"limit":{"rate":"1mbit"},"senders":[{"kind":"on-off","bytes":1e999,"packets_per_second":-1,"duration_ns":1e30,"on_ns":-5}]}`,
		`not JSON`,
	} {
		tab.Open("about:blank")
		tab.Eval(fmt.Sprintf(`location.href = %q + btoa(unescape(encodeURIComponent(%q)))`, base+"/sandbox#case=", request), nil)
		tab.Until(fmt.Sprintf("an answer to link %d", i), `document.querySelector("#panels .tally")?.innerText || !(document.querySelector("#wrong")?.hidden ?? true)`)
		if i == 0 {
			tab.Until("the name as text", `document.querySelector("#panels").innerText.includes("<img src=x onerror=alert(1)>")`)
		}
		var harm bool
		if tab.Eval(`document.querySelectorAll("main img, main b:not(.legend b)").length > 0`, &harm); harm {
			t.Errorf("link %d became elements", i)
		}
	}
	harmlessButRefused(t, tab, base)
}

// The page fits a phone, a tablet and a desktop. With SHAPECTL_PICTURES, pictures are written to that directory.
func TestSandboxFits(t *testing.T) {
	base := newSandbox(t)
	tab := browser.New(t)
	pictures := os.Getenv("SHAPECTL_PICTURES")
	themes, examples := []string{"light"}, []string{"call-and-download"}
	if pictures != "" {
		themes, examples = append(themes, "dark"), append(examples, "three-times", "dns-flood")
	}
	for _, theme := range themes {
		for _, width := range []int{360, 820, 1440} {
			for _, example := range examples {
				tab.Size(width, 900, theme)
				tab.Open("about:blank")
				tab.Open(base + "/sandbox#" + example)
				tab.Until("the example", verdicts+`.includes("dropped") && document.querySelector("[aria-pressed=true]")?.dataset.name === "`+example+`"`)
				tab.Eval(`for (const d of document.querySelectorAll("#panels details")) d.open = true`, nil)
				tab.Until("the packets", `document.querySelectorAll("#panels tbody tr").length > 100`)
				var wide int
				if tab.Eval("document.documentElement.scrollWidth", &wide); wide > width {
					t.Errorf("%s is %d pixels wide of %d", example, wide, width)
				}
				if pictures != "" {
					tab.Picture(filepath.Join(pictures, fmt.Sprintf("page-sandbox-%s-%d-%s.png", example, width, theme)))
				}
			}
		}
	}
	tab.Harmless(base)
}
