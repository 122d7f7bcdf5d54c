package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// TestReference holds the generated parts of docs/reference to what the code says. With -update it writes them.
func TestReference(t *testing.T) {
	root := (&env{}).command()
	generated(t, "policy.md", optionTable())
	generated(t, "json.md", parseSource(t).json(t))
	generated(t, "metrics.md", metricsReference())
	generated(t, "README.md", commandReference(root)+topicReference("errors")+topicReference("environment"))
}

// TestEnvironment holds the help to the variables that the program reads.
func TestEnvironment(t *testing.T) {
	read := regexp.MustCompile(`etenv\("(\w+)"\)`)
	for _, path := range sourceFiles(t, "*.go", "../../internal/*/*.go", "../../pkg/*/*.go") {
		text, err := os.ReadFile(path)
		testenv.Must(t, err)
		for _, name := range read.FindAllStringSubmatch(string(text), -1) {
			if !strings.Contains(topic("environment").Long, "\n  "+name[1]+" ") {
				t.Errorf("%s reads %s, which 'shapectl help environment' does not list", path, name[1])
			}
		}
	}
}

// sourceFiles are the files that match patterns, without those of tests.
func sourceFiles(t *testing.T, patterns ...string) (files []string) {
	t.Helper()
	for _, pattern := range patterns {
		some, err := filepath.Glob(pattern)
		testenv.Must(t, err)
		files = append(files, some...)
	}
	return slices.DeleteFunc(files, func(path string) bool { return strings.HasSuffix(path, "_test.go") })
}

// generated compares what is between two marks in a page with text, or with -update puts it there.
func generated(t *testing.T, page, text string) {
	t.Helper()
	const begin, end = "<!-- written by 'go test ./cmd/shapectl -run TestReference -update' -->\n", "<!-- end of the written part -->"
	path := filepath.Join("../../docs/reference", page)
	have, err := os.ReadFile(path)
	testenv.Must(t, err)
	before, rest, _ := strings.Cut(string(have), begin)
	_, after, found := strings.Cut(rest, end)
	if !found {
		t.Fatalf("%s has no place for what is generated", path)
	}
	want := before + begin + "\n" + strings.TrimSpace(text) + "\n\n" + end + after
	if *update {
		testenv.Must(t, os.WriteFile(path, []byte(want), 0o644))
	} else if string(have) != want {
		t.Errorf("%s is not what the code says (go test -run TestReference -update writes it anew)", path)
	}
}

// allCommands are a command and those below it, without those that help does not list.
func allCommands(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			all = append(all, allCommands(c)...)
		}
	}
	return all
}

// A flagHelp is what there is to say of a flag.
type flagHelp struct{ names, value, usage string }

// flagHelps are the flags of a set that help lists, in its order.
func flagHelps(f *pflag.FlagSet) (all []flagHelp) {
	f.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		value, usage := pflag.UnquoteUsage(f)
		names := "--" + f.Name
		if f.Shorthand != "" {
			names = "-" + f.Shorthand + ", " + names
		}
		if !slices.Contains([]string{"", "0", "false", "0s"}, f.DefValue) {
			usage += " (default " + f.DefValue + ")"
		}
		all = append(all, flagHelp{names, value, usage})
	})
	return all
}

// synopsis is how a command is called.
func synopsis(cmd *cobra.Command) string {
	if cmd.HasParent() {
		return cmd.UseLine()
	}
	return cmd.Name() + " COMMAND [ARGUMENT]... [flags]"
}

// helpParagraphs splits a help text at empty lines.
func helpParagraphs(text string) []string { return strings.Split(strings.Trim(text, "\n"), "\n\n") }

// isCode reports whether a paragraph of a help text is to be shown as it is: its lines are indented.
func isCode(paragraph string) bool { return strings.HasPrefix(paragraph, " ") }

// commandReference is an index; manual pages and --help have all flags.
func commandReference(root *cobra.Command) string {
	s := "## Commands\n\n| command | what it does |\n| --- | --- |\n"
	for _, cmd := range allCommands(root)[1:] {
		if !cmd.HasSubCommands() {
			s += fmt.Sprintf("| `%s` | %s |\n", strings.ReplaceAll(strings.TrimPrefix(synopsis(cmd), "shapectl "), "|", `\|`), cmd.Short)
		}
	}
	return s
}

// topic is a page of help.
func topic(name string) *cobra.Command {
	all := helpTopics()
	return all[slices.IndexFunc(all, func(c *cobra.Command) bool { return c.Use == name })]
}

func topicReference(name string) string {
	s := "\n## " + topic(name).Short + "\n"
	for _, p := range helpParagraphs(topic(name).Long) {
		if isCode(p) {
			p = "```text\n" + unindent(p) + "\n```"
		}
		s += "\n" + p + "\n"
	}
	return s
}

