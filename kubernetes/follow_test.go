package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	listers "k8s.io/client-go/listers/core/v1"
	ktesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/yaml"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

type annotations map[string]string

// A rig is a node: devices of pods in a network namespace, with the limits that shapectl-cni gives them, and what an informer knows.
type rig struct {
	*testing.T
	follower
	host              *testenv.Netns
	podStore, nsStore cache.Indexer
	log               bytes.Buffer
}

func newRig(t *testing.T) *rig {
	r := &rig{T: t, host: testenv.NewNetns(t)}
	r.podStore = cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	r.nsStore = cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	r.follower = follower{
		node: "here", options: loader.Options{BPFFS: testenv.BPFFS(t)}, telling: map[string]string{}, events: record.NewFakeRecorder(100),
		pods: listers.NewPodLister(r.podStore), namespaces: listers.NewNamespaceLister(r.nsStore),
	}
	log.SetOutput(&r.log)
	log.SetFlags(0)
	return r
}

// start does what shapectl-cni does for a pod in both directions.
func (r *rig) start(device, rules string, rate policy.Rate, within policy.Within) {
	r.Helper()
	r.startIn(map[string]string{"rate": rate.String()}, device, rules, within)
}

func (r *rig) startIn(options map[string]string, device, rules string, within policy.Within) {
	r.Helper()
	var network policy.Draft
	testenv.Must(r, network.GiveAll(options, func(*policy.Option) bool { return true }))
	testenv.Veth(r, device, device+"p")
	n, err := loader.WriteFirst(r.options)
	testenv.Must(r, err)
	defer n.Close()
	var tables []policy.Table
	var pools []policy.Rule
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		owner, note := policy.Owner{Device: device, Direction: d}, "cni net "+device+" eth0"
		limit := policy.Draft{}.OnNetwork(network)
		limit.Within, limit.Owner = within, owner
		limit.Note, _ = policy.PodNote(note, network, false)
		pool, err := limit.Pool(owner.String())
		testenv.Must(r, err)
		pools = append(pools, pool)
		t := policy.Table{Device: device, Direction: d, Match: d.FarSide()}
		for _, everything := range policy.Everything {
			rule, err := policy.Limit{Within: policy.Within(owner.String()), Name: rules, Note: note}.Rule(everything)
			testenv.Must(r, err)
			t.Rules = append(t.Rules, rule)
		}
		tables = append(tables, t)
	}
	policy.SortRules(pools)
	_, err = n.ApplyNew(append(tables, policy.Table{Rules: pools}), nil, nil)
	testenv.Must(r, err)
}

func pod(namespace, name string, a annotations) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: a},
		Spec:       corev1.PodSpec{NodeName: "here"}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

func (r *rig) pod(p *corev1.Pod)                    { r.podStore.Update(p) }
func (r *rig) namespace(name string, a annotations) { r.nsStore.Update(namespace(name, a)) }

func namespace(name string, a annotations) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: a}}
}

// pools are all pools as sentences, but for the default parts, by name.
func (r *rig) pools() map[string]string {
	r.Helper()
	n, err := loader.Read(r.options)
	testenv.Must(r, err)
	defer n.Close()
	pools, all := n.Pools(), map[string]string{}
	defer pools.Close()
	for _, p := range pools.Rules() {
		all[p.Label.Name], _, _ = strings.Cut(p.Gets(), ";")
	}
	return all
}

// expect syncs, and checks the pools of names, each with a part of its sentence, and all that is logged.
func (r *rig) expect(logged string, want ...string) {
	r.Helper()
	r.log.Reset()
	testenv.Must(r, r.sync())
	if got := r.log.String(); !strings.Contains(got, logged) {
		r.Errorf("logged %q, want %q", got, logged)
	}
	lines := strings.Split(r.log.String(), "\n")
	slices.Sort(lines)
	if once := slices.Compact(slices.Clone(lines)); len(once) < len(lines) {
		r.Errorf("logged something twice: %q", lines)
	}
	pools := r.pools()
	for _, line := range want {
		name, part, _ := strings.Cut(line, ": ")
		if got, found := pools[name]; !strings.Contains(got, part) || found == (part == "none") && part != "" {
			if part != "none" || found {
				r.Errorf("%s: %q, want %q", name, got, part)
			}
		}
	}
	r.log.Reset()
	if testenv.Must(r, r.sync()); r.log.Len() > 0 {
		r.Errorf("a second look changed or told something: %s", &r.log)
	}
}

