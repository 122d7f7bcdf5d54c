package replay

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

var coloured = []policy.Algorithm{policy.SRTCM, policy.TRTCM, policy.RFC4115}

// colour gives a rule one of the meters with colours. The second rate is that of trtcm and rfc4115.
func colour(r *policy.Rule, a policy.Algorithm, second policy.Rate, burst uint64) {
	r.Algorithm = a
	c := &r.Colours
	c.Green, c.Yellow, c.Red = policy.ActionPass, policy.ActionPass, policy.ActionDrop
	switch a {
	case policy.SRTCM:
		c.EBS = burst
	case policy.TRTCM:
		c.PIR, c.PBS = second, burst
	case policy.RFC4115:
		c.EIR, c.EBS = second, burst
	}
}

// Both engines agree on random frames, on colours and DSCPs, too.
func TestColouredFrames(t *testing.T) {
	seed := testenv.Seed(t)
	actions := []policy.Action{policy.ActionPass, policy.ActionPass, policy.ActionECN, policy.ActionDrop, policy.SetDSCP(0), policy.SetDSCP(12), policy.SetDSCP(63)}
	for i, algorithm := range coloured {
		for j, each := range []policy.EachKind{policy.EachAll, policy.EachHost, policy.EachFlow} {
			t.Run(fmt.Sprintf("%v/each=%v", algorithm, policy.Each{Kind: each}), func(t *testing.T) {
				roll := rand.New(rand.NewPCG(seed, uint64(3*i+j)))
				l := bothFamilies(80000, 2000, each)
				for k := range l.Rules {
					r := &l.Rules[k]
					colour(r, algorithm, 100000+policy.Rate(roll.IntN(20000)), 2500+roll.Uint64N(1500))
					c := &r.Colours
					if c.Aware = (i+j+k)%2 == 0; c.Aware {
						c.In = policy.ColourMap{Yellow: roll.Uint64() & roll.Uint64()}
						c.In.Red = roll.Uint64() & roll.Uint64() &^ c.In.Yellow
					}
					if k == 1 {
						r.Framing = policy.Framing{Overhead: int16(roll.IntN(120) - 64), MPU: uint16(roll.IntN(2) * 84)}
						for _, a := range []*policy.Action{&c.Green, &c.Yellow, &c.Red} {
							*a = actions[roll.IntN(len(actions))]
						}
					}
				}
				e, now := newBoth(t, l), uint64(time.Hour)
				colours := map[policy.Colour]int{}
				for range 1200 {
					p := randomFrame(roll)
					if roll.IntN(2) == 0 { // enough packets of one key
						p = at(0, typeIPv4, ip4("10.0.0.1", "10.0.0.2", 17, byte(roll.Uint32()), ports(5000, 53, 20+roll.IntN(700))...))
					}
					now += roll.Uint64N(uint64(10 * time.Millisecond))
					switch roll.IntN(100) {
					case 0:
						p.Bytes += roll.Uint64N(200_000) // also as several segments
					case 1, 2:
						now += uint64(time.Second) // tokens for E
					}
					p.Time = now - roll.Uint64N(1000)
					r, err := e.Offer(p)
					if err != nil {
						t.Fatalf("%+v: EtherType %#x, %x, %d bytes: %v", l.Rules, p.EtherType, p.Network, p.Bytes, err)
					}
					if r.Rule != NoRule {
						colours[r.Colour]++
					}
				}
				if colours[policy.Green] < 20 || colours[policy.Yellow] < 20 || colours[policy.Red] < 20 {
					t.Errorf("too few packets of a colour with %+v: %v", l.Rules, colours)
				}
			})
		}
	}
}

