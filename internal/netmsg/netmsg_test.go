package netmsg

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func TestEach(t *testing.T) {
	b := slices.Concat(nl.NewRtAttr(3, []byte("odd")).Serialize(), nl.NewRtAttr(1|unix.NLA_F_NESTED, nil).Serialize(),
		nl.NewRtAttr(3, []byte{4}).Serialize())
	var kinds []uint16
	var values []byte
	collect := func(kind uint16, value []byte) error {
		kinds, values = append(kinds, kind), append(values, value...)
		return nil
	}
	if err := Each(b, collect); err != nil || !slices.Equal(kinds, []uint16{3, 1, 3}) || !bytes.Equal(values, []byte("odd\x04")) {
		t.Errorf("%v of %q, %v", kinds, values, err)
	}
	enough := errors.New("enough")
	calls := 0
	if err := Each(b, func(uint16, []byte) error { calls++; return enough }); err != enough || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
	if err := Each(b[:len(b)-4], collect); err == nil {
		t.Error("a truncated attribute is no error")
	}
	if err := Each(nil, collect); err != nil {
		t.Error(err)
	}
}
