package page

import (
	"html/template"
	"io"
	"regexp"
)

// chartPage has all that it needs: it is opened as a file, where modules cannot be imported.
var chartPage = template.Must(template.New("").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{.Title}} · shapectl replay</title>
<style>{{.Style}}</style>
<script>{{.Theme}}</script>
<main class="page"><h1>{{.Title}}</h1>{{range .Sentences}}<p>{{.}}</p>{{end}}<div id="plots"></div></main>
<script>{{.Library}}</script>
<script type="module">const panels = { rate: {{.Rate}}, level: {{.Level}} };
{{.Script}}</script>
</html>
`))

var module = regexp.MustCompile(`(?m)^import .*\n|^export `)

// WriteChart writes a page with the plots of a chart, which needs no other file. rate and level become JSON as plot.js
// draws it.
func WriteChart(w io.Writer, title string, sentences []string, rate, level any) error {
	script := ""
	for _, name := range []string{"dom.js", "units.js", "plot.js", "chart.js"} {
		script += module.ReplaceAllString(asset(name), "")
	}
	return chartPage.Execute(w, struct {
		Title          string
		Sentences      []string
		Style          template.CSS
		Theme, Library template.JS
		Script         template.JS
		Rate, Level    any
	}{title, sentences, template.CSS(asset("style.css") + asset("uPlot.min.css")), template.JS(asset("theme.js")), template.JS(asset("uPlot.iife.min.js")), template.JS(script), rate, level})
}

func asset(name string) string {
	content, err := files.ReadFile(name)
	if err != nil {
		panic(err) // it is in the program
	}
	return string(content)
}
