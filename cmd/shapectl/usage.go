package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// synonyms are names that other tools have for a command. Whoever types one is told of the command.
func synonyms(command string) []string {
	return map[string][]string{
		"apply":    {"load", "restore"},
		"confirm":  {"commit"},
		"delete":   {"del", "remove", "rm", "unset"},
		"doctor":   {"check", "diagnose"},
		"explain":  {"ask", "trace", "why"},
		"export":   {"dump", "save"},
		"flush":    {"clear", "reset"},
		"line":     {"bufferbloat", "cake", "sqm"},
		"pool":     {"class", "group", "pools"},
		"replay":   {"simulate", "test"},
		"rollback": {"revert", "undo"},
		"set":      {"add", "change", "limit", "replace"},
		"serve":    {"agent", "daemon", "monitor", "watch"},
		"show":     {"list", "ls", "stats", "status"},
		"topup":    {"credit", "refill"},
	}[command]
}

// unknownCommand is the error of a word in place of a command.
func unknownCommand(parent *cobra.Command, word string) error {
	var words []string
	commands := map[string]string{}
	for _, cmd := range parent.Commands() {
		for _, w := range append(synonyms(cmd.Name()), cmd.Name()) {
			words = append(words, w)
			commands[w] = cmd.Name()
		}
	}
	if similar := plain.Similar(word, words); similar != "" {
		return inputf("unknown command %q; did you mean '%s %s'?", word, parent.CommandPath(), commands[similar])
	}
	return inputf("unknown command %q; '%s --help' lists the commands", word, parent.CommandPath())
}

// needsCommand is the error of a command line that ends before its command, or has another word there.
func needsCommand(parent *cobra.Command, given []string) error {
	if len(given) > 0 {
		return unknownCommand(parent, given[0])
	}
	return inputf("%s: the command is missing; write '%s'", verb(parent), parent.UseLine())
}

// unmatched are flags of other tools for what a rule cannot match.
var unmatched = []string{"port", "ports", "dport", "sport", "proto", "protocol", "mac"}

// flagError says which flag of a command is wrong, and why.
func flagError(cmd *cobra.Command, err error) error {
	if given := cmd.Flags().Args(); cmd.HasSubCommands() && len(given) > 0 {
		return unknownCommand(cmd, given[0]) // its flags are unknown, too
	}
	help := "see '" + cmd.CommandPath() + " --help'"
	of := ""
	if cmd.HasParent() {
		of = verb(cmd) + ": "
	}
	var unknown *pflag.NotExistError
	var bare *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		dashes, name := "--", unknown.GetSpecifiedName()
		if short := unknown.GetSpecifiedShortnames(); short != "" {
			dashes = "-"
			name, _, _ = strings.Cut(short, "=")
		}
		if slices.Contains(unmatched, name) && cmd.Flags().Lookup("rate") != nil {
			help = "rules match addresses only, and no ports, protocols or MAC addresses: docs/concepts.md says what to use instead"
		} else if name == "plan" && cmd.Flags().Lookup("rate") != nil {
			help = "plans are in the policy file: change it there, and apply the file"
		} else if similar := plain.Similar(name, flagNames(cmd.Flags())); similar != "" {
			help = "did you mean --" + similar + "?"
		}
		return inputf("%sunknown flag %s%s; %s", of, dashes, name, help)
	case errors.As(err, &bare):
		return inputf("%s--%s needs an argument; %s", of, bare.GetFlag().Name, help)
	case errors.As(err, &invalid):
		cause := invalid.Unwrap()
		if errors.As(cause, new(*strconv.NumError)) {
			kind := "a whole number in range"
			if invalid.GetFlag().Value.Type() == "bool" {
				kind = "true or false"
			}
			cause = fmt.Errorf("%.64q is not %s; %s", invalid.GetValue(), kind, help)
		}
		name := invalid.GetFlag().Name
		if strings.HasPrefix(cause.Error(), name+" ") {
			return inputf("%s--%w", of, cause)
		}
		return inputf("%s--%s: %w", of, name, cause)
	}
	return inputf("%s%w; %s", of, err, help)
}

// flagNames are all names of flags, also those that help does not show.
func flagNames(f *pflag.FlagSet) (names []string) {
	f.VisitAll(func(flag *pflag.Flag) {
		names = append(names, flag.Name)
		if o := policy.FindOption(flag.Name); o != nil {
			names = append(names, o.Aliases...)
		}
	})
	return names
}

// asksForJSON reports whether -j is in a command line that has wrong flags, too.
func asksForJSON(args []string) (json bool) {
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.ParseErrorsAllowlist.UnknownFlags = true
	f.BoolVarP(&json, "json", "j", false, "")
	f.BoolP("help", "h", false, "")
	return f.Parse(args) == nil && json
}

// checkEmpty refuses flags with an empty value: it is more likely a variable that was never set than a way to say "none".
func checkEmpty(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Value.Type() == "string" && f.Value.String() == "" {
			err = inputf("%s: --%s is empty; give it a value, or leave it out", verb(cmd), f.Name)
		}
	})
	return err
}

