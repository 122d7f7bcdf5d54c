package main

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/serve"
	"github.com/shapectl/shapectl/internal/testenv"
)

// apiAnswers are the types of what commands print, as json.md has them.
var apiAnswers = map[string][]string{
	"set": {"list of Rule"}, "delete": {"list of Rule"}, "flush": {"list of Rule"}, "topup": {"list of toppedUp"},
	"line": {"Line", "Applied"}, "apply": {"Applied"}, "confirm": {"Applied"}, "rollback": {"Applied"}, "show": {"list of Rule", "list of Named"},
	"explain": {"list of Path", "ExplainedPool", "list of ExplainedPool"}, "doctor": {"list of Finding"},
	"diff": {"list of Difference", "list of ChangeSummary"}, "export": {"list of Rule"}, "import tc": {"Imported"}, "report": {"list of Delivery"}, "version": {"list of version"},
	"events": {"Event", "value"},
}

type object = map[string]any

// schema is a type of json.md as a JSON Schema.
func (s *source) schema(kind string) object {
	if inner, ok := strings.CutSuffix(kind, " or null"); ok {
		return object{"anyOf": []any{s.schema(inner), object{"type": "null"}}}
	}
	if inner, ok := strings.CutPrefix(kind, "list of "); ok {
		return object{"type": []string{"array", "null"}, "items": s.schema(inner)}
	}
	switch {
	case kind == "boolean" || kind == "number" || kind == "string":
		return object{"type": kind}
	case s.keys[kind] != nil:
		return object{"$ref": "#/components/schemas/" + kind}
	}
	return object{}
}

// schemas are all types of json.md.
func (s *source) schemas() object {
	all := object{}
	for _, name := range s.order {
		properties := object{}
		for _, k := range s.flat(name) {
			property := s.schema(k.kind)
			if meaning := s.meaning(name, k); meaning != "" && meaning != saysItself {
				property["description"] = meaning
			}
			properties[k.name] = property
		}
		all[name] = object{"type": "object", "properties": properties, "additionalProperties": false}
	}
	return all
}

// requestSchema describes what a request may have.
func requestSchema(c apiCommand, cmd *cobra.Command) object {
	properties := object{}
	for _, form := range c.forms {
		for i, name := range argumentNames(form) {
			of := object{"type": "string", "description": "argument of " + strings.ToUpper(strings.ReplaceAll(form, " ", " "))}
			if strings.HasSuffix(strings.Fields(form)[i], "...") {
				of = object{"type": []string{"array", "string"}, "items": object{"type": "string"}, "description": of["description"]}
			}
			properties[name] = of
		}
	}
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if c.flag(cmd, f.Name) == nil || f.Hidden {
			return
		}
		_, usage := pflag.UnquoteUsage(f)
		of := object{"type": []string{"string", "number"}, "description": usage}
		switch f.Value.Type() {
		case "bool":
			of["type"] = "boolean"
		case "stringSlice", "stringArray":
			of["type"], of["items"] = "array", object{"type": "string"}
		}
		properties[f.Name] = of
	})
	if c.isArgument(policyText) {
		properties[policyText] = object{"type": "string", "description": "the text of the file POLICY"}
	}
	if c.name == topOnce.name {
		properties["running"] = object{"type": "boolean", "description": "answer with what serve --rtt measures anyway, with an interval of 0 if it does not, and start nothing"}
	}
	return object{"type": "object", "properties": properties, "additionalProperties": false}
}

// inQuery are the properties of a request as parameters of a query.
func inQuery(properties object) (parameters []object) {
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		of := maps.Clone(properties[name].(object))
		text := of["description"]
		delete(of, "description")
		parameters = append(parameters, object{"name": name, "in": "query", "description": text, "schema": of})
	}
	return parameters
}

