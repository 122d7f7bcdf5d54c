package maps

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A slot that a killed process has locked is free again, and others stay as they are.
func TestUnlock(t *testing.T) {
	testenv.Root(t)
	hook := bpf.AbiHook{}
	for i := range hook.Secret {
		hook.Secret[i] = rand.Uint32()
	}
	store, err := New(Size{Rules: 16, Buckets: 1 << 8, Also: true}, hook)
	testenv.Must(t, err)
	defer store.Close()
	key := func(host byte) bpf.AbiKey {
		a := netip.AddrFrom4([4]byte{10, 0, 0, host})
		return makeKey(1, policy.Each{Kind: policy.EachHost}, policy.MatchSrc, Flow{Src: a, Dst: a})
	}
	for host := range byte(2) {
		store.allocateSlot(key(host), 0, model.Bucket{TAT: 1 << 20, Tick: 1}, 1e9)
	}
	locked, _ := store.slotOf(key(0))
	store.slot(locked).Tat |= tatBusy
	store.Unlock()
	if n, has := store.slotOf(key(0)); has || store.slot(locked).Tat != 0 {
		t.Errorf("slot %d still has a key, %+v", n, store.slot(locked))
	}
	if n, has := store.slotOf(key(1)); !has || store.slot(n).Tat != 1<<20 {
		t.Error("another key has lost its slot")
	}
}