// args checks arguments: none is empty, and their number, with an error that says which there are.
func args(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, given []string) error {
		if at := slices.Index(given, ""); at >= 0 {
			return inputf("%s: argument %d is empty; leave it out, or write what it takes: '%s'", verb(cmd), at+1, cmd.UseLine())
		}
		if len(given) < least || len(given) > most {
			return inputf("%s: %s, but it takes '%s'", verb(cmd), plain.Count(len(given), "argument"), cmd.UseLine())
		}
		return nil
	}
}

// directionError is the error of arguments of which the second is no direction.
func directionError(given []string, err error) error {
	word := given[1]
	if plain.Similar(word, []string{"ingress", "egress"}) != "" { // one is similar to the other, so both are named
		err = fmt.Errorf("direction %.64q is unknown; did you mean egress, which leaves the device, or ingress, which enters it?", word)
	} else if _, noNetwork := policy.ParseNetworks(word); noNetwork == nil {
		err = fmt.Errorf("the direction is missing before %s; write egress, which leaves the device, or ingress, which enters it", word)
	} else if _, noNetwork := policy.ParseNetworks(given[len(given)-1]); noNetwork != nil {
		err = fmt.Errorf("%w; if it is a part of a name, quote that: %s", err, plain.Word(strings.Join(given, " ")))
	}
	return err
}

// flagText is a flag as it was given, each value after a space.
func flagText(f *pflag.Flag) (text string) {
	values := []string{f.Value.String()}
	switch v := f.Value.(type) {
	case *onceValue:
		values[0] = v.text
	case pflag.SliceValue:
		values = v.GetSlice()
	}
	for _, v := range values {
		switch {
		case f.NoOptDefVal == "":
			text += " --" + f.Name + " " + plain.Word(v)
		case v == f.NoOptDefVal:
			text += " --" + f.Name
		default:
			text += " --" + f.Name + "=" + v
		}
	}
	return text
}

// commandLine is the command line of cmd for a shell: with these arguments, and the flags that were given, but for some.
func (e *env) commandLine(cmd *cobra.Command, given []string, but ...string) string {
	flags := ""
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(but, f.Name) && cmd.InheritedFlags().Lookup(f.Name) == nil {
			flags += flagText(f)
		}
	})
	if strings.HasPrefix(given[0], "-") {
		return plain.Command(e.netns, verb(cmd)+flags, given...)
	}
	return plain.Command(e.netns, verb(cmd), given...) + flags
}

// verb is the name of a command with those of its parents, but for shapectl.
func verb(cmd *cobra.Command) string { return strings.TrimPrefix(cmd.CommandPath(), "shapectl ") }

// A flagValue is the value of a flag of a kind that has no type.
type flagValue struct {
	kind, initially string
	set             func(string) error
}

func (v flagValue) Set(s string) error { return v.set(s) }
func (v flagValue) String() string     { return v.initially }
func (v flagValue) Type() string       { return v.kind }

// choice is one of some words.
func choice(to *string, words ...string) flagValue {
	return flagValue{strings.Join(words, "|"), *to, func(s string) error {
		if *to = s; !slices.Contains(words, s) {
			return fmt.Errorf("%.64q is unknown; use one of %s", s, strings.Join(words, ", "))
		}
		return nil
	}}
}

// duration is a time as time.ParseDuration reads it.
func duration(d *time.Duration) flagValue {
	return flagValue{"time", "", func(s string) (err error) {
		if *d, err = time.ParseDuration(s); err != nil {
			return fmt.Errorf("%.64q is not a time; write a time with a unit, such as 60s", s)
		}
		return nil
	}}
}

// byteCount is a number of bytes, which may have a unit.
func byteCount[N int64 | uint64](bytes *N) flagValue {
	return flagValue{"bytes", fmt.Sprint(*bytes), func(s string) error {
		n, err := policy.ParseSize(s)
		*bytes = N(n)
		return err
	}}
}

// countOrAll is a number of things, or all, which is negative.
func countOrAll(n *int) flagValue {
	return flagValue{"N", strconv.Itoa(*n), func(s string) (err error) {
		if s == "all" {
			*n = -1
			return nil
		}
		if *n, err = strconv.Atoi(s); err != nil || *n < 0 {
			return fmt.Errorf("%.64q is not a number; write a whole number such as 100, or all", s)
		}
		return nil
	}}
}

// noteRates notes rates among the flags that have no unit.
func (e *env) noteRates(cmd *cobra.Command) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if v, is := f.Value.(*onceValue); is && slices.Contains([]string{"rate", "pir", "eir", "guarantee", "down", "up", "min"}, f.Name) {
			if note := policy.BareRate(v.text); note != "" {
				e.say("note: --%s %s", f.Name, note)
			}
		}
	})
}

// once adds a flag that may be given one time only, as two names of one flag may not disagree.
func once(f *pflag.FlagSet, v pflag.Value, name, usage string) {
	f.Var(&onceValue{Value: v}, name, usage)
}

type onceValue struct {
	pflag.Value
	given bool
	text  string // as it was given
}

func (o *onceValue) Set(s string) error {
	if o.given {
		return errors.New("it was given already, under this name or another")
	}
	o.given, o.text = true, s
	return o.Value.Set(s)
}
