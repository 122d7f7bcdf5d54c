package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/shapectl/shapectl/internal/plain"
)

// A commandGroup is commands under a title of the general help, in the order of use.
type commandGroup struct {
	title    string
	commands []*cobra.Command
}

// flagGroup is the annotation of a flag that names its group in help.
const flagGroup = "group"

const (
	limitFlagsTitle   = "Limit (the first choice is the default)"
	queueFlagsTitle   = "Queue, for --excess delay"
	colourFlagsTitle  = "Colours, for --algorithm srtcm, trtcm, rfc4115"
	poolFlagsTitle    = "Pool and fair shares"
	clusterFlagsTitle = "One rate over many hosts"
	adaptFlagsTitle   = "A rate that adapts to a line"
	otherFlagsTitle   = "Other"
)

// groupFlags puts flags under a title in help.
func groupFlags(f *pflag.FlagSet, title string, names ...string) {
	for _, name := range names {
		must(f.SetAnnotation(name, flagGroup, []string{title}))
	}
}

const (
	usualWidth  = 80  // of a terminal, where it is unknown
	widestHelp  = 100 // longer lines are hard to read
	moreHelp    = "More: shapectl COMMAND --help; shapectl help queue|patterns|errors|environment\n"
	globalFlags = "Also: -j for JSON, -n NETNS for another network namespace, -h for this help"
)

// columnsOf is COLUMNS, or the width of the terminal that out is, or 0.
func (e *env) columnsOf(out io.Writer) int {
	if columns, err := strconv.Atoi(e.getenv("COLUMNS")); err == nil && columns > 0 {
		return columns
	}
	f, ok := out.(*os.File)
	if !ok {
		return 0
	}
	columns, _, _ := term.GetSize(int(f.Fd())) // an error for what is no terminal
	return max(columns, 0)
}

// help prints the help of a command: the common case, examples, the rest, and the flags.
func (e *env) help(cmd *cobra.Command, groups []commandGroup) {
	width := min(cmp.Or(e.columns, usualWidth), widestHelp)
	long := cmd.Long
	if long == "" {
		long = cmd.Short + "."
	}
	first, rest, _ := strings.Cut(long, "\n\n")
	parts := []string{paragraphs(first, width), cmd.Example, paragraphs(rest, width)}
	switch {
	case !cmd.HasParent():
		var lists strings.Builder
		for _, g := range groups {
			lists.WriteString(commandList(g.title, g.commands))
		}
		parts = append(parts, lists.String()+moreHelp)
	case cmd.Runnable():
		parts = append(parts, plain.Fold("Usage: "+cmd.UseLine(), width, "", "  "))
	}
	if cmd.HasParent() && cmd.HasSubCommands() {
		parts = append(parts, commandList("Commands:", cmd.Commands()))
	}
	if cmd.Runnable() {
		parts[len(parts)-1] += flagList(cmd.LocalNonPersistentFlags(), width) + globalFlags
	}
	parts = slices.DeleteFunc(parts, func(part string) bool { return part == "" })
	for i := range parts {
		parts[i] = strings.Trim(parts[i], "\n")
	}
	fmt.Fprintln(e.out, strings.Join(parts, "\n\n"))
}

// paragraphs breaks the lines of text, but for those of tables, which begin with a blank.
func paragraphs(text string, width int) string {
	var out strings.Builder
	for paragraph := range strings.SplitSeq(text, "\n\n") {
		if paragraph == "" {
			continue
		}
		if strings.HasPrefix(paragraph, " ") {
			out.WriteString(paragraph + "\n\n")
			continue
		}
		out.WriteString(plain.Fold(strings.Join(strings.Fields(paragraph), " "), width, "", "") + "\n")
	}
	return out.String()
}

func commandList(title string, commands []*cobra.Command) string {
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n", title)
	for _, cmd := range commands {
		if !cmd.Hidden {
			fmt.Fprintf(&out, "  %-10s  %s\n", cmd.Name(), cmd.Short)
		}
	}
	return out.String()
}

// flagList lists the flags of a command by their groups, in the order in which they were added.
func flagList(flags *pflag.FlagSet, width int) string {
	var titles []string
	groups := map[string]*pflag.FlagSet{}
	flags.SortFlags = false
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		title := otherFlagsTitle
		if given := f.Annotations[flagGroup]; given != nil {
			title = given[0]
		}
		if groups[title] == nil {
			titles = append(titles, title)
			groups[title] = pflag.NewFlagSet("", pflag.ContinueOnError)
			groups[title].SortFlags = false
		}
		shown := *f
		if first, _, _ := strings.Cut(f.Value.Type(), "|"); first == f.DefValue {
			shown.DefValue = ""
		}
		groups[title].AddFlag(&shown)
	})
	var out strings.Builder
	for _, title := range titles {
		name := title
		if len(titles) == 1 {
			name = "Flags"
		}
		// pflag leaves room for shorthands, which none of these flags has.
		lines := "\n" + groups[title].FlagUsagesWrapped(width+4)
		out.WriteString(name + ":" + strings.ReplaceAll(lines, "\n    ", "\n"))
	}
	return out.String()
}