// apiDescription is the API in OpenAPI 3.1.
func (s *source) apiDescription(t *testing.T, root *cobra.Command) object {
	reference := func(name string) object { return object{"$ref": "#/components/responses/" + name} }
	failures := object{}
	for code, name := range map[string]string{
		"400": "failure", "401": "failure", "403": "failure", "404": "failure", "409": "failure", "413": "failure", "415": "failure", "421": "failure",
		"429": "failure", "500": "failure", "501": "failure", "503": "failure",
	} {
		failures[code] = reference(name)
	}
	answer := func(kinds []string, text string) object {
		var any []object
		for _, kind := range kinds {
			any = append(any, s.schema(kind))
		}
		of := any[0]
		if len(any) > 1 {
			of = object{"anyOf": any}
		}
		return object{"description": text, "content": object{"application/json": object{"schema": of}}}
	}
	paths := object{}
	for _, c := range apiCommands {
		cmd, _, err := root.Find(strings.Fields(c.name))
		testenv.Must(t, err)
		if apiAnswers[c.name] == nil {
			t.Errorf("%s: apiAnswers does not say what it answers", c.name)
			continue
		}
		method := strings.ToLower(c.method())
		responses := maps.Clone(failures)
		responses["200"] = answer(apiAnswers[c.name], "done")
		responses["207"] = answer(append(slices.Clone(apiAnswers[c.name]), "failure"), "partly done, or not all in force (exit code 4)")
		operation := object{"operationId": strings.ReplaceAll(c.name, " ", "-") + "-" + method, "summary": cmd.Short, "responses": responses}
		request := requestSchema(c, cmd)
		if c.method() == http.MethodPost {
			operation["requestBody"] = object{"required": true, "content": object{"application/json": object{"schema": request}}}
		} else {
			operation["parameters"] = inQuery(request["properties"].(object))
		}
		if c.access() != serve.Reads {
			operation["security"] = []object{{"token": []string{}}, {}}
		}
		paths[c.path()] = object{method: operation}
	}
	responses := maps.Clone(failures)
	responses["200"] = answer([]string{"Top", "Talkers", "RTTs"}, "done")
	cmd, _, err := root.Find([]string{topOnce.name})
	testenv.Must(t, err)
	properties := requestSchema(topOnce, cmd)["properties"].(object)
	for _, p := range topParameters {
		of := object{"type": "string"}
		switch {
		case p.number != nil:
			of = object{"type": "integer", "minimum": 1}
		case p.list != nil:
			of = object{"type": "array", "items": of}
		case p.name == "by":
			of["enum"] = topViews
		case p.values != nil:
			of["enum"] = p.values
		}
		of["description"] = p.help
		properties[p.name] = of
	}
	paths["/api/v1/top"] = object{"get": object{
		"operationId": "top-get", "summary": "What rules, pools and names do now, measured over a second; by host or flow, or with rtt, what the command measures",
		"parameters": inQuery(properties), "responses": responses,
	}}
	return object{
		"openapi": "3.1.0",
		"info":    object{"title": "shapectl serve", "version": "1", "description": "What the commands of shapectl do. The JSON is that of -j; the status follows from the exit code."},
		"paths":   paths,
		"components": object{
			"schemas":         s.schemas(),
			"securitySchemes": object{"token": object{"type": "http", "scheme": "bearer"}},
			"responses":       object{"failure": answer([]string{"failure"}, "the error, as commands print it with -j")},
		},
	}
}

// TestReferenceAPI holds the description of the API to what the code says. With -update it writes it.
func TestReferenceAPI(t *testing.T) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", " ")
	testenv.Must(t, encoder.Encode(parseSource(t).apiDescription(t, (&env{}).command())))
	if *update {
		testenv.Must(t, os.WriteFile("openapi.json", text.Bytes(), 0o644))
	} else if !bytes.Equal(openAPI, text.Bytes()) {
		t.Error("openapi.json is not what the code says (go test -run TestReference -update writes it anew)")
	}
}

// notInAPI are the commands that do not deal with the limits of this host, or have a handler of their own. Those of clusters
// connect to a store: a request must not choose where the server connects to.
var notInAPI = []string{
	"shapectl", "import", "import libreqos", "import nft", "replay", "completion", "help", "serve", "top", "cluster", "cluster status", "cluster forget",
}

// TestAPIHasAllCommands sees that a new command is in the API, or is left out on purpose, and that no request names a
// file of the server or something to run there.
func TestAPIHasAllCommands(t *testing.T) {
	root := (&env{}).command()
	for _, cmd := range allCommands(root) {
		name := strings.TrimPrefix(cmd.CommandPath(), "shapectl ")
		i := slices.IndexFunc(apiCommands, func(c apiCommand) bool { return c.name == name })
		if (i < 0) != slices.Contains(notInAPI, name) && cmd.Runnable() {
			t.Errorf("%s: is it in the API?", name)
		}
		if i < 0 {
			continue
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			kind, _ := pflag.UnquoteUsage(f)
			known := []string{"", "string", "rate", "time", "size|time", "bytes", "number", "N", "order", "pool", "text", "limit", "flow", "device", "kind", "view", "rule", "name", "host", "host,...", "address", "pattern", "meter", "dscp=colour,...", "size", "zone"}
			if apiCommands[i].flag(cmd, f.Name) != nil && !slices.Contains(known, kind) && !strings.Contains(kind, "|") {
				t.Errorf("%s --%s takes a %s: may a request name one?", name, f.Name, kind)
			}
		})
	}
}

// An apiSchema checks requests and answers.
type apiSchema struct {
	t        *testing.T
	compiler *jsonschema.Compiler
}

func newAPISchema(t *testing.T) *apiSchema {
	t.Helper()
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(openAPI))
	testenv.Must(t, err)
	c := jsonschema.NewCompiler()
	testenv.Must(t, c.AddResource("openapi.json", document))
	return &apiSchema{t, c}
}

// check ends the test unless a text is what the description says at a JSON pointer.
func (a *apiSchema) check(at string, text []byte) {
	a.t.Helper()
	schema, err := a.compiler.Compile("openapi.json#" + at)
	testenv.Must(a.t, err)
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err == nil {
		err = schema.Validate(value)
	}
	if err != nil {
		a.t.Errorf("%s: %v: %.1000s", at, err, text)
	}
}