func TestAnnotations(t *testing.T) {
	const only, shadow = "rate, capacity, algorithm, excess, queue, ecn-above, order, guarantee, weight, share, nat", ", pps, pps-burst, new-flows, new-flows-burst, quota, then, grace, quota-zone or shadow"
	for _, test := range []struct {
		a         annotations
		namespace bool
		want      string
	}{
		{annotations{}, false, "nothing"},
		{annotations{"kubernetes.io/egress-bandwidth": "10M"}, false, "10mbit"},
		{annotations{"kubernetes.io/egress-bandwidth": "10M"}, true, "nothing"},
		{annotations{"kubernetes.io/egress-bandwidth": "1k"}, false, "kubernetes.io/egress-bandwidth 1k is not in 8k to 400G bits per second; the pod gets 8kbit"},
		{annotations{"kubernetes.io/egress-bandwidth": "1e30"}, false, "kubernetes.io/egress-bandwidth 1e30 is not in 8k to 400G bits per second; the pod gets 400gbit"},
		{annotations{"kubernetes.io/egress-bandwidth": "10", "shapectl.dev/egress": "1mbit"}, false, "1mbit"},
		{annotations{"kubernetes.io/egress-bandwidth": "10M", "shapectl.dev/egress": "{share: flow}"}, false, "10mbit"},
		{annotations{"kubernetes.io/egress-bandwidth": "10M", "shapectl.dev/egress": " 5mbit"}, false, "5mbit"},
		{annotations{"shapectl.dev/egress": "rate: 5mbit\nweight: 2"}, false, "5mbit"},
		{annotations{"shapectl.dev/egress": "unlimited"}, false, "400gbit"},
		{annotations{"shapectl.dev/egress": "{weight: 2}"}, false, "400gbit"},
		{annotations{"shapectl.dev/egress": "{rate: 1gbit, cluster-safe: 1mbit}"}, true, "1gbit"},
		{annotations{"kubernetes.io/egress-bandwidth": "fast"}, false, `kubernetes.io/egress-bandwidth "fast" is not a rate; write bits per second, such as 10M`},
		{annotations{"shapectl.dev/egress": "fast"}, false, `shapectl.dev/egress: rate "fast" does not start with a digit; write one such as 10mbit`},
		{annotations{"shapectl.dev/egress": "{rate: "}, false, `shapectl.dev/egress "{rate: " is not valid; write a rate such as 10mbit, or options such as {rate: 10mbit, share: flow}`},
		{annotations{"shapectl.dev/egress": "{rate: 1mbit, cir: 2mbit}"}, false, "shapectl.dev/egress: rate is given twice; remove one of them"},
		{annotations{"shapectl.dev/egress": "rate: 1mbit\n---\nrate: 2mbit"}, false, `shapectl.dev/egress "rate: 1mbit\n---\nrate: 2mbit" is not valid; write a rate such as 10mbit, or options such as {rate: 10mbit, share: flow}`},
		{annotations{"shapectl.dev/egress": "{colour: red}"}, false, `shapectl.dev/egress: "colour" is not possible here; use ` + only + shadow},
		{annotations{"shapectl.dev/egress": "{shadow: rte=1mbit}"}, false, `shapectl.dev/egress: shadow "rte=1mbit": a shadow has no rte of its own; use rate, capacity, each, penalty, pir, pbs, eir, ebs, overhead or mpu`},
		{annotations{"shapectl.dev/egress": "{within: other}"}, false, `shapectl.dev/egress: "within" is not possible here; use ` + only + shadow},
		{annotations{"shapectl.dev/egress": "{cluster-safe: 1mbit}"}, false, `shapectl.dev/egress: "cluster-safe" is not possible here; use ` + only + shadow},
		{annotations{"shapectl.dev/egress": "{cluster: other}"}, true, `shapectl.dev/egress: "cluster" is not possible here; use ` + only + ", cluster-weight, cluster-floor, cluster-share, cluster-safe" + shadow},
		{annotations{"shapectl.dev/egress": "{note: cni net x eth0}"}, false, `shapectl.dev/egress: "note" is not possible here; use ` + only + shadow},
	} {
		l, notice, err := limitOf(test.a, "egress", test.namespace)
		got := "nothing"
		if l != nil {
			d := l.OnNetwork(policy.Draft{})
			got = d.Rate.String()
		}
		if err := cmp.Or(err, notice); err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%v: %s, want %s", test.a, got, test.want)
		}
	}
}

