// Package livetest makes readings of rules that no kernel has, for tests.
package livetest

import (
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Place is where the rules of a table are in force.
func Place(t policy.Table) live.Place {
	return live.Place{Device: t.Device, Direction: t.Direction, Match: t.Match, InForce: true, Status: string(loader.Attached), Mode: loader.TCX, FullFrame: 1514}
}

// Scene has the rules of tables. A table of pools, which has no device, is the first one.
func Scene(tables ...policy.Table) *live.Scene {
	places, rules, id := make([]live.Place, len(tables)), make([][]maps.Entry, len(tables)), uint32(0)
	for i, t := range tables {
		places[i] = Place(t)
		for _, r := range t.Rules {
			rules[i] = append(rules[i], maps.Entry{ID: id, Rule: r})
			id++
		}
	}
	return live.NewScene(places, rules)
}

// Counted are the counts of a reading by what people call a rule or pool: its name, or else its network.
func Counted(of map[string]live.Counts) func(*live.Limit) live.Item {
	return func(l *live.Limit) live.Item {
		c, named := of[l.Label.Name]
		if !named {
			c = of[l.Network]
		}
		return live.Item{Limit: l, Counts: c}
	}
}
