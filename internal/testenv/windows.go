package testenv

import "math/big"

// Windows are all windows of a trace, each from one packet to the same or a later one,
// inclusive. They compare the passed bytes with those that the rate allows, and only
// keep the extremes of all starts: a trace of n packets takes n steps, not n². A
// window may have a negative length if a clock steps back.
type Windows struct {
	net       big.Int // passed bytes less allowed bytes since the first packet, times scale
	low, high big.Int // net before the first packet of the extreme windows
	begun     bool
}

// scale makes all values integers: bits per second times ns are 1/8e9 bytes, and 2^-20
// byte, the unit of the meters, is a multiple of 1/256 of that.
const scale = 8e9 * 256

// Leak advances the time by ns, which may be negative, at a rate in bits per second.
func (w *Windows) Leak(rate uint64, ns int64) {
	leaked := new(big.Int).Mul(new(big.Int).SetUint64(rate), big.NewInt(ns))
	w.net.Sub(&w.net, leaked.Mul(leaked, big.NewInt(256)))
}

// Raise has windows that go on beyond an edit hold so many bytes more, or with a negative number fewer: what the capacity grew
// by is not room.
func (w *Windows) Raise(bytes int64) {
	raised := big.NewInt(bytes)
	w.net.Add(&w.net, raised.Mul(raised, big.NewInt(scale)))
}

// Packet adds the next packet and its passed bytes. Among the windows that end here, it
// returns the largest and the smallest difference of the passed bytes and the bytes
// that the rate allows, in millionths of a byte, rounded up. They may be negative.
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
