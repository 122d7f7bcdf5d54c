package explain

import (
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// judgeColours says which colour a packet gets that counts so many bytes and has a DSCP, and what happens to it if it may be
// marked.
func judgeColours(r policy.Rule, b Bucket, bytes uint64, dscp uint8) (report.Level, model.Verdict) {
	m, levels, in := model.NewColoured(r), model.Levels{First: b.Level, Second: b.Second}, policy.Green
	if r.Colours.Aware {
		in = r.Colours.In.Of(dscp)
	}
	colour, _ := m.Decide(levels, bytes, in)
	first := room(m, levels, bytes)
	action := r.Colours.Action(colour)
	l := report.Level{
		Key: b.Key, Spilled: b.Spilled, LevelBytes: model.Bytes(b.Level), CapacityBytes: r.Capacity, HoldsBytes: r.Capacity,
		Conforms: colour == policy.Green,
		EmptyNS:  max(m.First.Drain(levels.First), m.Second.Drain(levels.Second)),
		Colouring: report.Colouring{
			Colour: colour.String(), ColourIn: in.String(), Action: action.String(),
			SecondLevelBytes: new(model.Bytes(m.E(levels))), SecondCapacityBytes: new(m.Burst() >> model.UnitBits),
			GreenInNS: until(m, levels, bytes, in), Peak: r.Algorithm == policy.TRTCM,
		},
	}
	if r.Colours.Aware {
		l.DSCP = policy.DSCPName(dscp)
	}
	if l.GreenInNS != nil {
		l.WaitNS = *l.GreenInNS
	}
	if l.Conforms {
		l.RoomPackets = first
		l.RoomBytes = (m.First.Capacity - min(levels.First, m.First.Capacity)) >> model.UnitBits
	}
	return l, verdictOf(action)
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