// Each colour and level was computed by hand from the text of the RFC. The CIR is 1000 bytes/s and the CBS 2000 bytes.
func TestColoursByHand(t *testing.T) {
	for _, c := range []struct {
		algorithm     policy.Algorithm
		second        policy.Rate
		burst         uint64
		aware         bool
		packets, want string // want: colour, and levels of C and of E or P, in bytes
	}{
		// RFC 2697: E gets the tokens for which C has no room.
		{policy.SRTCM, 0, 1500, false,
			"0,1500,0 0,1000,0 0,1000,0 0,500,0 1000000000,600,0 3000000000,2001,0 4000000000,1600,0",
			"green 1500 0, yellow 1500 1000, red 1500 1000, green 2000 1000, green 1600 1000, red 0 600, green 1600 0"},
		{policy.SRTCM, 0, 1500, true,
			"0,1000,AF12 0,1000,AF13 0,600,AF12 0,600,AF11 700000000,600,AF32",
			"yellow 0 1000, red 0 1000, red 0 1000, green 600 1000, yellow 0 1500"},
		// RFC 2698: green packets take tokens of both buckets.
		{policy.TRTCM, 16000, 3000, false,
			"0,1500,0 0,1000,0 0,600,0 0,500,0 500000000,700,0 500000000,400,0 500000000,300,0 2500000000,2500,0",
			"green 1500 1500, yellow 1500 2500, red 1500 2500, green 2000 3000, yellow 1500 2700, red 1500 2700, green 1800 3000, yellow 0 2500"},
		{policy.TRTCM, 16000, 3000, true,
			"0,1000,AF12 0,1000,AF13 0,1000,AF11 0,1000,AF22 1000000000,2000,EF",
			"yellow 0 1000, red 0 1000, green 1000 2000, yellow 1000 3000, green 2000 3000"},
		// RFC 4115: the buckets do not depend on each other.
		{policy.RFC4115, 4000, 1500, false,
			"0,1500,0 0,1000,0 0,1000,0 0,500,0 1000000000,1200,0 1000000000,1000,0 1000000000,1000,0 3000000000,2500,0 3000000000,900,0",
			"green 1500 0, yellow 1500 1000, red 1500 1000, green 2000 1000, red 1000 500, green 2000 500, yellow 2000 1500, red 0 500, green 900 500"},
		{policy.RFC4115, 4000, 1500, true,
			"0,1000,AF12 0,1000,AF13 0,1000,AF12 0,2000,0 1000000000,1000,AF42",
			"yellow 0 1000, red 0 1000, red 0 1000, green 2000 1000, yellow 1000 1500"},
	} {
		t.Run(fmt.Sprintf("%v/aware=%v", c.algorithm, c.aware), func(t *testing.T) {
			rule := everything(8000, 2000)
			colour(&rule, c.algorithm, c.second, c.burst)
			if rule.Colours.Aware = c.aware; c.aware {
				rule.Colours.In = policy.DefaultColours
			}
			l := Limits{Rules: []policy.Rule{rule}}
			var got []string
			sum, most := NewSummary(l), uint64(0)
			for _, r := range offer(t, newBoth(t, l), "time_ns,bytes,dscp\n"+strings.ReplaceAll(c.packets, " ", "\n")) {
				got = append(got, fmt.Sprintf("%v %d %d", r.Colour, r.LevelBytes(), r.SecondBytes()))
				if r.Excess != (r.Colour != policy.Green) || (r.Verdict == model.Drop) != (r.Colour == policy.Red) || (r.RefusedBy != "") != (r.Colour == policy.Red) {
					t.Errorf("%+v", r)
				}
				sum.Add(r)
				most = max(most, r.SecondBytes())
			}
			if s := strings.Join(got, ", "); s != c.want {
				t.Errorf("%s, want\n%s", s, c.want)
			}
			f := sum.Sum()
			for i, n := range []struct{ packets, bytes uint64 }{{f.GreenPackets, f.GreenBytes}, {f.YellowPackets, f.YellowBytes}, {f.RedPackets, f.RedBytes}} {
				if name := policy.Colour(i).String(); n.packets != uint64(strings.Count(c.want, name)) || n.bytes == 0 {
					t.Errorf("%+v packets are %s", n, name)
				}
			}
			if f.LosslessCapacityBytes != nil || f.HighestSecondLevelBytes != most || f.ExcessPackets != f.YellowPackets+f.RedPackets {
				t.Errorf("%+v", f)
			}
		})
	}
}

// docs/colours.md maps flows of MEF 10.4 with one rate to srtcm with an EBS of 0, colour-aware: without an excess rate
// nothing is yellow, and without a committed one all that passes leaves yellow.
func TestMEFWithOneRate(t *testing.T) {
	rule := everything(8000, 2000)
	colour(&rule, policy.SRTCM, 0, 0)
	rule.Colours.Aware, rule.Colours.In = true, policy.DefaultColours
	excess := rule
	excess.Colours.In, excess.Colours.Green = policy.ColourMap{Red: 1 << 14}, policy.SetDSCP(12)
	for _, c := range []struct {
		rule policy.Rule
		want string // of each packet: verdict and DSCP
	}{
		{rule, "pass 10, drop 0, drop 0, pass 46, drop 0"},
		{excess, "pass 12, pass 12, drop 0, drop 0, drop 0"},
	} {
		var got []string
		for _, r := range offer(t, newBoth(t, Limits{Rules: []policy.Rule{c.rule}}), "time_ns,bytes,dscp\n0,1000,AF11\n0,1000,AF12\n0,1000,AF13\n0,1000,EF\n0,1,AF11") {
			got = append(got, fmt.Sprintf("%v %d", r.Verdict, r.DSCP))
		}
		if s := strings.Join(got, ", "); s != c.want {
			t.Errorf("%+v: %s, want %s", c.rule.Colours, s, c.want)
		}
	}
}

