package main

import (
	"cmp"
	"context"
	"errors"
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
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	cniNote       = "cni " // begins the notes of what shapectl-cni makes
	namespaceNote = "kubernetes namespace"

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

	told   map[string]string // the last message about a pod or namespace
	before map[string]before // by pool and its note
}

// before is the limit that a pod had before it had an annotation, if that is known.
type before struct {
	limit     policy.Rule
	annotated bool
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
		UpdateFunc: func(old, now any) {
			pod, isPod := old.(*corev1.Pod) // which has its limit from shapectl-cni once it runs
			if isPod && pod.Status.Phase != now.(*corev1.Pod).Status.Phase ||
				!maps.Equal(old.(metav1.Object).GetAnnotations(), now.(metav1.Object).GetAnnotations()) {
				notify()
			}
		},
	}
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

// tell logs an error about something, once. Without an error there may be another one later.
func (f *follower) tell(what string, err error) {
	switch {
	case err == nil:
		delete(f.told, what)
	case f.told[what] != err.Error():
		f.told[what] = err.Error()
		log.Print(strings.TrimPrefix(what+": ", ": "), err)
	}
}

// directions are those of a pod's device, in the words of annotations.
var directions = map[policy.Direction]string{policy.Egress: "ingress", policy.Ingress: "egress"}

// sync changes the limits of pods and namespaces that are not as annotations say.
func (f *follower) sync() error {
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
	for i, t := range tables {
		if t.IsPools() {
			pools = policy.WithoutGuarantees(tables[i : i+1])[0].Rules // a guarantee may wait for room
		}
		for _, r := range t.Rules {
			if !r.Pool && strings.HasPrefix(r.Label.Note, cniNote) {
				podOf[string(r.Within)] = pods[r.Label.Name]
			}
		}
	}
	groups := map[policy.Within]policy.Rule{} // the pools of namespaces
	for _, p := range pools {
		if p.Label.Note == namespaceNote {
			groups[policy.Within(p.Label.Name)] = p
		}
	}
	// A pod gets into the pool of its namespace first: whatever its own annotation is, it must not escape that.
	var members, limits []policy.Rule
	changed := map[policy.Within]bool{}
	about, had := map[string]string{}, f.before
	f.before = map[string]before{}
	for _, p := range pools {
		pod := podOf[p.Label.Name]
		if pod == nil {
			continue
		}
		direction := directions[p.Label.Owner.Direction]
		who := pod.Namespace + "/" + pod.Name + " " + direction
		about[p.Label.Name] = who
		above := p.Within
		if group, found := groups[above]; found {
			above = group.Within
		}
		group, err := f.groupOf(pod.Namespace, direction, above, groups)
		switch {
		case err != nil:
			above = p.Within
		case group.Pool:
			above = policy.Within(group.Label.Name)
			if groups[above] != group {
				groups[above], changed[above] = group, true
			}
		}
		f.tell("namespace "+pod.Namespace+" "+direction, err)
		member := within(p, above, groups[above])
		if member != p {
			members = append(members, member)
		}
		key, want := p.Label.Name+p.Label.Note, member
		was := had[key]
		l, err := limitOf(pod.Annotations, direction, false)
		switch {
		case err != nil:
		case l != nil:
			was.annotated = true
			want, err = limitIn(*l, member, groups[above])
		case was.annotated && !was.limit.Pool:
			want, err = limitIn(policy.Limit{Rate: policy.MaxRate}, member, groups[above])
			was.annotated = want != p
		case was.annotated:
			want = within(was.limit, above, groups[above])
			was.annotated = want != p
		default:
			was.limit = p
		}
		if f.tell(who, err); err == nil && want != member {
			limits = append(limits, want)
		}
		f.before[key] = was
	}
	for name := range changed {
		members = append([]policy.Rule{groups[name]}, members...)
	}
	if pending := n.Pending(); pending != nil && len(members)+len(limits) > 0 {
		return pending
	}
	f.put(n, about, members)
	f.put(n, about, limits)
	for _, pod := range pods {
		f.tellLacking(pod, about)
	}
	if len(groups) == 0 {
		return nil
	}
	return n.DropPools(func(p policy.Rule) bool { return p.Label.Note == namespaceNote })
}

// groupOf is the pool of a namespace in a direction; the zero Rule for none. It gets within a pool unless it is within one.
func (f *follower) groupOf(namespace, direction string, above policy.Within, have map[policy.Within]policy.Rule) (policy.Rule, error) {
	ns, err := f.namespaces.Get(namespace)
	if err != nil {
		return policy.Rule{}, err
	}
	l, err := limitOf(ns.Annotations, direction, true)
	if l == nil || err != nil {
		return policy.Rule{}, err
	}
	name := policy.ShortName("namespace " + namespace + " " + direction)
	l.Note, l.Within = namespaceNote, cmp.Or(have[policy.Within(name)].Within, above) // pods of networks may differ in it
	if f.cluster {
		l.Cluster.Name = policy.ClusterName(name)
	}
	pool, err := l.Pool(name)
	return pool.WithoutGuarantee(), err
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

// limitIn is the pool of a pod with the limit of an annotation.
func limitIn(l policy.Limit, have, group policy.Rule) (policy.Rule, error) {
	switch {
	case have.Within == "" && (l.Guarantee != 0 || l.Weight != 0):
		return have, errors.New("guarantee and weight count within the limit of the namespace, which has none; annotate the namespace, too")
	case l.Guarantee != 0 && group.Cluster.Name != "":
		return have, errors.New("guarantee has no use where the namespace has one limit for all nodes; remove it, or use weight")
	}
	l.Within, l.Owner, l.Note = have.Within, have.Label.Owner, have.Label.Note
	pool, err := l.Pool(have.Label.Name)
	return pool.WithoutGuarantee(), err
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
		if f.tell("cannot change "+who, err); err == nil {
			log.Print(who, ": ", p.Gets())
		}
	}
}

// tellLacking tells why a pod does not have a limit that annotations ask for.
func (f *follower) tellLacking(pod *corev1.Pod, about map[string]string) {
	have := slices.Collect(maps.Values(about))
	for _, direction := range directions {
		who := pod.Namespace + "/" + pod.Name + " " + direction
		l, err := limitOf(pod.Annotations, direction, false)
		group, _ := f.groupOf(pod.Namespace, direction, "", nil)
		switch {
		case slices.Contains(have, who), l == nil && err == nil && !group.Pool:
			continue
		case pod.Spec.HostNetwork:
			err = errors.New("a pod with hostNetwork has no device of its own, so annotations cannot limit it")
		case pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil:
			err = errors.New("shapectl-cni gave the pod no limit that could change; see its configuration, and start the pod again")
		}
		f.tell(who, err)
	}
}