func unindent(code string) string {
	return strings.TrimPrefix(strings.ReplaceAll(code, "\n  ", "\n"), "  ")
}

func optionTable() string {
	var s strings.Builder
	s.WriteString("| key | meaning | default |\n| --- | --- | --- |\n")
	for _, o := range policy.Options {
		names := "`" + strings.Join(append([]string{o.Name}, o.Aliases...), "`, `") + "`"
		value := o.Value(new(policy.Limit))
		usual, doc := cmp.Or(o.HelpDefault, value.String()), o.Doc
		if doc == "" {
			doc = strings.ReplaceAll(o.Help, "`", "")
			if kind := value.Type(); strings.Contains(kind, "|") && usual != "none" { // a choice
				doc = "`" + strings.ReplaceAll(kind, "|", "`, `") + "`: " + doc
			}
		}
		if o.PoolOnly && !o.Fact {
			doc = "of a pool: " + doc
		}
		if usual != "" {
			usual = "`" + usual + "`"
		}
		fmt.Fprintf(&s, "| %s | %s | %s |\n", names, doc, cmp.Or(o.DocDefault, usual, "none"))
	}
	return s.String()
}

// metricsReference has a row for each metric. One of rules that pools have, too, and one of bytes beside one of packets,
// are in the same row.
func metricsReference() string {
	var s strings.Builder
	all := metrics.All()
	has := func(name, help string) bool {
		return slices.ContainsFunc(all, func(m metrics.Metric) bool { return m.Name == name && (help == "" || m.Help == help) })
	}
	s.WriteString("| metric | also | labels | meaning |\n| --- | --- | --- | --- |\n")
	for _, m := range all {
		if has(strings.Replace(m.Name, "_bytes_total", "_packets_total", 1), "") && strings.HasSuffix(m.Name, "_bytes_total") ||
			strings.HasPrefix(m.Name, "shapectl_pool_") && has(strings.Replace(m.Name, "_pool_", "_rule_", 1), m.Help) {
			continue
		}
		var also []string
		if has(strings.Replace(m.Name, "_rule_", "_pool_", 1), m.Help) && strings.Contains(m.Name, "_rule_") {
			also = append(also, "pool")
		}
		if has(strings.Replace(m.Name, "_packets_total", "_bytes_total", 1), "") && strings.Contains(m.Name, "_packets_total") {
			also = append(also, "bytes")
		}
		labels := ""
		if joined := strings.Join(m.Labels, "`, `"); joined != "" && joined != "device`, `direction`, `network" && joined != "pool" {
			labels = "`" + joined + "`"
		}
		fmt.Fprintf(&s, "| `%s` | %s | %s | %s |\n", m.Name, strings.Join(also, ", "), labels, m.Help)
	}
	return s.String()
}

// A source is what the reference takes from the program's text.
type source struct {
	keys     map[string][]jsonKey // of each type that is printed as JSON
	order    []string             // of these types
	meanings map[string]string    // of keys, or of a key of a type
}

// A jsonKey is a key of an object in JSON.
type jsonKey struct {
	name, kind, doc string
	figure          bool // the doc says all
}

// saysItself is the meaning of a key whose name says it.
const saysItself = "-"

var jsonUnit = regexp.MustCompile(`_(bits_per_second|bytes|ns)$`)

// isOption reports whether a figure is an option of a limit, which policy.md explains.
func (k jsonKey) isOption() bool {
	name := strings.ReplaceAll(jsonUnit.ReplaceAllString(k.name, ""), "_", "-")
	return k.figure && slices.ContainsFunc(policy.Options, func(o *policy.Option) bool { return o.Name == name })
}

// meaning is what the reference says of a key.
func (s *source) meaning(of string, k jsonKey) string {
	if k.figure {
		return k.doc
	}
	return cmp.Or(s.meanings[of+"."+k.name], s.meanings[k.name], k.doc)
}

// parseSource reads the files that have types of JSON.
func parseSource(t *testing.T) *source {
	t.Helper()
	s := &source{keys: map[string][]jsonKey{}, meanings: jsonMeanings(t)}
	for _, path := range sourceFiles(t, "../../internal/report/*.go", "*.go", "../../internal/history/delivery.go", "../../internal/importer/importer.go",
		"../../internal/live/[bft]*.go", "../../internal/replay/summary.go") {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		testenv.Must(t, err)
		s.readJSON(file, strings.TrimSuffix(filepath.Base(path), ".go"))
	}
	figures := func(of []live.Figure) (keys []jsonKey) {
		for _, f := range of {
			keys = append(keys, jsonKey{f.Key, f.Type, f.Doc, true})
		}
		return keys
	}
	s.keys["Rule"] = append(figures(live.Figures), s.keys["Rule"]...)
	s.keys["Shadow"], s.order = figures(live.OfShadow), append(s.order, "Shadow")
	return s
}

