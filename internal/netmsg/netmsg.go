// Package netmsg reads netlink replies: complete lists, and attributes of messages.
package netmsg

import (
	"errors"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
)

// listTries limits the requests for a list that keeps changing.
const listTries = 100

// List requests a list from the kernel, and repeats the request if the list has changed
// meanwhile. The error wraps netlink.ErrDumpInterrupted if it never stopped changing.
func List[T any](ask func() ([]T, error)) (all []T, err error) {
	for range listTries {
		if all, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

// Each calls f with the kind and value of each attribute in b, in order. It stops at
// the first error of f and returns it. Truncated attributes are an error, too.
func Each(b []byte, f func(kind uint16, value []byte) error) error {
	attributes, err := nl.ParseRouteAttr(b)
	if err != nil {
		return err
	}
	for _, a := range attributes {
		if err := f(a.Attr.Type&nl.NLA_TYPE_MASK, a.Value); err != nil {
			return err
		}
	}
	return nil
}
