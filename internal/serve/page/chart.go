package page

import (
	"encoding/json"
	"fmt"
	"html"
	"io"
	"regexp"
)

// chartPage has all that it needs: it is opened as a file, where modules cannot be imported. A template of Go would keep
// every method of the program, which is 3 MB.
const chartPage = `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%[1]s · shapectl</title>
<style>%[3]s</style>
<script>%[4]s</script>
<main class="page"><h1>%[1]s</h1>%[2]s<div id="plots"></div></main>
<script>%[5]s</script>
<script type="module">const charts = %[6]s;
%[7]s</script>
</html>
`

var module = regexp.MustCompile(`(?m)^import .*\n|^export `)

// WriteChart writes a page with plots, which needs no other file. Each has a name, facts, which are pairs of a label and a
// text, and a panel, as plot.js draws it.
func WriteChart(w io.Writer, title string, sentences []string, charts []map[string]any) error {
	panels, err := json.Marshal(charts) // it escapes what would end the script
	if err != nil {
		return err
	}
	text, script := "", ""
	for _, s := range sentences {
		text += "<p>" + html.EscapeString(s) + "</p>"
	}
	for _, name := range []string{"dom.js", "units.js", "plot.js", "chart.js"} {
		script += module.ReplaceAllString(asset(name), "")
	}
	_, err = fmt.Fprintf(w, chartPage, html.EscapeString(title), text, asset("style.css")+asset("uPlot.min.css"), asset("theme.js"), asset("uPlot.iife.min.js"), panels, script)
	return err
}

func asset(name string) string {
	content, err := files.ReadFile(name)
	if err != nil {
		panic(err) // it is in the program
	}
	return string(content)
}
