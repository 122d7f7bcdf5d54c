package observe

import (
	"testing"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Each kind of hook has programs that the verifier accepts.
func TestLoad(t *testing.T) {
	testenv.Root(t)
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		for _, m := range []policy.Match{policy.MatchSrc, policy.MatchDst} {
			for _, l2 := range []uint8{0, 14} {
				for _, of := range []names{rttPrograms, talkersPrograms} {
					o, err := newObjects(of, map[string]uint32{
						bpf.ObserveMapPrefixes: 16, bpf.ObserveMapRules: 16, bpf.ObserveMapHosts: 16, bpf.ObserveMapFlows: 16,
						bpf.ObserveMapTalkers: 16, bpf.ObserveMapBudget: 1, bpf.ObserveMapTotal: 1, bpf.ObserveMapSamples: 1 << 12,
					}, bpf.ObserveWatching{})
					testenv.Must(t, err)
					if _, err := o.pair(d, m, l2); err != nil {
						t.Errorf("%v %v %d: %+v", d, m, l2, err)
					}
					o.close()
				}
			}
		}
	}
}