// readJSON finds the types of a file that have JSON tags. One without a name is that of the command of its file.
func (s *source) readJSON(file *ast.File, command string) {
	named := map[*ast.StructType]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.TypeSpec:
			if structure, ok := n.Type.(*ast.StructType); ok {
				named[structure] = n.Name.Name
			}
		case *ast.StructType:
			name := named[n]
			if name == "" {
				name = map[string]string{"main": "version"}[command]
				name = cmp.Or(name, command)
			}
			if keys := jsonKeys(n); keys != nil {
				s.keys[name] = keys
				s.order = append(s.order, name)
			}
		}
		return true
	})
}

// jsonKeys are the keys of a type; nil if none of its fields has a JSON tag.
func jsonKeys(structure *ast.StructType) (keys []jsonKey) {
	for _, field := range structure.Fields.List {
		if len(field.Names) == 0 {
			embedded := field.Type
			if of, ok := embedded.(*ast.StarExpr); ok {
				embedded = of.X
			}
			if of, ok := embedded.(*ast.SelectorExpr); ok { // of another package
				embedded = of.Sel
			}
			if embedded, ok := embedded.(*ast.Ident); ok {
				keys = append(keys, jsonKey{kind: embedded.Name})
			}
			continue
		}
		if field.Tag == nil {
			continue
		}
		tag, _ := strconv.Unquote(field.Tag.Value)
		name, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		if name == "" || name == "-" {
			continue
		}
		doc := cmp.Or(field.Doc.Text(), field.Comment.Text())
		keys = append(keys, jsonKey{name: name, kind: jsonType(field.Type), doc: strings.Join(strings.Fields(doc), " ")})
	}
	if !slices.ContainsFunc(keys, func(k jsonKey) bool { return k.name != "" }) {
		return nil
	}
	return keys
}

// jsonType is what a Go type is in JSON; a type of ours by its name.
func jsonType(of ast.Expr) string {
	switch of := of.(type) {
	case *ast.StarExpr:
		return jsonType(of.X) + " or null"
	case *ast.ArrayType:
		return "list of " + jsonType(of.Elt)
	case *ast.SelectorExpr:
		if of.Sel.Name == "Time" {
			return "string"
		}
		return of.Sel.Name
	case *ast.Ident:
		switch {
		case of.Name == "bool":
			return "boolean"
		case strings.Contains(of.Name, "int") || of.Name == "float64":
			return "number"
		case of.Name == "string" || of.Name == "Status":
			return "string"
		}
		return of.Name
	}
	return "value"
}

// printedBy says which commands print an object.
var printedBy = map[string]string{
	"Rule": "`set`, `show`, `delete`, `flush`: a list", "Path": "`explain`: a list", "Finding": "`doctor`: a list", "Line": "`line`",
	"Applied": "`apply`, `confirm`, `rollback`", "Difference": "`diff`: a list", "ChangeSummary": "`diff --summary`: a list", "Imported": "`import`",
	"Top": "`top`", "RTTs": "`top --rtt`", "Talkers": "`top --by host`, `top --by flow`", "Event": "`events`: an object on each line",
	"Replay": "`replay --summary`", "Packet": "`replay`: an object on each line", "Delivery": "`report`: a list", "version": "`version`", "toppedUp": "`topup`: a list", "limited": "`serve`: an object on each line",
	"Named": "`show --names`: a list", "ExplainedPool": "`explain` of a pool; of a device with several pools, a list",
	"ClusterStatus": "`cluster status`", "forgotten": "`cluster forget`",
	"failure": "any command that fails, on stderr", "warning": "any command that warns, on stderr",
}

// A jsonRow is a key with the path to it, and what it means.
type jsonRow struct{ path, meaning string }

// json has a table for each object that a command prints, and for each one that is in several objects. A key that means the
// same in several tables is in a table before them, and one that a part has like its whole is in the table once.
func (s *source) json(t *testing.T) string {
	t.Helper()
	var names []string
	tables, uses := map[string][]jsonRow{}, map[jsonRow]int{}
	for _, name := range s.order {
		if s.hasTable(name) {
			names = append(names, name)
			for _, row := range s.rows(t, name, "") {
				if !slices.ContainsFunc(tables[name], func(before jsonRow) bool { return before.last() == row.last() }) {
					tables[name] = append(tables[name], row)
					uses[row.last()]++
				}
			}
		}
	}
	s.checkUsed(t)
	var shared, own, index strings.Builder
	for _, name := range names {
		unique := slices.DeleteFunc(slices.Clone(tables[name]), func(row jsonRow) bool { return uses[row.last()] > 1 })
		title := name
		if len(unique) > 0 {
			title = s.link(name)
			own.WriteString("\n## " + name + "\n\n" + jsonTable(unique))
		}
		if by, ok := printedBy[name]; ok {
			fmt.Fprintf(&index, "| %s | %s |\n", by, title)
		}
	}
	common := slices.SortedFunc(maps.Keys(uses), func(a, b jsonRow) int { return strings.Compare(a.path, b.path) })
	shared.WriteString("\n## Keys of several objects\n\n" + jsonTable(slices.DeleteFunc(common, func(row jsonRow) bool { return uses[row] < 2 })))
	return "| printed by | object |\n| --- | --- |\n" + index.String() + shared.String() + own.String()
}

