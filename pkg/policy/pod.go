package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

const (
	CNINote       = "cni "                 // begins the notes of what shapectl-cni makes
	NamespaceNote = "kubernetes namespace" // is that of the pools of namespaces, which shapectl-kubernetes makes

	annotatedMark = "annotated "
)

// PodDirections are the directions of the host's end of a pod's veth pair, in the words of annotations.
var PodDirections = map[Direction]string{Egress: "ingress", Ingress: "egress"}

// PodVerbs are what a pod does in the directions of the host's end of its veth pair.
var PodVerbs = map[Direction]string{Egress: "receives", Ingress: "sends"}

// PodPool is the name of the pool of a pod in a direction of its interface, such as "shop/web-1 receives".
func PodPool(pod, device string, d Direction) string {
	end := " " + PodVerbs[d]
	if device != "eth0" {
		end = " " + device + end
	}
	return shorten(pod, MaxName-len(end)) + end
}

// ShortName is a text as a name. One that is too long ends with a hash, so that it stays another one than others.
func ShortName(s string) string { return shorten(s, MaxName) }

func shorten(s string, most int) string {
	if len(s) <= most {
		return s
	}
	end := fmt.Sprintf("~%.6x", sha256.Sum256([]byte(s)))
	return strings.ToValidUTF8(s[:most-len(end)], "") + end
}

// NamespacePool is the name of the pool of a namespace in Kubernetes, in a direction in the words of annotations. Networks may have
// pools for their pods, so there is one within each of these.
func NamespacePool(namespace, direction string, within Within) string {
	name := "namespace " + namespace + " " + direction
	if within != "" {
		name += " within " + string(within)
	}
	return ShortName(name)
}

// PodNote is the note of a pool of a pod. It has what the network gives the pod, for when its annotation changes, and whether there
// is one. The last result is false if it is too long to have more than the rate.
func PodNote(pod string, network Draft, annotated bool) (note string, whole bool) {
	options := map[string]string{}
	for _, o := range network.Given() {
		if o.Name != "within" { // which is in the pool itself
			options[o.Name] = o.Value(&network.Limit).String()
		}
	}
	mark := ""
	if annotated {
		mark = annotatedMark
	}
	text, _ := json.Marshal(options)
	if whole = len(pod)+1+len(annotatedMark)+len(text) <= MaxNote; !whole {
		text, _ = json.Marshal(map[string]string{"rate": options["rate"]})
	}
	return pod + " " + mark + string(text), whole
}

// CutPodNote returns the parts of a note that PodNote made. Of the note of a rule, it returns the first part.
func CutPodNote(note string) (pod string, network Draft, annotated bool) {
	words := strings.SplitN(note, " ", 5) // "cni", the network, the container, the interface
	if len(words) < 5 {
		return note, network, false
	}
	text, annotated := strings.CutPrefix(words[4], annotatedMark)
	var options map[string]string
	if json.Unmarshal([]byte(text), &options) == nil {
		_ = network.GiveAll(options, func(*Option) bool { return true })
	}
	return strings.Join(words[:4], " "), network, annotated
}

// OnNetwork returns the draft of a pool of a pod: what its annotation says, over what its network gives as far as its rate allows.
func (d Draft) OnNetwork(network Draft) Draft {
	if len(d.Given()) > 0 {
		network = network.As(Usual)
	}
	d = d.Over(network)
	if d.Rate == 0 || d.Rate == Unlimited {
		d.Rate = MaxRate // only the pools above limit it
	}
	usual := func(name string) bool { return d.from[FindOption(name).index] == Usual }
	if usual("guarantee") {
		d.Guarantee = min(d.Guarantee, Guarantee(d.Rate))
	}
	for name, size := range map[string]*Capacity{"capacity": &d.Capacity, "queue": &d.Queue} {
		if usual(name) && size.duration > 0 && bytesIn(size.duration, d.Rate) < MinCapacity {
			*size = Capacity{bytes: MinCapacity}
		}
	}
	return d
}

// OfPods reports whether shapectl-cni or shapectl-kubernetes made a rule or pool.
func (r *Rule) OfPods() bool {
	return strings.HasPrefix(r.Label.Note, CNINote) || r.Label.Note == NamespaceNote
}

// PodTables are the rules and pools in tables that are of pods, or all others, with the pools that they draw from.
func PodTables(tables []Table, ofPods bool) (some []Table) {
	var picked []Rule
	pools, needed := map[Within]Rule{}, map[Rule]bool{}
	for _, t := range tables {
		for _, r := range t.Rules {
			if r.Pool {
				pools[Within(r.Label.Name)] = r
			}
			if r.OfPods() == ofPods {
				picked = append(picked, r)
			}
		}
	}
	for _, p := range Above(picked, func(name Within) (Rule, bool) { p, found := pools[name]; return p, found }) {
		needed[p] = true
	}
	for _, t := range tables {
		t.Rules = slices.DeleteFunc(slices.Clone(t.Rules), func(r Rule) bool { return r.OfPods() != ofPods && !needed[r] })
		if len(t.Rules) > 0 {
			some = append(some, t)
		}
	}
	return some
}

// BesidePods are tables of a policy, with the rules and pools of pods that are there on other devices and with other names.
func BesidePods(policy, there []Table) (all []Table) {
	for pods, own := range Pairs(PodTables(there, true), policy, compareTables) {
		switch {
		case own == nil:
			own = pods
		case pods != nil && own.IsPools():
			both := Table{}
			for p, o := range Pairs(pods.Rules, own.Rules, compareRules) {
				both.Rules = append(both.Rules, *cmp.Or(o, p))
			}
			if len(both.Rules) > len(own.Rules) { // else a caller may expect changes in its own
				own = &both
			}
		}
		all = append(all, *own)
	}
	return all
}
