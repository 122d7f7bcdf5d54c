package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/testenv"
)

// manualDate is when the layout of the manual pages was last changed by hand. One that followed the code would
// make each build another.
const manualDate = "2026-11-22"

// TestManual holds the manual pages in docs/man to the help of the commands. With -update it writes them.
func TestManual(t *testing.T) {
	const dir = "../../docs/man"
	root := (&env{}).command()
	var want []string
	for _, cmd := range allCommands(root) {
		name := manualName(cmd) + ".1"
		want = append(want, name)
		golden(t, filepath.Join("..", dir, name), manual(cmd))
	}
	files, err := os.ReadDir(dir)
	testenv.Must(t, err)
	for _, f := range files {
		if !slices.Contains(want, f.Name()) {
			t.Errorf("%s/%s is the manual of no command; delete it", dir, f.Name())
		}
	}
}

func manualName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

// manual is the manual page of a command, for man(7).
func manual(cmd *cobra.Command) string {
	var m strings.Builder
	name := manualName(cmd)
	fmt.Fprintf(&m, ".TH %s 1 %s shapectl\n", strings.ToUpper(name), manualDate)
	fmt.Fprintf(&m, ".SH NAME\n%s\n", roff(name+" - "+cmd.Short))
	fmt.Fprintf(&m, ".SH SYNOPSIS\n%s\n", roff(synopsis(cmd)))
	manualSection(&m, "DESCRIPTION", cmp.Or(cmd.Long, cmd.Short+"."))
	if cmd.Example != "" {
		manualSection(&m, "EXAMPLES", cmd.Example)
	}
	manualFlags(&m, "OPTIONS", flagHelps(cmd.NonInheritedFlags()))
	manualFlags(&m, "GLOBAL OPTIONS", flagHelps(cmd.InheritedFlags()))
	if !cmd.HasParent() {
		manualSection(&m, "EXIT STATUS", topic("errors").Long)
		manualSection(&m, "ENVIRONMENT", topic("environment").Long)
	}
	others := append([]*cobra.Command{}, cmd.Commands()...)
	if cmd.HasParent() {
		others = append(others, cmd.Parent())
	}
	var names []string
	for _, c := range others {
		if !c.Hidden && (c.IsAvailableCommand() || c.HasSubCommands()) {
			names = append(names, ".BR "+roff(manualName(c))+" (1)")
		}
	}
	m.WriteString(".SH SEE ALSO\n" + strings.Join(names, " ,\n") + "\n")
	return m.String()
}

// manualSection writes a help text.
func manualSection(m *strings.Builder, title, text string) {
	fmt.Fprintf(m, ".SH %s\n", title)
	for i, p := range helpParagraphs(text) {
		manualParagraph(m, p, i == 0)
	}
}

// manualParagraph writes a paragraph of a help text; one that is indented stays as it is.
func manualParagraph(m *strings.Builder, p string, first bool) {
	switch {
	case isCode(p):
		gap := ".PP\n"
		if first {
			gap = ""
		}
		fmt.Fprintf(m, "%s.nf\n.RS\n%s\n.RE\n.fi\n", gap, roffCode(unindent(p)))
	case first:
		fmt.Fprintln(m, roff(p))
	default:
		fmt.Fprintf(m, ".PP\n%s\n", roff(p))
	}
}

func manualFlags(m *strings.Builder, title string, flags []flagHelp) {
	if len(flags) == 0 {
		return
	}
	fmt.Fprintf(m, ".SH %s\n", title)
	for _, f := range flags {
		value := ""
		if f.value != "" {
			value = ` \fI` + roff(f.value) + `\fR`
		}
		fmt.Fprintf(m, ".TP\n\\fB%s\\fR%s\n%s\n", roff(f.names), value, roff(f.usage))
	}
}

const roffWidth = 78 // of a line of source, which mandoc wants to be short

var (
	roffSpecial = strings.NewReplacer(`\`, `\e`, "-", `\-`, "^", `\(ha`, "~", `\(ti`, "`", `\(ga`)
	roffRequest = regexp.MustCompile(`(?m)^([.'])`) // a line that begins so would not be text
)

// roff is text that man shows, in lines as it likes.
func roff(text string) string {
	folded := plain.Fold(roffSpecial.Replace(strings.Join(strings.Fields(text), " ")), roffWidth, "", "")
	return roffRequest.ReplaceAllString(strings.TrimSuffix(folded, "\n"), `\&$1`)
}

// roffCode is text that man shows in the lines that it has. A backslash at the end of a line continues it.
func roffCode(text string) string {
	var lines []string
	for line := range strings.Lines(roffSpecial.Replace(text)) {
		folded := strings.TrimSuffix(plain.Fold(strings.TrimSuffix(line, "\n"), roffWidth, "", ""), "\n")
		lines = append(lines, strings.ReplaceAll(folded, "\n", " \\\n"))
	}
	return roffRequest.ReplaceAllString(strings.Join(lines, "\n"), `\&$1`)
}
