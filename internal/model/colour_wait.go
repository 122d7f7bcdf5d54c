package model

import "github.com/shapectl/shapectl/pkg/policy"

// Until returns the time in ns until a packet (bytes below 2^PacketBits) that arrives with a colour would be green or, if
// it is asked for Yellow, no longer red, if no other packet arrives. It is false if the packet never will: it is larger
// than the burst size, or arrives with a worse colour.
func (l *Coloured) Until(s Levels, bytes uint64, in, better policy.Colour) (ns uint64, ever bool) {
	if !l.Aware {
		in = policy.Green
	}
	cost := bytes << UnitBits
	green, greenEver := l.First.Wait(s.First, bytes), in == policy.Green && cost <= l.First.Capacity
	yellow, yellowEver := uint64(0), in != policy.Red && cost <= l.Burst()
	if l.E(s)+cost > l.Burst() {
		second := l.Second
		second.Capacity = l.Burst() // with srtcm, E begins to drain when C is empty: then all that is left is its own
		yellow = second.Wait(s.Second, bytes)
	}
	switch {
	case l.Kind == policy.TRTCM && better == policy.Green:
		return max(green, yellow), greenEver && yellowEver
	case l.Kind == policy.TRTCM || better == policy.Yellow && !greenEver:
		return yellow, yellowEver
	case better == policy.Green || !yellowEver:
		return green, greenEver
	}
	return min(green, yellow), true
}

// Room returns how many packets of a size, arriving now one after the other, have room in the first bucket, and with trtcm
// in both, and how many in the second one. Packets of 0 bytes count as one unit.
func (l *Coloured) Room(s Levels, bytes uint64) (first, second uint64) {
	cost := max(bytes<<UnitBits, 1)
	room := func(level, capacity uint64) uint64 { return (capacity - min(level, capacity)) / cost }
	first, second = room(s.First, l.First.Capacity), room(l.E(s), l.Burst())
	if l.Kind == policy.TRTCM {
		first = min(first, second)
	}
	return first, second
}