// An action decides the verdict and the DSCP of its colour, with both families.
func TestActions(t *testing.T) {
	for _, c := range []struct {
		green, yellow, red policy.Action
		want               string // of a green, a yellow and a red packet: verdict and DSCP
	}{
		{policy.ActionPass, policy.ActionPass, policy.ActionDrop, "pass 10, pass 46, drop 0"},
		{policy.SetDSCP(10), policy.SetDSCP(12), policy.SetDSCP(14), "pass 10, pass 12, pass 14"},
		{policy.SetDSCP(0), policy.ActionECN, policy.ActionECN, "pass 0, mark 46, drop 0"},
		{policy.ActionDrop, policy.ActionDrop, policy.ActionPass, "drop 0, drop 0, pass 63"},
		{policy.ActionECN, policy.SetDSCP(63), policy.SetDSCP(63), "drop 0, pass 63, pass 63"},
	} {
		rule := everything(8000, 100)
		colour(&rule, policy.RFC4115, 8000, 100)
		rule.Colours.Green, rule.Colours.Yellow, rule.Colours.Red = c.green, c.yellow, c.red
		six := rule
		six.Prefix = prefix("::/0")
		e := newBoth(t, Limits{Rules: []policy.Rule{rule, six}})
		for kind, packet := range map[uint16]func(class byte) []byte{
			typeIPv4: func(class byte) []byte { return ip4("192.0.2.1", "10.0.0.1", 17, class, make([]byte, 60)...) },
			typeIPv6: func(class byte) []byte { return ip6("2001:db8::1", "2001:db8::2", 17, class, make([]byte, 40)...) },
		} {
			var got []string
			for _, class := range []byte{10 << 2, 46<<2 | 1, 63 << 2} { // only the second one allows ECN
				r, err := e.Offer(at(0, kind, packet(class)))
				testenv.Must(t, err)
				got = append(got, fmt.Sprintf("%v %d", r.Verdict, r.DSCP))
			}
			if s := strings.Join(got, ", "); s != c.want {
				t.Errorf("%+v, EtherType %#x: %s, want %s", rule.Colours, kind, s, c.want)
			}
		}
	}
}

// Keys without a slot share the two spill buckets of the rule, and the kernel says so.
func TestColoursWithFullTable(t *testing.T) {
	testenv.Root(t)
	l := bothFamilies(8000, 2000, policy.EachHost)
	for i := range l.Rules {
		colour(&l.Rules[i], policy.TRTCM, 16000, 3000)
	}
	k, err := newKernel(l, 4)
	testenv.Must(t, err)
	defer k.Close()
	for i, want := range []string{"1034 1034", "1034 1034", "1034 1034", "1034 2068"} {
		r, err := k.Offer(at(uint64(i), typeIPv4, ip4("192.0.2.1", fmt.Sprintf("10.0.0.%d", i), 17, 0, make([]byte, 1000)...)))
		testenv.Must(t, err)
		if got := fmt.Sprint(r.LevelBytes(), r.SecondBytes()); r.Spilled != (i >= 2) || got != want || (r.Colour == policy.Yellow) != (i == 3) {
			t.Errorf("packet %d: %+v, levels %s", i, r, got)
		}
	}
}

// Pairs of drained buckets are removed, without an effect on any colour.
func TestDrainedPairsAreRemoved(t *testing.T) {
	l := bothFamilies(1_000_000, 3000, policy.EachHost)
	colour(&l.Rules[0], policy.RFC4115, 1_000_000, 3000)
	l.Rules[0].Colours.Aware, l.Rules[0].Colours.In = true, policy.DefaultColours
	m, alone := NewModel(l), NewModel(l)
	network := ip4("192.0.2.1", "10.0.0.0", 17, 0, make([]byte, 986)...)
	colours := map[policy.Colour]int{}
	for i := range 4 * firstSweep {
		host := i + 1
		network[1] = 0
		if i%4 == 3 { // a host that is always above its EIR, and never uses C
			host, network[1] = 0, 12<<2
		}
		network[17], network[18], network[19] = byte(host>>16), byte(host>>8), byte(host)
		p := at(uint64(i)*20_000, typeIPv4, network)
		r, err := m.Offer(p)
		testenv.Must(t, err)
		if network[1] == 0 {
			continue
		}
		want, err := alone.Offer(p)
		testenv.Must(t, err)
		if colours[r.Colour]++; r != want {
			t.Fatalf("packet %d: %+v; without other hosts %+v", i, r, want)
		}
	}
	if len(m.pairs.of) > firstSweep+1 || len(colours) != 2 {
		t.Errorf("%d pairs were kept; %v packets by colour", len(m.pairs.of), colours)
	}
}
