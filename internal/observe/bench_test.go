package observe

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// BenchmarkPackets is what a packet costs in each program, with the 22 ns of a test run.
func BenchmarkPackets(b *testing.B) {
	data := send(0, 100, full, 1).frame()
	bare := answer(0, 100, 1).frame()
	udp := testenv.Frame(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.1.2"), 1000)
	run := func(name string, p *ebpf.Program, frame []byte) {
		b.Run(name, func(b *testing.B) {
			_, each, err := p.Benchmark(frame, b.N, b.ResetTimer)
			testenv.Must(b, err)
			b.ReportMetric(float64(each.Nanoseconds()), "ns/packet")
		})
	}
	followed := newRig(b, Options{}, ruleOf("egress", "10.0.1.0/24"))
	followed.pass(policy.Egress, send(0, 50, 50, 1).tcp)
	for _, c := range []struct {
		name  string
		frame []byte
	}{{"data", data}, {"udp", udp}} {
		run("followed/before/"+c.name, followed.pairs[policy.Egress].before, c.frame)
		run("followed/behind/"+c.name, followed.pairs[policy.Egress].behind, c.frame)
	}
	run("followed/before/acknowledgement", followed.pairs[policy.Ingress].before, bare)
	rare := newRig(b, Options{OneIn: 1 << 16}, ruleOf("egress", "10.0.1.0/24"))
	run("not followed/before/data", rare.pairs[policy.Egress].before, data)
	run("not followed/behind/data", rare.pairs[policy.Egress].behind, data)
	for name, byFlow := range map[string]uint32{"hosts": 0, "flows": 1} {
		o, err := newObjects(talkersPrograms, map[string]uint32{
			bpf.ObserveMapPrefixes: 16, bpf.ObserveMapTalkers: maxTalkers, bpf.ObserveMapBudget: 1, bpf.ObserveMapTotal: 1,
		}, bpf.ObserveWatching{Most: [2]uint32{bpf.ObserveExpenseELEMENTS: 1000}, ByFlow: byFlow})
		testenv.Must(b, err)
		defer o.close()
		testenv.Must(b, o.maps[bpf.ObserveMapPrefixes].Put(prefixOf(deviceIndex, false, netip.MustParsePrefix("10.0.1.0/24")), uint32(0)))
		p, err := o.pair(policy.Egress, policy.MatchDst, 14)
		testenv.Must(b, err)
		run(name+"/before", p.before, data)
		run(name+"/behind", p.behind, data)
	}
}
