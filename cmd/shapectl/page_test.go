package main

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/testenv/browser"
)

// The page shows who is refused most by real traffic, changes its rate, and reverts that.
func TestPage(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	r.ok("set", "uplink", "--new", "--rate", "50mbit")
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "8mbit", "--each", "host", "--name", "everybody")
	r.ok("set", "va", "egress", "10.0.0.66", "--rate", "1mbit", "--name", "<img src=x onerror=alert(1)>mallory", "--within", "uplink")
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "8mbit", "--name", "alice", "--within", "uplink")
	const token = "0123456789abcdef"
	file := filepath.Join(t.TempDir(), "token")
	testenv.Must(t, os.WriteFile(file, []byte(token), 0o600))
	serve := r.command("serve", "--socket", "none", "--token-file", file)
	var said strings.Builder
	serve.Stdout, serve.Stderr = &said, &said
	testenv.Must(t, serve.Start())
	t.Cleanup(func() {
		serve.Process.Signal(os.Interrupt)
		serve.Wait()
		if t.Failed() {
			t.Logf("serve said: %s", said.String())
		}
	})
	const base = "http://127.0.0.1:9824"
	b := browser.New(t)
	b.Size(1440, 900, "light")
	testenv.Eventually(t, "serve to listen", func() bool {
		b.Open(base)
		var is bool
		b.Eval("document.title === 'shapectl'", &is)
		return is
	})
	first := "document.querySelector('.list tbody .who a')?.textContent"
	b.Until("figures", first)

	// Three senders: one far above its rate, one below, and one host of many whose bucket stays full.
	senders := map[string]int{"10.0.0.66": 40, "10.0.0.7": 4, "10.0.0.9": 14}
	var stop atomic.Bool
	ended := make(chan struct{}, len(senders))
	for to, packets := range senders {
		sender, frame := testenv.NewSender(t, "va"), frameTo(to, 1000)
		go func() {
			defer func() { ended <- struct{}{} }()
			for !stop.Load() {
				for range packets {
					_ = sender.Send(frame)
				}
				time.Sleep(10 * time.Millisecond)
			}
		}()
	}
	began := time.Now()
	t.Cleanup(func() {
		stop.Store(true)
		for range senders {
			<-ended
		}
	})
	b.Until("the offender to be first", first+".endsWith('>mallory') && document.querySelector('.list tbody .pill').innerText === 'dropping'")
	t.Logf("the offender was the first line after %v", time.Since(began).Round(10*time.Millisecond))

	b.Eval("document.querySelector('.list tbody .who a').click()", nil)
	b.Until("its rules", "document.querySelector('.list tbody')?.innerText.includes('va egress 10.0.0.66')")
	b.Eval("[...document.querySelectorAll('.list tbody tr')].find((tr) => tr.innerText.includes('va egress 10.0.0.66')).querySelector('a').click()", nil)
	b.Until("an event", "document.querySelector('.side .events')?.innerText.includes('overflow')")
	b.Until("its page", "document.querySelector('h1')?.innerText.startsWith('<img src=x onerror=alert(1)>mallory')")
	b.Until("the sentence of the rule", "document.querySelector('.sentence').innerText.includes('10.0.0.66')")
	var before string
	b.Eval("document.querySelector('.plot canvas').toDataURL()", &before)
	b.Until("the plot to move", "document.querySelector('.plot canvas').toDataURL() !== '"+before+"'")
	b.Click(".ask button")
	b.Until("an explanation", "document.querySelector('.said pre, .said [role=alert]')")
	if text := b.Text(".said"); !strings.Contains(text, "10.0.0.66") || !strings.Contains(text, "decides") {
		t.Errorf("the explanation is %q", text)
	}

	fill := func(id, text string) {
		t.Helper()
		b.Until(id, "document.getElementById('"+id+"')")
		b.Eval("document.getElementById('"+id+"').value = '"+text+"'", nil)
	}
	change := func(rate string) {
		t.Helper()
		fill("new-rate", rate)
		b.Click(".rate-form button")
		b.Until("the question", "document.querySelector('dialog')?.innerText.includes('"+rate+"')")
		b.Click("dialog .primary")
	}
	rate := func() uint64 { return r.show("va", "egress", "10.0.0.66")[0].Rate }
	change("3mbit")
	fill("token", token)
	b.Click("dialog:last-of-type .primary")
	b.Until("what is pending", "!document.querySelector('dialog') && document.querySelector('.banner .countdown')")
	if got := rate(); got != 3e6 {
		t.Errorf("the rate is %d", got)
	}
	b.Eval("[...document.querySelectorAll('.banner button')].find((b) => b.innerText === 'Roll back').click()", nil)
	testenv.Eventually(t, "the rate to be as before", func() bool { return rate() == 1e6 })
	b.Until("nothing to be pending", "!document.querySelector('.banner')")
	change("2mbit")
	b.Until("what is pending", "document.querySelector('.banner .countdown')")
	b.Click(".banner .primary")
	b.Until("nothing to be pending", "!document.querySelector('.banner')")
	if got := rate(); got != 2e6 {
		t.Errorf("the confirmed rate is %d", got)
	}

	b.Open(base + "/?hosts#/rule/va/egress/10.0.0.0%2F24")
	b.Until("a host", "document.querySelector('.within tbody')?.innerText.includes('10.0.0.9')")
	b.Click("[aria-labelledby=who-title] .card-head button:last-child")
	b.Until("the host that offers most", "document.querySelector('[aria-labelledby=who-title] tbody button')?.innerText === '10.0.0.9'")
	b.Click("[aria-labelledby=who-title] tbody button")
	b.Until("its flow", "document.querySelector('[aria-labelledby=who-title] tbody')?.innerText.includes('10.0.0.9:')")
	b.Open(base + "/?tree#/pools")
	b.Until("the tree", "document.querySelector('.list tbody')?.innerText.startsWith('uplink')")
	b.Open(base + "/?history#/pool/uplink")
	b.Until("the times to choose from", "document.querySelector('.segments')")
	b.Click(".segments button:nth-child(3)") // and again, until there are two readings
	b.Until("what was recorded", "/Passed \\d/.test(document.querySelector('.detail').innerText)")
	for _, p := range b.Problems() {
		if !strings.Contains(p, "401") && !strings.Contains(p, "/api/v1/report") { // the browser writes each refusal to the console
			t.Errorf("the console says: %s", p)
		}
	}
	b.OnlyAsked(base)
}
