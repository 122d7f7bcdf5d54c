package policyfile

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

// notes are what is wrong with a text.
type notes struct {
	*source
	problems []problem
	faults   int       // the number of problems, and of uses of something that was reported
	warned   []problem // warnings
}

func (r *notes) report(offset uint32, message string) {
	r.faults++
	r.problems = append(r.problems, problem{offset, message})
}

func (r *notes) errorf(n *node, format string, args ...any) {
	r.report(n.start, fmt.Errorf(format, args...).Error())
}

// again reports that a key names what another one has named, in seen. advice says what to do.
func (r *notes) again(seen map[string]*node, key *node, name, called, advice string) bool {
	first := seen[name]
	if first != nil {
		r.errorf(key, "%s appears twice, first in %s%s", called, r.where(first.start), advice)
	} else {
		seen[name] = key
	}
	return first != nil
}

// entries returns the entries of a mapping that have a key and a value.
func (r *notes) entries(n *node, what, example string) []entry {
	switch n.kind {
	case odd:
		r.faults++
		return nil
	case mapping:
		return slices.DeleteFunc(n.entries, func(e entry) bool { return !r.says(&e, what) })
	}
	if key, value, ok := together(n.text); ok {
		r.errorf(n, "%s", noColon(key, value))
		return nil
	}
	r.errorf(n, "%s cannot be %s; write it like %s", what, n.describe(), example)
	return nil
}

func noColon(key, value string) string {
	return fmt.Sprintf("a colon and a space are missing between key and value; did you mean %s: %s?", shorten(key), shorten(value))
}

// together splits a text that was meant as a key and a value.
func together(s string) (key, value string, ok bool) {
	at := strings.LastIndexAny(s, ": ")
	if at <= 0 || at == len(s)-1 {
		return "", "", false
	}
	key, value = strings.TrimRight(s[:at], ": "), s[at+1:]
	return key, value, isNetwork(key) || policy.IsMAC(key) || slices.Contains(ruleKeys, key)
}

func (r *notes) says(e *entry, what string) bool {
	switch {
	case e.key.kind == odd || e.value.kind == odd:
		r.faults++
	case e.key.kind != text:
		r.errorf(&e.key, "%s cannot be a key; write plain text, in quotes if it begins with [ or {", e.key.describe())
	case e.value.kind == nothing:
		r.errorf(&e.key, "%s", saysNothing(what, e.key.text))
	default:
		return true
	}
	return false
}

func saysNothing(what, key string) string {
	name, value, ok := together(key)
	switch {
	case ok:
		return noColon(name, value)
	case what == "a direction":
		return shorten(key) + " has no value; write a rate, unlimited, or a plan"
	case what == "plans", what == "pools":
		return shorten(key) + " has no value; write a rate, or options such as {rate: 10mbit, each: host}"
	case slices.Contains(ruleKeys, key):
		return key + " has no value; write one, or remove it"
	case !slices.Contains(fileKeys, key) && what != "a device" && what != "devices":
		return fmt.Sprintf("%q has no value; put quotes around a text with a comma, or remove this", shorten(key))
	}
	return shorten(key) + " has no value; write {} for nothing"
}

// keys returns the entries of a mapping by key, which must be one of words.
func (r *notes) keys(n *node, what, example string, words []string) map[string]*entry {
	entries := r.entries(n, what, example)
	for i := range entries {
		switch key := &entries[i].key; {
		case slices.Contains(words, key.text):
		case isNetwork(key.text):
			r.errorf(key, "network %s is not in a direction; write it below egress or ingress of a device", key.text)
		case policy.IsMAC(key.text):
			r.errorf(key, "host %s is not in a direction; write it below egress or ingress of a device", shorten(key.text))
		default:
			r.errorf(key, "unknown key %q; %s", shorten(key.text), didYouMean(key.text, words))
		}
	}
	return r.named(entries, words)
}

// named returns the entries whose key is one of words, by key.
func (r *notes) named(entries []entry, words []string) map[string]*entry {
	given, seen := map[string]*entry{}, map[string]*node{}
	for i := range entries {
		key := &entries[i].key
		if slices.Contains(words, key.text) && !r.again(seen, key, key.text, key.text, "; merge the two") {
			given[key.text] = &entries[i]
		}
	}
	return given
}

// scalar returns the text of a value.
func (r *notes) scalar(n *node, what, example string) (string, bool) {
	switch n.kind {
	case odd:
		r.faults++
		return "", false
	case text:
		return n.text, true
	}
	r.errorf(n, "%s cannot be %s; write %s", what, n.describe(), example)
	return "", false
}
