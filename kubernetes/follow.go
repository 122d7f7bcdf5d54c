package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// between is the least time between two looks at the limits, for which other commands wait.
	between = time.Second
	// again is when to look although nothing has changed: shapectl-cni may have limited a pod later than it appeared.
	again = 30 * time.Second
)

// A follower keeps the limits of the pods of a node as annotations say. It gives pods no rules: shapectl-cni does.
type follower struct {
	node       string
	options    loader.Options
	cluster    bool // the limits of namespaces are for all nodes together
	pods       listers.PodLister
	namespaces listers.NamespaceLister

	events        record.EventRecorder
	told, telling map[string]string // messages about pods and namespaces, of the last look and of this one
}

// run follows pods until ctx ends. Limits stay as they are while the API server does not answer.
func (f *follower) run(ctx context.Context, client kubernetes.Interface) error {
	changed := make(chan struct{}, 1)
	notify := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { notify() },
		DeleteFunc: func(any) { notify() },
		UpdateFunc: func(any, any) { notify() }, // any status of a pod may be the first one after shapectl-cni has limited it
	}
	asking, cancel := context.WithTimeout(ctx, 10*time.Second)
	if _, err := client.CoreV1().Namespaces().List(asking, metav1.ListOptions{Limit: 1}); err != nil { // informers try again, and say nothing
		log.Print("cannot reach Kubernetes yet: ", err)
	}
	cancel()
	events := record.NewBroadcaster()
	events.StartRecordingToSink(&typed.EventSinkImpl{Interface: client.CoreV1().Events("")})
	f.events = events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "shapectl", Host: f.node})
	ofNode := fields.OneTermEqualSelector("spec.nodeName", f.node).String()
	pods := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = ofNode }))
	all := informers.NewSharedInformerFactory(client, 0)
	f.pods, f.namespaces = pods.Core().V1().Pods().Lister(), all.Core().V1().Namespaces().Lister()
	for _, informer := range []cache.SharedIndexInformer{pods.Core().V1().Pods().Informer(), all.Core().V1().Namespaces().Informer()} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return err
		}
		go informer.Run(ctx.Done())
		if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			return nil
		}
	}
	log.Print("following the pods of node ", f.node)
	for {
		err := f.sync()
		if f.tell("", err); err != nil {
			notify()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(between):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-time.After(again):
		}
	}
}

// tell logs an error about something, unless the last look did, and makes it an event of pods.
func (f *follower) tell(what string, err error, pods ...*corev1.Pod) {
	if err == nil {
		return
	}
	if text := err.Error(); f.told[what] != text && f.telling[what] != text {
		log.Print(strings.TrimPrefix(what+": ", ": "), err)
		for _, pod := range pods {
			f.events.Event(pod, corev1.EventTypeWarning, "Limit", what+": "+err.Error())
		}
	}
	f.telling[what] = err.Error()
}

// sync changes the limits of pods and namespaces that are not as annotations say.
func (f *follower) sync() error {
	defer func() { f.told, f.telling = f.telling, map[string]string{} }()
	listed, err := f.pods.List(labels.Everything())
	if err != nil {
		return err
	}
	n, err := loader.WriteFirst(f.options)
	if err != nil {
		return err
	}
	defer n.Close()
	tables, err := n.Tables(loader.Attached, loader.Detached)
	if err != nil {
		return err
	}
	pods := map[string]*corev1.Pod{} // by the name of their rules
	for _, pod := range listed {
		if pod.Spec.NodeName == f.node {
			pods[policy.ShortName(pod.Namespace+"/"+pod.Name)] = pod
		}
	}
	podOf := map[string]*corev1.Pod{} // by their pools
	var pools []policy.Rule
	for _, t := range tables {
		if t.IsPools() {
			pools = t.Rules
		}
		for _, r := range t.Rules {
			if !r.Pool && strings.HasPrefix(r.Label.Note, policy.CNINote) {
				podOf[string(r.Within)] = pods[r.Label.Name]
			}
		}
	}
	all := map[policy.Within]policy.Rule{} // the pools by name
	for _, p := range pools {
		all[policy.Within(p.Label.Name)] = p.WithoutGuarantee() // which may wait for room
	}
	// A pod gets into the pool of its namespace first: whatever its own annotation is, it must not escape that.
	var members, limits, waiting []policy.Rule
	changed := map[policy.Within]bool{}
	about := map[string]string{}
	for i, p := range pools {
		p = p.WithoutGuarantee()
		pod := podOf[p.Label.Name]
		if pod == nil {
			continue
		}
		direction := policy.PodDirections[p.Label.Owner.Direction]
		who := pod.Namespace + "/" + pod.Name + " " + policy.PodVerbs[p.Label.Owner.Direction]
		about[p.Label.Name] = who
		above := p.Within // what the network of the pod gives
		if group := all[above]; group.Label.Note == policy.NamespaceNote {
			above = group.Within
		}
		group, err := f.groupOf(pod.Namespace, direction, above, all)
		f.tell("namespace "+pod.Namespace+" "+direction, err)
		if group.Pool {
			above = policy.Within(group.Label.Name)
			if all[above] != group {
				all[above], changed[above] = group, true
			}
		}
		member := within(p, above, group)
		if member != p {
			members = append(members, member)
		}
		want := member
		l, notice, err := limitOf(pod.Annotations, direction, false)
		if _, _, annotated := policy.CutPodNote(p.Label.Note); err == nil && (l != nil || annotated) {
			want, err = limitIn(l, member, group)
		}
		f.tell(who, cmp.Or(err, notice), pod)
		switch {
		case err == nil && want != member:
			limits = append(limits, want)
		case member == p && pools[i].Guarantee == 0 && p.Label.Waits != 0:
			waiting = append(waiting, p)
		}
	}
	for name := range changed {
		members = append([]policy.Rule{all[name]}, members...)
	}
	if pending := n.Pending(); pending != nil && len(members)+len(limits) > 0 {
		return pending
	}
	f.put(n, about, members)
	f.put(n, about, limits)
	for _, pod := range pods {
		f.tellLacking(pod, about)
		f.tellUnknown(pod.Namespace+"/"+pod.Name, pod.Annotations, pod)
		if ns, err := f.namespaces.Get(pod.Namespace); err == nil {
			f.tellUnknown("namespace "+ns.Name, ns.Annotations)
		}
	}
	if len(waiting) > 0 && n.Pending() == nil { // there may be room now
		_, err := n.Put(loader.ApplyOptions{}, policy.Table{Rules: waiting})
		f.tell("give guarantees", err)
	}
	return n.DropPools(func(p policy.Rule) bool { return p.Label.Note == policy.NamespaceNote })
}

