package explain

import (
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Colours are a rule with colours, and the levels of both buckets that a packet would meet.
type Colours struct {
	policy.Rule
	model.Levels
	Key     string
	Spilled bool
}

// ColoursFor are the levels that a packet of flow would meet now.
func ColoursFor(set *maps.Set, e maps.Entry, match policy.Match, flow maps.Flow) *Colours {
	s := set.Store.State(e, match, flow, maps.Now())
	return &Colours{e.Rule, model.Levels{First: s.Level, Second: s.Second}, maps.KeyName(e, match, flow), s.Spilled}
}

// Judge says which colour a packet gets that counts so many bytes and has a DSCP, and what happens to it if it may be
// marked. speedBits is the speed of the device; 0 if it is not known.
func (c *Colours) Judge(bytes uint64, dscp uint8, speedBits uint64) (report.Level, model.Verdict) {
	m := model.NewColoured(c.Rule)
	in := c.In(dscp)
	colour, _ := m.Decide(c.Levels, bytes, in)
	first, second := room(m, c.Levels, bytes)
	action := c.Colours.Action(colour)
	l := report.Level{
		Key: c.Key, Spilled: c.Spilled, LevelBytes: model.Bytes(c.First), CapacityBytes: c.Capacity, Queue: report.NewQueue(c.Rule),
		Penalty: c.Penalty.String(), Conforms: colour == policy.Green,
		EmptyNS: max(m.First.Drain(c.First), m.Second.Drain(c.Levels.Second)),
		Colouring: report.Colouring{
			Colour: colour.String(), ColourIn: in.String(), Action: action.String(), SecondRoomPackets: &second,
			SecondLevelBytes: new(model.Bytes(m.E(c.Levels))), SecondCapacityBytes: new(m.Burst() >> model.UnitBits),
			GreenInNS: until(m, c.Levels, bytes, in, policy.Green), YellowInNS: until(m, c.Levels, bytes, in, policy.Yellow),
			Peak: c.Algorithm == policy.TRTCM,
		},
	}
	if c.Colours.Aware {
		l.DSCP = policy.DSCPName(dscp)
	}
	if l.GreenInNS != nil {
		l.WaitNS = *l.GreenInNS
	}
	if l.Conforms {
		l.RoomPackets, l.AtOncePackets = first, first
		l.RoomBytes = (m.First.Capacity - min(c.First, m.First.Capacity)) >> model.UnitBits
	}
	if speedBits > 0 {
		l.SpeedBits = &speedBits
	}
	if l.Conforms && speedBits > 0 {
		l.FullNS = fullIn(l.RoomBytes, uint64(c.Rate), speedBits)
		l.RedFirst = second == 0         // nor has E room
		if c.Algorithm == policy.TRTCM { // P may be full first
			full := fullIn((m.Burst()-min(c.Levels.Second, m.Burst()))>>model.UnitBits, uint64(c.Colours.PIR), speedBits)
			if l.RedFirst = full != nil && *full < *l.FullNS; l.RedFirst {
				l.FullNS = full
			}
		}
	}
	return l, verdictOf(action)
}

// In is the colour with which a packet comes in.
func (c *Colours) In(dscp uint8) policy.Colour {
	if !c.Colours.Aware {
		return policy.Green
	}
	return c.Colours.In.Of(dscp)
}

// verdictOf is what an action does to a packet that may be marked.
func verdictOf(a policy.Action) model.Verdict {
	switch a {
	case policy.ActionDrop:
		return model.Drop
	case policy.ActionECN:
		return model.Mark
	}
	return model.Pass
}