func jsonTable(rows []jsonRow) string {
	s := "| key | meaning |\n| --- | --- |\n"
	for _, row := range rows {
		s += fmt.Sprintf("| `%s` | %s |\n", row.path, row.meaning)
	}
	return s
}

// last is the row without the path to its key.
func (r jsonRow) last() jsonRow { return jsonRow{r.path[strings.LastIndex(r.path, ".")+1:], r.meaning} }

// rows are the keys of a type whose names do not say all, and behind a key those of its objects.
func (s *source) rows(t *testing.T, name, path string) (rows []jsonRow) {
	all := s.flat(name)
	for _, k := range all {
		of, meaning := s.part(k.kind), s.meaning(name, k)
		inPackets, isBytes := strings.CutSuffix(k.name, "_bytes")
		isTwin := isBytes && slices.ContainsFunc(all, func(other jsonKey) bool { return other.name == inPackets+"_packets" })
		switch {
		case meaning == "":
			t.Errorf("JSON key %s of %s: neither testdata/json-keys.txt nor a comment in the code says what it means", k.name, name)
		case of != "" && s.hasTable(of):
			rows = append(rows, jsonRow{path + k.name, strings.TrimPrefix(meaning+": ", saysItself+": ") + s.link(of)})
		case meaning != saysItself && !isTwin && !k.isOption():
			rows = append(rows, jsonRow{path + k.name, meaning})
		}
		if of != "" && !s.hasTable(of) {
			if strings.HasPrefix(k.kind, "list of ") {
				k.name += "[]"
			}
			rows = append(rows, s.rows(t, of, k.name+".")...)
		}
	}
	return rows
}

// checkUsed finds meanings that no key has.
func (s *source) checkUsed(t *testing.T) {
	unused := maps.Clone(s.meanings)
	for _, name := range s.order {
		for _, k := range s.flat(name) {
			if _, own := s.meanings[name+"."+k.name]; own {
				delete(unused, name+"."+k.name)
			} else if !k.figure {
				delete(unused, k.name)
			}
		}
	}
	for key := range unused {
		t.Errorf("testdata/json-keys.txt: no object has the key %s, or all have a meaning of their own for it", key)
	}
}

// part is the type of the objects in a kind; empty for none.
func (s *source) part(kind string) string {
	for word := range strings.FieldsSeq(kind) {
		if s.keys[word] != nil {
			return word
		}
	}
	return ""
}

// hasTable reports whether a command prints a type, or several keys have it.
func (s *source) hasTable(name string) bool {
	users := 0
	for _, user := range s.order {
		if printedBy[user] != "" || !s.isOnlyEmbedded(user) {
			for _, k := range s.flat(user) {
				if s.part(k.kind) == name {
					users++
				}
			}
		}
	}
	return printedBy[name] != "" || users > 1 && slices.ContainsFunc(s.flat(name), func(k jsonKey) bool { return s.meaning(name, k) != saysItself })
}

// flat are the keys of a type, with those of embedded types.
func (s *source) flat(name string) (keys []jsonKey) {
	for _, k := range s.keys[name] {
		if k.name == "" {
			keys = append(keys, s.flat(k.kind)...)
		} else {
			keys = append(keys, k)
		}
	}
	return keys
}

// isOnlyEmbedded reports whether a type is but a part of others, whose tables have its keys.
func (s *source) isOnlyEmbedded(name string) bool {
	embedded := false
	for _, keys := range s.keys {
		for _, k := range keys {
			if k.name != "" && slices.Contains(strings.Fields(k.kind), name) {
				return false
			}
			embedded = embedded || k.name == "" && k.kind == name
		}
	}
	return embedded
}

func (s *source) link(name string) string { return "[" + name + "](#" + strings.ToLower(name) + ")" }

// jsonMeanings are lines of "key: meaning" or "Type.key: meaning".
func jsonMeanings(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("testdata/json-keys.txt")
	testenv.Must(t, err)
	meanings := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, meaning, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			meanings[key] = meaning
		}
	}
	return meanings
}
