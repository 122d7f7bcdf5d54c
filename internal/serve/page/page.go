// Package page is the web page of shapectl serve: files that come with the program. They ask nothing of any other host.
package page

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
	"time"
)

// uPlot.* are unchanged files of uPlot 1.6.32, of dist in the npm package uplot, and its licence.
//
//go:embed *.html *.css *.js *.svg *.txt
var files embed.FS

// Policy is the content security policy of the page, stricter than that of other answers of serve: nothing inline, nothing from elsewhere, no text that becomes HTML.
const Policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

type file struct {
	content []byte
	kind    string
	tag     string
}

// Handler answers GET of the page's files; / is index.html, and /sandbox is sandbox.html.
func Handler() http.Handler {
	all := map[string]file{}
	names, err := fs.Glob(files, "*")
	if err != nil {
		panic(err) // the pattern is right
	}
	for _, name := range names {
		content, err := files.ReadFile(name)
		if err != nil {
			panic(err) // it is in the program
		}
		sum := sha256.Sum256(content)
		all[name] = file{content, mime.TypeByExtension(path.Ext(name)), `"` + hex.EncodeToString(sum[:8]) + `"`}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/")
		f, found := all[name]
		if !found {
			switch name {
			case "":
				f, found = all["index.html"]
			default:
				f, found = all[name+".html"]
			}
		}
		if !found {
			http.NotFound(w, r)
			return
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET", http.StatusMethodNotAllowed)
			return
		}
		header := w.Header()
		header.Set("Content-Type", f.kind)
		header.Set("Content-Security-Policy", Policy)
		header.Set("Cache-Control", "no-cache") // asks each time, by the tag: a new version shows at once
		header.Set("ETag", f.tag)
		http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(f.content))
	})
}
