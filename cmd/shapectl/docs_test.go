package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A docStep is a command of a documentation page, and the lines of the page that show its output.
type docStep struct {
	command    string
	from, to   int // lines of output, as indexes into the page
	shown      bool
	varies     bool // numbers in the output differ from run to run
	showsError bool // the page means the command to fail
}

// parsePage finds the steps of a page, in order:
//
//   - a console block: each line that begins with "$ " is a command, what follows is its output;
//   - a block with a file name behind its language: that file is written;
//   - an HTML comment "<!-- test: COMMAND -->": runs unseen;
//   - an HTML comment "<!-- numbers vary -->": numbers of the next console block are not compared.
func parsePage(lines []string) (steps []docStep, err error) {
	varies := false
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		hidden, isHidden := strings.CutPrefix(line, "<!-- test: ")
		fence, isFence := strings.CutPrefix(line, "```")
		switch {
		case isHidden:
			command, ends := strings.CutSuffix(hidden, " -->")
			if !ends {
				return nil, fmt.Errorf("line %d: a test comment must end on its line", i+1)
			}
			steps = append(steps, docStep{command: command})
		case line == "<!-- numbers vary -->":
			varies = true
		case isFence:
			end := i + 1
			for end < len(lines) && lines[end] != "```" {
				end++
			}
			if end == len(lines) {
				return nil, fmt.Errorf("line %d: the block has no end", i+1)
			}
			switch _, file, isFile := strings.Cut(fence, " "); {
			case isFile:
				steps = append(steps, docStep{command: "cat >" + file + " <<'EOF'\n" + strings.Join(lines[i+1:end], "\n") + "\nEOF"})
			case fence == "console":
				for at := i + 1; at < end; at++ {
					if command, is := strings.CutPrefix(lines[at], "$ "); is {
						steps = append(steps, docStep{command: command, from: at + 1, to: at + 1, shown: true, varies: varies})
						continue
					}
					if at == i+1 {
						return nil, fmt.Errorf("line %d: output without a command", at+1)
					}
					last := &steps[len(steps)-1]
					last.to = at + 1
					last.showsError = last.showsError || strings.HasPrefix(lines[at], "shapectl: ")
				}
				varies = false
			}
			i = end
		}
	}
	return steps, nil
}

// docPages are all pages, relative to the top of the repository.
func docPages(t *testing.T) (pages []string) {
	t.Helper()
	top := os.DirFS("../..")
	pages, err := fs.Glob(top, "*.md")
	testenv.Must(t, err)
	err = fs.WalkDir(top, "docs", func(path string, _ fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".md" {
			pages = append(pages, path)
		}
		return err
	})
	testenv.Must(t, err)
	return pages
}

// TestDocs runs the commands of each documentation page in network namespaces of
// its own and compares what they print with the page. With -update it writes the
// output into the page.
func TestDocs(t *testing.T) {
	for _, page := range docPages(t) {
		path := filepath.Join("../..", page)
		text, err := os.ReadFile(path)
		testenv.Must(t, err)
		lines := strings.Split(string(text), "\n")
		steps, err := parsePage(lines)
		if err != nil {
			t.Errorf("%s: %v", page, err)
		}
		if len(steps) == 0 {
			continue
		}
		t.Run(page, func(t *testing.T) {
			t.Parallel()
			outputs := runSteps(t, page, steps)
			var changed []int
			for i, s := range steps {
				if s.shown && comparableText(outputs[i], s.varies) != comparableText(lines[s.from:s.to], s.varies) {
					changed = append(changed, i)
				}
			}
			if !*update {
				for _, i := range changed {
					s := steps[i]
					t.Errorf("%s:%d: %s: the page says (go test -run TestDocs -update writes it anew)\n%s\nand the command prints\n%s",
						page, s.from, s.command, strings.Join(lines[s.from:s.to], "\n"), strings.Join(outputs[i], "\n"))
				}
				return
			}
			if len(changed) == 0 { // other numbers alone are no reason
				return
			}
			for i, s := range slices.Backward(steps) { // an update moves the lines behind it
				if s.shown {
					lines = slices.Replace(lines, s.from, s.to, outputs[i]...)
				}
			}
			testenv.Must(t, os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o644))
		})
	}
}

var (
	varyingNumber = regexp.MustCompile(`[0-9][0-9.:]*((m[0-9.]+s| ?[kMGT]?B|[kmg]?bit| ?[nuµm]?s|[kMGT])?\b)( ?%)?`)
	timeOfDay     = regexp.MustCompile(`\b[0-9]{2}:[0-9]{2}:[0-9]{2}\b`)
	blanks        = regexp.MustCompile(`[\s-]+`)
)

// comparableText is output without what differs from run to run: times of day and, if its numbers vary, these with
// their units, the width of columns, and where lines are folded.
func comparableText(output []string, varies bool) string {
	text := timeOfDay.ReplaceAllString(strings.Join(output, "\n"), "N")
	if varies {
		text = blanks.ReplaceAllString(varyingNumber.ReplaceAllString(text, "N"), " ")
	}
	return text
}

