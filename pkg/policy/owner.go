package policy

import (
	"fmt"
	"strings"
)

// An Owner is the device that a pool belongs to, and what of it. A pool goes with its device. The zero Owner is none.
type Owner struct {
	Device    string
	Whole     bool      // the pool is of both directions,
	Direction Direction // or of this one,
	Host      string    // or there of the host that is called so; "" for none
}

// String is such as "tap7", "tap7 egress" or "tap7 egress alice".
func (o Owner) String() string {
	s := o.Device
	if !o.Whole && s != "" {
		s += " " + o.Direction.String()
	}
	if o.Host != "" {
		s += " " + o.Host
	}
	return s
}

// Set parses what String prints.
func (o *Owner) Set(s string) error {
	if err := checkText("owner", s, 2*MaxName); err != nil {
		return err
	}
	device, rest, part := strings.Cut(s, " ")
	owner := Owner{Device: device, Whole: !part && s != ""}
	if direction, host, _ := strings.Cut(rest, " "); part {
		if owner.Host = host; device == "" || owner.Direction.Set(direction) != nil {
			return fmt.Errorf("owner %.64q is no device with its direction; write it such as tap7, tap7 egress or tap7 egress alice", s)
		}
	}
	*o = owner
	return nil
}

func (o Owner) Type() string { return "owner" }