// A fake API server: the annotation of a pod changes, and then the rate of its rule. There is a pod of that name on another node.
func TestFollow(t *testing.T) {
	r := newRig(t)
	client := fake.NewClientset(namespace("shop", annotations{"shapectl.dev/egress": "50mbit"}), pod("shop", "web", nil))
	ctx, stop := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	var sends []string
	go func() {
		defer stop()
		for _, rate := range []string{"", "10M", "20M"} {
			web := pod("shop", "web", annotations{"kubernetes.io/ingress-bandwidth": rate})
			if rate == "" { // shapectl-cni limits a pod that waits for its first container
				time.Sleep(3 * between / 2)
				r.host.Do(func() error { r.start("va", "shop/web", policy.MaxRate, ""); return nil })
				web.Annotations, web.Status.PodIP = nil, "10.0.0.1"
			}
			if _, err := client.CoreV1().Pods("shop").Update(ctx, web, metav1.UpdateOptions{}); err != nil {
				failed <- err
				return
			}
			time.Sleep(2 * between)
			r.host.Do(func() error { sends = append(sends, r.pools()["va ingress"]); return nil })
		}
		failed <- nil
	}()
	var once sync.Once
	client.PrependReactor("list", "namespaces", func(ktesting.Action) (refused bool, _ runtime.Object, _ error) {
		once.Do(func() { refused = true })
		return refused, nil, errors.New("refused")
	})
	testenv.Must(t, r.run(ctx, client))
	testenv.Must(t, <-failed)
	if got := r.log.String(); !strings.HasPrefix(got, "cannot reach Kubernetes yet: refused\n") || !strings.Contains(got, "shop/web receives: 10mbit") || !strings.Contains(got, "shop/web receives: 20mbit") {
		t.Errorf("logged %s", got)
	}
	if got := r.pools()["va egress"]; !strings.HasPrefix(got, "20mbit") {
		t.Errorf("the pod receives %s", got)
	}
	if !strings.Contains(sends[0], "within pool") {
		t.Errorf("the pod sends %s", sends[0])
	}
}

func TestPod(t *testing.T) {
	r := newRig(t)
	r.namespace("shop", nil)
	web := func(a annotations) { r.pod(pod("shop", "web", a)) }
	r.start("va", "shop/web", 100e6, "")
	web(nil)
	r.expect("", "va egress: 100mbit")
	web(annotations{"shapectl.dev/ingress": "{rate: 30mbit, share: flow}"})
	r.expect("shop/web receives: 30mbit", "va egress: 30mbit (3.75 MB/s), burst 1.125 MB (300 ms), shared fairly by its flows", "va ingress: 100mbit")
	web(annotations{"shapectl.dev/ingress": "{rate: 3x}"})
	r.expect(`shop/web receives: shapectl.dev/ingress: rate "3x"`, "va egress: 30mbit")
	if got := <-r.events.(*record.FakeRecorder).Events; !strings.HasPrefix(got, `Warning Limit shop/web receives: shapectl.dev/ingress: rate "3x"`) {
		t.Errorf("the event of the pod is %s", got)
	}
	web(annotations{"shapectl.dev/ingress": "{rate: 3mbit, guarantee: 1mbit}"})
	r.expect("shop/web receives: guarantee and weight count within the limit of the namespace", "va egress: 30mbit")
	web(nil)
	r.expect("shop/web receives: 100mbit", "va egress: 100mbit")

	// Deleted, and created again with that name, on another device.
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
	web(annotations{"shapectl.dev/egress": "7mbit"})
	r.start("vb", "shop/web", policy.MaxRate, "")
	r.expect("shop/web sends: 7mbit", "vb ingress: 7mbit", "vb egress: 400gbit")

	elsewhere := pod("shop", "web", annotations{"shapectl.dev/egress": "8mbit"})
	elsewhere.Spec.NodeName = "there"
	r.pod(elsewhere)
	r.expect("", "vb ingress: 7mbit")

	long := strings.Repeat("n", 253)
	r.namespace(long[:63], nil)
	r.start("vc", policy.ShortName(long[:63]+"/"+long), policy.MaxRate, "")
	r.pod(pod(long[:63], long, annotations{"shapectl.dev/egress": "9mbit"}))
	r.expect(long+" sends: 9mbit", "vc ingress: 9mbit")

	r.namespace("shop", annotations{"shapectl.dev/x": "", "example.net/x": ""})
	web(annotations{"shapectl.dev/egress": "7mbit", "shapectl.dev/egres": "8mbit"})
	const advice = ": this annotation is unknown; use shapectl.dev/ingress or shapectl.dev/egress"
	r.expect("shop/web shapectl.dev/egres"+advice+"\nnamespace shop shapectl.dev/x"+advice+"\n", "vb ingress: 7mbit")
	var event string
	for events := r.events.(*record.FakeRecorder).Events; len(events) > 0; {
		event = <-events
	}
	if event != "Warning Limit shop/web shapectl.dev/egres"+advice {
		t.Errorf("the event of the pod is %s", event)
	}

	host := pod("shop", "host", annotations{"shapectl.dev/egress": "9mbit"})
	host.Spec.HostNetwork = true
	r.pod(host)
	r.expect("shop/host sends: a pod with hostNetwork has no device of its own, so annotations cannot limit it\n")
	for range 2 { // deleted, and created again with the same fault
		r.pod(pod("shop", "late", annotations{"shapectl.dev/egress": "9mbit"}))
		r.expect("shop/late sends: shapectl-cni gave the pod no limit that could change; see its configuration, and start the pod again\n")
		r.podStore.Delete(pod("shop", "late", nil))
		r.expect("")
	}
}

