// Package netmsg reads what the kernel answers by netlink: whole lists, and attributes of messages.
package netmsg

import (
	"errors"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
)

// listTries bounds how often a list is asked for that changes meanwhile.
const listTries = 100

// List asks the kernel for a list, again where that changed before the kernel had told all
// of it. The error wraps netlink.ErrDumpInterrupted where it never stopped changing.
func List[T any](ask func() ([]T, error)) (all []T, err error) {
	for range listTries {
		if all, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

// Each calls f with the kind and value of each attribute in b, in their order,
// until f returns an error, which it returns. Attributes that break off are an error as well.
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
