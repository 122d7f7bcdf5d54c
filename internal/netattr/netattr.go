// Package netattr reads attributes of netlink messages.
package netattr

import "github.com/vishvananda/netlink/nl"

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