func TestNamespace(t *testing.T) {
	r := newRig(t)
	r.namespace("shop", annotations{"shapectl.dev/egress": "{rate: 50mbit, share: member}"})
	r.start("va", "shop/a", policy.MaxRate, "")
	r.start("vb", "shop/b", policy.MaxRate, "")
	r.pod(pod("shop", "a", annotations{"shapectl.dev/egress": "{rate: 20mbit, guarantee: 10mbit, weight: 3}"}))
	r.pod(pod("shop", "b", annotations{"shapectl.dev/egress": "{within: uplink}"})) // which must not escape
	r.expect(`shop/b sends: shapectl.dev/egress: "within" is not possible here`,
		"namespace shop egress: 50mbit", "va egress: 400gbit",
		`va ingress: 20mbit (2.5 MB/s), burst 750 kB (300 ms), within pool "namespace shop egress", 10mbit of it guaranteed, weight 3`,
		`vb ingress: within pool "namespace shop egress"`)
	r.pod(pod("shop", "b", annotations{"shapectl.dev/egress": "{guarantee: 45mbit}"})) // there is no room
	r.expect("shop/b sends: 400gbit", "vb ingress: within pool")
	r.pod(pod("shop", "a", annotations{"shapectl.dev/egress": "{rate: 20mbit, weight: 3}"})) // which makes some
	r.expect("", "vb ingress: 45mbit of it guaranteed")
	r.pod(pod("shop", "a", annotations{"shapectl.dev/egress": "{rate: 20mbit, guarantee: 10mbit, weight: 3}"}))
	r.cluster = true // and no guarantees any more
	r.expect("guarantee has no use where the namespace has one limit for all nodes; remove it, or use weight",
		`namespace shop egress: for all hosts of cluster "namespace shop egress" together`)
	r.namespace("shop", annotations{"shapectl.dev/egress": "fast"})
	r.start("vc", "shop/c", policy.MaxRate, "")
	r.pod(pod("shop", "c", nil))
	r.expect("namespace shop egress: shapectl.dev/egress: rate", "namespace shop egress: 50mbit", `vc ingress: within pool "namespace shop egress"`)
	r.cluster = false
	r.namespace("shop", annotations{"shapectl.dev/egress": "{guarantee: 1mbit}"})
	r.expect("namespace shop egress: shapectl.dev/egress: guarantee 1mbit has no use with no pool", "namespace shop egress: 50mbit")
	r.namespace("shop", nil)
	r.expect("shop/a sends: guarantee and weight count within the limit of the namespace, which has none", "namespace shop egress: none", "va ingress: 20mbit")
}

var (
	annotates = regexp.MustCompile(`(?m)^kubectl (?:-n (\w+) )?annotate --overwrite (?:pod|namespace) (\S+) (\S+?)='?([^'\n]+)`)
	logs      = regexp.MustCompile("(?s)```text\n(.*?)```")
)

// The page's commands do what it says.
func TestPage(t *testing.T) {
	page, err := os.ReadFile("../docs/for/kubernetes.md")
	testenv.Must(t, err)
	r := newRig(t)
	r.namespace("shop", nil)
	r.start("va", "shop/web-1", policy.MaxRate, "")
	web := annotations{}
	for _, c := range annotates.FindAllStringSubmatch(string(page), -1) {
		if c[1] == "" {
			r.expect(logs.FindStringSubmatch(string(page))[1], "va egress: 10mbit", "va ingress: 20mbit")
			r.namespace(c[2], annotations{c[3]: c[4]})
			continue
		}
		web[c[3]] = c[4]
		r.pod(pod(c[1], c[2], web))
	}
	r.cluster = true
	r.expect("namespace shop egress: 1gbit", "va ingress: within pool")
}

