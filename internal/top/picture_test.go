package top

import (
	"fmt"
	"html"
	"os"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
)

// TestPicture holds docs/top.svg to the screen. With -update it draws it.
func TestPicture(t *testing.T) {
	d := drive(t, 100, 20, Options{})
	d.read(69)
	const path = "../../docs/top.svg"
	picture := svg(d.Screen(), 100)
	if *update {
		if err := os.WriteFile(path, []byte(picture), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile(path); err != nil || string(have) != picture {
		t.Errorf("%s is not the screen (go test -update draws it): %v", path, err)
	}
}

// svg draws a screen.
func svg(screen string, columns int) string {
	const width, height = 7.2, 16
	classes := map[string]string{
		bold.String(): "b", faint.String(): "f", reverse.String(): "v", dropping.String(): "r", near.String(): "y", waiting.String(): "y b",
	}
	lines := strings.Split(screen, "\n")
	var s strings.Builder
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %d" role="img" aria-labelledby="title" font-family="monospace" font-size="12">
<title id="title">The screen of shapectl top</title>
<style>text{fill:#ddd;white-space:pre}.b{font-weight:bold}.f{fill:#aaa}.v{fill:#fff;font-weight:bold}.r{fill:#ff7b72}.y{fill:#e3b341}</style>
<rect width="100%%" height="100%%" rx="6" fill="#16191d"/>
`, width*float64(columns)+20, len(lines)*height+20)
	for i, line := range lines {
		class, x := "", 0
		for len(line) > 0 {
			sequence, _, n, _ := ansi.DecodeSequence(line, 0, nil)
			if strings.HasPrefix(sequence, "\x1b") {
				class, line = classes[sequence], line[n:]
				continue
			}
			end := strings.Index(line, "\x1b")
			if end < 0 {
				end = len(line)
			}
			run := line[:end]
			wide := ansi.StringWidth(run)
			if strings.TrimSpace(run) != "" {
				if class == "v" {
					fmt.Fprintf(&s, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"#444c56\"/>\n", 10+width*float64(x), 10+i*height, width*float64(wide), height)
				}
				fmt.Fprintf(&s, "<text x=\"%.1f\" y=\"%d\" textLength=\"%.1f\" xml:space=\"preserve\" class=\"%s\">%s</text>\n",
					10+width*float64(x), 22+i*height, width*float64(wide), class, html.EscapeString(run))
			}
			x, line = x+wide, line[end:]
		}
	}
	s.WriteString("</svg>\n")
	return s.String()
}