// groupOf is the pool of a namespace in a direction; the zero Rule for none. It stays as it is if its annotation is not valid.
func (f *follower) groupOf(namespace, direction string, above policy.Within, all map[policy.Within]policy.Rule) (policy.Rule, error) {
	var l *policy.Draft
	ns, err := f.namespaces.Get(namespace)
	if err == nil {
		l, _, err = limitOf(ns.Annotations, direction, true)
	}
	name := policy.NamespacePool(namespace, direction, above)
	have := all[policy.Within(name)]
	switch {
	case err == nil && l == nil:
		return policy.Rule{}, nil
	case have.Pool && have.Label.Note != policy.NamespaceNote:
		return policy.Rule{}, fmt.Errorf("another pool is called %q; remove it, or give it another name", name)
	case err != nil:
		return have, err
	}
	*l = l.OnNetwork(policy.Draft{})
	l.Note, l.Within = policy.NamespaceNote, above
	if f.cluster {
		l.Cluster.Name = policy.ClusterName(name)
	}
	pool, err := l.Pool(name)
	if err != nil {
		return have, fmt.Errorf(annotation+": %w", direction, err)
	}
	return pool.WithoutGuarantee(), nil
}

// within is the pool of a pod within another one, without what has no use there.
func within(p policy.Rule, above policy.Within, group policy.Rule) policy.Rule {
	if p.Within = above; above == "" {
		p.Weight = 0
	}
	if above == "" || group.Cluster.Name != "" {
		p.Guarantee, p.Label.Waits = 0, 0
	}
	return p
}

// limitIn is the pool of a pod with the limit of an annotation, nil for none, over what its network gives.
func limitIn(l *policy.Draft, have, group policy.Rule) (policy.Rule, error) {
	whose, network, _ := policy.CutPodNote(have.Label.Note)
	var d policy.Draft
	if l != nil {
		d = *l
	}
	switch {
	case !group.Pool && (d.Guarantee != 0 || d.Weight != 0):
		return have, errors.New("guarantee and weight count within the limit of the namespace, which has none; annotate the namespace, too")
	case d.Guarantee != 0 && group.Cluster.Name != "":
		return have, errors.New("guarantee has no use where the namespace has one limit for all nodes; remove it, or use weight")
	}
	d = d.OnNetwork(network)
	d.Within, d.Owner = have.Within, have.Label.Owner
	d.Note, _ = policy.PodNote(whose, network, l != nil)
	pool, err := d.Pool(have.Label.Name)
	return within(pool.WithoutGuarantee(), have.Within, group), err
}

// put changes pools at one moment. If one of them is refused, it changes the others one by one.
func (f *follower) put(n *loader.Namespace, about map[string]string, pools []policy.Rule) {
	if len(pools) == 0 {
		return
	}
	_, err := n.Put(loader.ApplyOptions{}, policy.Table{Rules: pools})
	if err != nil && len(pools) > 1 {
		for i := range pools {
			f.put(n, about, pools[i:i+1])
		}
		return
	}
	for _, p := range pools {
		who := cmp.Or(about[p.Label.Name], p.Label.Name)
		if err != nil {
			f.tell("cannot change "+who, err)
		} else {
			log.Print(who, ": ", p.Gets())
		}
	}
}

// tellLacking tells why a pod does not have a limit that annotations ask for.
func (f *follower) tellLacking(pod *corev1.Pod, about map[string]string) {
	have := slices.Collect(maps.Values(about))
	for d, direction := range policy.PodDirections {
		who := pod.Namespace + "/" + pod.Name + " " + policy.PodVerbs[d]
		l, _, err := limitOf(pod.Annotations, direction, false)
		group, _ := f.groupOf(pod.Namespace, direction, "", nil)
		switch {
		case slices.Contains(have, who), l == nil && err == nil && !group.Pool:
			continue
		case pod.Spec.HostNetwork:
			err = errors.New("a pod with hostNetwork has no device of its own, so annotations cannot limit it")
		case pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil:
			err = errors.New("shapectl-cni gave the pod no limit that could change; see its configuration, and start the pod again")
		}
		f.tell(who, err, pod)
	}
}

// tellUnknown tells which annotations are like ours, and have no meaning.
func (f *follower) tellUnknown(who string, annotations map[string]string, pods ...*corev1.Pod) {
	for key := range annotations {
		direction, ours := strings.CutPrefix(key, fmt.Sprintf(annotation, ""))
		if ours && direction != "ingress" && direction != "egress" {
			f.tell(who+" "+key, errors.New("this annotation is unknown; use shapectl.dev/ingress or shapectl.dev/egress"), pods...)
		}
	}
}