func TestManifests(t *testing.T) {
	text, err := os.ReadFile("daemonset.yaml")
	testenv.Must(t, err)
	for i, want := range []any{&corev1.ServiceAccount{}, &rbacv1.ClusterRole{}, &rbacv1.ClusterRoleBinding{}, &appsv1.DaemonSet{}} {
		testenv.Must(t, yaml.UnmarshalStrict(bytes.Split(text, []byte("\n---\n"))[i], want))
	}
}

// Pods of two networks, one of which has a pool of the operator for all of its pods on the node. Annotations reach no part of that,
// and lift it for nobody.
func TestNetworks(t *testing.T) {
	r := newRig(t)
	n, err := loader.WriteFirst(r.options)
	testenv.Must(t, err)
	var pools []policy.Rule
	for _, name := range []string{"uplink", "namespace shop ingress"} {
		pool, err := policy.Limit{Rate: 1e9}.Pool(name)
		testenv.Must(t, err)
		pools = append(pools, pool)
	}
	_, err = n.Put(loader.ApplyOptions{}, policy.Table{Rules: pools})
	testenv.Must(t, err)
	n.Close()
	r.start("va", "shop/a", policy.MaxRate, "")
	r.start("vb", "shop/b", policy.MaxRate, "uplink")
	r.pod(pod("shop", "a", nil))
	r.pod(pod("shop", "b", annotations{"shapectl.dev/egress": "{guarantee: 999mbit, weight: 256}"}))
	r.namespace("shop", nil)
	r.expect("guarantee and weight count within the limit of the namespace, which has none", `vb ingress: 400gbit (50 GB/s), burst 15 GB (300 ms), within pool "uplink"`)
	r.startIn(map[string]string{"share": "flow", "capacity": "50ms", "guarantee": "2mbit", "weight": "3"}, "vc", "shop/c", "uplink")
	for _, c := range []struct {
		a    annotations
		want string
	}{ // an annotation changes what it says, and nothing else of what the network gives
		{annotations{"kubernetes.io/egress-bandwidth": "15M"}, "15mbit (1.875 MB/s), burst 93.75 kB (50 ms), shared fairly by its flows, within pool \"uplink\", 2mbit of it guaranteed, weight 3"},
		{annotations{"kubernetes.io/egress-bandwidth": "1M", "shapectl.dev/egress": "{share: host}"}, "1mbit (125 kB/s), burst 6.25 kB (50 ms), shared fairly by its hosts, within pool \"uplink\", 1mbit of it guaranteed, weight 3"},
		{nil, "400gbit (50 GB/s), burst 2.5 GB (50 ms), shared fairly by its flows, within pool \"uplink\", 2mbit of it guaranteed, weight 3"},
	} {
		r.pod(pod("shop", "c", c.a))
		r.expect("shop/c sends: ", "vc ingress: "+c.want)
	}
	r.pod(pod("shop", "b", nil))
	r.namespace("shop", annotations{"shapectl.dev/egress": "50mbit", "shapectl.dev/ingress": "50mbit"})
	r.expect(`another pool is called "namespace shop ingress"; remove it, or give it another name`, "namespace shop ingress: 1gbit")
	r.expect("", "namespace shop egress: 50mbit", `va ingress: within pool "namespace shop egress"`,
		`namespace shop egress within uplink: 50mbit (6.25 MB/s), burst 1.875 MB (300 ms), within pool "uplink"`, `vb ingress: within pool "namespace shop egress within uplink"`)
	r.namespace("shop", nil)
	r.expect("", "namespace shop egress: none", "namespace shop egress within uplink: none", `vb ingress: within pool "uplink"`)
	if got := r.pools()["va ingress"]; strings.Contains(got, "within") {
		t.Errorf("va ingress: %s", got)
	}
}

// Hundreds of pods change at one moment.
func TestManyPods(t *testing.T) {
	r := newRig(t)
	const many = 100
	r.namespace("shop", annotations{"shapectl.dev/egress": "1gbit"})
	for i := range many {
		name := fmt.Sprintf("p%d", i)
		r.start(name, "shop/"+name, policy.MaxRate, "")
		r.pod(pod("shop", name, annotations{"kubernetes.io/ingress-bandwidth": "1M", "kubernetes.io/egress-bandwidth": "2M"}))
	}
	began := time.Now()
	testenv.Must(t, r.sync())
	t.Logf("%d pools changed in %v", 2*many, time.Since(began))
	began = time.Now()
	r.expect("", "p0 egress: 1mbit", `p99 ingress: 2mbit`)
	t.Logf("without changes: %v", time.Since(began)/2)
}
