package testenv

import "math/big"

// Windows are all windows of a trace, each from one packet to the same or a
// later one, both included. They compare what passed with what the rate let
// through meanwhile, and remember only what any window can be begun with: a
// trace of n packets takes n steps, not n². A window may end at an earlier
// time than it began at, where a clock stepped back.
type Windows struct {
	net       big.Int // bytes passed less those let through, from the first packet on, times scale
	low, high big.Int // what net was before the packet that begins the extreme windows
	begun     bool
}

// Bits per second times ns are 8e9ths of a byte, and 2^-20 byte, a unit of the
// meters, is a whole number of 256ths of these.
const scale = 8e9 * 256

// Leak lets time pass, forwards or backwards, at a rate in bits per second.
func (w *Windows) Leak(rate uint64, ns int64) {
	leaked := new(big.Int).Mul(new(big.Int).SetUint64(rate), big.NewInt(ns))
	w.net.Sub(&w.net, leaked.Mul(leaked, big.NewInt(256)))
}

// Forgive takes a debt away, in units of 2^-20 byte: what a smaller capacity cuts off.
func (w *Windows) Forgive(units uint64) {
	forgiven := new(big.Int).SetUint64(units)
	w.net.Sub(&w.net, forgiven.Mul(forgiven, big.NewInt(scale>>20)))
}

// Packet is the next packet, of which so many bytes passed. It returns by how
// much more passed than the rate let through, in millionths of a byte and
// rounded up: in the window that ends here in which that is most, and in that
// in which it is least, which may be below zero.
func (w *Windows) Packet(passed uint64) (most, least int64) {
	if !w.begun || w.net.Cmp(&w.low) < 0 {
		w.low.Set(&w.net)
	}
	if !w.begun || w.net.Cmp(&w.high) > 0 {
		w.high.Set(&w.net)
	}
	w.begun = true
	bytes := new(big.Int).SetUint64(passed)
	w.net.Add(&w.net, bytes.Mul(bytes, big.NewInt(scale)))
	return millionths(new(big.Int).Sub(&w.net, &w.low)), millionths(new(big.Int).Sub(&w.net, &w.high))
}

func millionths(v *big.Int) int64 {
	return v.Neg(v.Div(v.Neg(v), big.NewInt(scale/1e6))).Int64()
}