// runSteps runs the steps of a page in one shell, in namespaces that end with it, and returns what each printed.
func runSteps(t *testing.T, page string, steps []docStep) [][]string {
	testenv.Root(t)
	for _, tool := range []string{"bash", "ip", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			testenv.Skip(t, "needs "+tool)
		}
	}
	testdata, err := filepath.Abs("testdata")
	testenv.Must(t, err)
	const mark = "\x1e" // in no output
	var script strings.Builder
	script.WriteString(". " + testdata + "/docs.sh\n")
	for _, s := range steps {
		fmt.Fprintf(&script, "%s\necho \"%s$?\"\n", s.command, mark)
	}
	self, err := os.Executable()
	testenv.Must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", script.String())
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), "SHAPECTL_TEST="+self, "TESTDATA="+testdata, "LC_ALL=C", "COLUMNS=80")
	// What the page runs in the background ends with its shell, which is the first process of its namespace.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID}
	out, err := cmd.CombinedOutput()
	parts := strings.Split(string(out), mark)
	if err != nil || len(parts) != len(steps)+1 {
		t.Fatalf("%s: %v: %s", page, err, out)
	}
	outputs := make([][]string, len(steps))
	for i, s := range steps {
		text := parts[i]
		if i > 0 { // the exit code of the step before it
			_, text, _ = strings.Cut(text, "\n")
		}
		status, _, _ := strings.Cut(parts[i+1], "\n")
		code, err := strconv.Atoi(status)
		testenv.Must(t, err)
		failed := code != exitDone && code != exitDiffers && code != exitDegraded
		if failed != s.showsError || !s.shown && code != 0 {
			t.Fatalf("%s: %s: exit %d: %s", page, s.command, code, text)
		}
		if text != "" {
			outputs[i] = strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		}
	}
	return outputs
}

var (
	docLink     = regexp.MustCompile(`\]\(([^()]+)\)`)
	docHeading  = regexp.MustCompile(`(?m)^#+ (.*)$`)
	notInAnchor = regexp.MustCompile(`[^a-z0-9_ -]`)
	inC         = regexp.MustCompile("`([a-zA-Z]+_[a-zA-Z0-9_]*)`")
)

// Links between pages lead to a file that exists and to a heading in it.
func TestDocLinks(t *testing.T) {
	for _, page := range docPages(t) {
		text, err := os.ReadFile(filepath.Join("../..", page))
		testenv.Must(t, err)
		for _, found := range docLink.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(found[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(found[1], "#")
			target := filepath.Join("../..", page)
			if path != "" {
				target = filepath.Join("../..", filepath.Dir(page), path)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: link to %s: %v", page, found[1], err)
			} else if anchor != "" && !slices.Contains(anchors(t, target), anchor) {
				t.Errorf("%s: link to %s: there is no such heading", page, found[1])
			}
		}
	}
}

var docPath = regexp.MustCompile(`\bdocs/[a-z/-]+\.md\b`)

// Pages that code, messages, units and examples name exist.
func TestDocsNamedInFiles(t *testing.T) {
	top := os.DirFS("../..")
	err := fs.WalkDir(top, ".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains([]string{".git", "bin", "dist", "docs"}, path):
			return fs.SkipDir
		case !entry.Type().IsRegular() || filepath.Ext(path) == ".o":
			return nil
		}
		text, err := fs.ReadFile(top, path)
		for _, page := range docPath.FindAllString(string(text), -1) {
			if _, err := fs.Stat(top, page); err != nil {
				t.Errorf("%s names %s: %v", path, page, err)
			}
		}
		return err
	})
	testenv.Must(t, err)
}

// anchors are the headings of a page, as links name them.
func anchors(t *testing.T, path string) (all []string) {
	t.Helper()
	text, err := os.ReadFile(path)
	testenv.Must(t, err)
	for _, h := range docHeading.FindAllStringSubmatch(string(text), -1) {
		all = append(all, strings.ReplaceAll(notInAnchor.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-"))
	}
	return all
}

// What docs/datapath.md calls by its name in C has that name.
func TestDocNamesOfC(t *testing.T) {
	page, err := os.ReadFile("../../docs/datapath.md")
	testenv.Must(t, err)
	files, err := filepath.Glob("../../bpf/*.[ch]")
	testenv.Must(t, err)
	var source strings.Builder
	for _, path := range files {
		text, err := os.ReadFile(path)
		testenv.Must(t, err)
		source.Write(text)
	}
	for _, name := range inC.FindAllStringSubmatch(string(page), -1) {
		if !strings.Contains(source.String(), name[1]) && !strings.HasPrefix(name[1], "gso_") && !strings.HasPrefix(name[1], "TCX_") {
			t.Errorf("docs/datapath.md: there is no %s in bpf/", name[1])
		}
	}
}
