package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
)

// With -j each line on stderr is one of these objects.
type (
	failure struct {
		Error    string    `json:"error"`
		ExitCode int       `json:"exit_code"`
		Mistakes []mistake `json:"mistakes,omitempty"` // of a policy file
	}
	warning struct {
		Warning string `json:"warning"`
		*position
	}
	mistake struct {
		position
		Message string `json:"message"`
	}
	position struct {
		File   string `json:"file"`
		Line   int    `json:"line"`   // from 1
		Column int    `json:"column"` // in characters, from 1
	}
)

func positionOf(e policyfile.Error) position { return position{e.File, e.Line, e.Column} }

// tell writes one line on stderr: the object with -j, else the text.
func (e *env) tell(object any, text string) {
	if !e.json {
		fmt.Fprintln(e.err, text)
		return
	}
	encoder := json.NewEncoder(e.err)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(object) // run reports an error of stderr
}

// say writes a warning.
func (e *env) say(format string, args ...any) {
	line := plain.OneLine(fmt.Errorf(format, args...))
	e.tell(warning{Warning: strings.TrimPrefix(line, "shapectl: ")}, line)
}

// degraded writes why a command did only part of its work.
func (e *env) degraded(format string, args ...any) error {
	e.fail(fmt.Errorf(format, args...), exitDegraded, nil)
	return errDegraded
}

// fail writes an error. Mistakes are told only with -j.
func (e *env) fail(err error, code int, mistakes policyfile.Errors) {
	line := plain.OneLine(err)
	object := failure{Error: line, ExitCode: code}
	for _, m := range mistakes {
		object.Mistakes = append(object.Mistakes, mistake{positionOf(m), m.Message})
	}
	e.tell(object, "shapectl: "+line)
}

// warnOf writes warnings about a policy file.
func (e *env) warnOf(warnings policyfile.Errors) {
	if len(warnings) == 0 {
		return
	}
	if !e.json {
		fmt.Fprintln(e.err, warnings)
		return
	}
	for _, w := range warnings {
		at := positionOf(w)
		e.tell(warning{w.Message, &at}, "")
	}
}

// suggest is a command line of shapectl in a sentence, for the namespace of -n.
func (e *env) suggest(verb string, args ...string) string {
	return plain.Suggest(e.netns, verb, args...)
}
