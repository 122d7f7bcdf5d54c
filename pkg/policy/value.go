package policy

import (
	"fmt"
	"strconv"
)

// option completes an option whose type is L in a limit and R in a rule.
func option[L, R comparable, P interface {
	*L
	Value
}](in func(*Limit) P, of func(*Rule) *R, text func(R) string, o Option) *Option {
	return written(func(l *Limit) *L { return in(l) }, of, func(v *L) Value { return P(v) }, text, o)
}

// same completes an option that has the same type and value in a rule and its limit.
func same[T comparable, P interface {
	*T
	Value
}](in func(*Limit) P, of func(*Rule) P, o Option) *Option {
	o.copies(func(l *Limit, r *Rule) { *of(r) = *in(l) })
	return option(in, func(r *Rule) *T { return of(r) }, func(v T) string { return P(&v).String() }, o)
}

func (o *Option) copies(copies func(*Limit, *Rule)) {
	o.resolve = func(l *Limit, r *Rule) error {
		copies(l, r)
		return nil
	}
}

// written completes an option with its Value, for a type that is not one.
func written[L, R comparable](in func(*Limit) *L, of func(*Rule) *R, value func(*L) Value, text func(R) string, o Option) *Option {
	o.Value = func(l *Limit) Value { return value(in(l)) }
	o.Copy = func(to, from *Limit) { *in(to) = *in(from) }
	o.Text = func(r *Rule) string { return text(*of(r)) }
	o.Same = func(a, b *Rule) bool { return *of(a) == *of(b) }
	return &o
}

// size is a Capacity that an option calls what.
type size struct {
	*Capacity
	what string
}

func sizeOption(in func(*Limit) *Capacity, of func(*Rule) *uint64, o Option) *Option {
	return written(in, of, func(c *Capacity) Value { return size{c, o.Name} }, sizeText, o)
}

// Set parses a capacity; that of ebs may be 0.
func (s size) Set(text string) (err error) {
	if s.what == "ebs" && text == zeroText {
		*s.Capacity = zeroCapacity
		return nil
	}
	*s.Capacity, err = parseCapacity(s.what, text)
	return err
}

// words is a text in one line, which may be empty.
type words[T ~string] struct {
	at   *T
	what string
	most int
	kind string
}

// orNone reports whether none stands for an empty text: it names something else, in the file or in the store.
func (w words[T]) orNone() bool { return w.kind == "pool" || w.kind == "name" }

func textOption[T ~string](in func(*Limit) *T, of func(*Rule) *T, most int, kind string, o Option) *Option {
	also := o.check
	o.check = func(r *Rule) error {
		switch err := checkText(o.Name, string(*of(r)), most); {
		case err != nil:
			return err
		case *of(r) == none && (words[T]{kind: kind}).orNone():
			return fmt.Errorf("%s %q is no name; leave it out", o.Name, none)
		case also != nil:
			return also(r)
		}
		return nil
	}
	o.copies(func(l *Limit, r *Rule) { *of(r) = *in(l) })
	return written(in, of, func(v *T) Value { return words[T]{v, o.Name, most, kind} }, func(v T) string { return string(v) }, o)
}

func (w words[T]) Set(s string) error {
	if s == none && w.orNone() {
		s = ""
	}
	err := checkText(w.what, s, w.most)
	if err == nil {
		*w.at = T(s)
	}
	return err
}

func (w words[T]) String() string { return string(*w.at) }
func (w words[T]) Type() string   { return w.kind }

// number is a whole number.
type number[T ~uint16 | ~uint32] struct {
	at          *T
	text        func(T) string
	what        string
	least, most uint64
}

func numberOption[T ~uint16 | ~uint32](in func(*Limit) *T, of func(*Rule) *T, text func(T) string, least, most uint64, o Option) *Option {
	if o.resolve == nil {
		o.copies(func(l *Limit, r *Rule) { *of(r) = *in(l) })
	}
	return written(in, of, func(v *T) Value { return number[T]{v, text, o.Name, least, most} }, text, o)
}

func (n number[T]) Set(s string) error {
	v, err := strconv.ParseUint(s, 10, 64)
	if err != nil || v < n.least || v > n.most {
		return fmt.Errorf("%s %.64q is not a whole number from %d to %d; write one", n.what, s, n.least, n.most)
	}
	if strconv.FormatUint(v, 10) == n.text(0) { // the default
		v = 0
	}
	*n.at = T(v)
	return nil
}

func (n number[T]) String() string { return n.text(*n.at) }
func (n number[T]) Type() string   { return "number" }
