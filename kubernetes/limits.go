package main

import (
	"fmt"
	"strings"

	"go.yaml.in/yaml/v4"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Annotations of pods are the standard ones of a rate, and ours, which namespaces have, too. Both say "ingress" for what a pod
// receives. That leaves the node's device of the pod, so shapectl calls it egress there.
const (
	standardAnnotation = "kubernetes.io/%s-bandwidth"
	annotation         = "shapectl.dev/%s"
)

// limitOf is what annotations of a pod or a namespace ask for in a direction; nil for nothing. The notice says where that differs.
func limitOf(annotations map[string]string, direction string, namespace bool) (l *policy.Draft, notice, err error) {
	var both, d policy.Draft
	key := fmt.Sprintf(standardAnnotation, direction)
	text, standard := annotations[key]
	if standard = standard && !namespace; standard {
		quantity, err := resource.ParseQuantity(text)
		if err != nil || quantity.Sign() <= 0 {
			return nil, nil, fmt.Errorf("%s %.64q is not a rate; write bits per second, such as 10M", key, text)
		}
		both.Rate = policy.MaxRate
		if quantity.CmpInt64(int64(both.Rate)) < 0 { // else Value may overflow
			both.Rate = max(policy.Rate(quantity.Value()), policy.MinRate)
		}
		if exactly := resource.NewQuantity(int64(both.Rate), resource.DecimalSI); quantity.Cmp(*exactly) != 0 {
			notice = fmt.Errorf("%s %.64s is not in 8k to 400G bits per second; the pod gets %v", key, text, both.Rate)
		}
		both.Mark(policy.FindOption("rate"))
	}
	key = fmt.Sprintf(annotation, direction)
	text, ours := annotations[key]
	if !ours && !standard {
		return nil, nil, nil
	}
	options := map[string]string{}
	switch {
	case !ours:
	case strings.ContainsAny(text, "{:"):
		if err := yaml.Load([]byte(text), &options); err != nil {
			return nil, nil, fmt.Errorf("%s %.64q is not valid; write a rate such as 10mbit, or options such as {rate: 10mbit, share: flow}", key, text)
		}
	default:
		options["rate"] = strings.TrimSpace(text)
	}
	err = d.GiveAll(options, func(o *policy.Option) bool { // whoever may annotate a pod must not reach the limits of others
		return !o.RuleOnly && !o.Label && !o.Fact && o.Name != "within" && (!o.PoolOnly || namespace && strings.HasPrefix(o.Name, "cluster-"))
	})
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", key, err)
	}
	if d.Gives("rate") {
		notice = nil
	}
	both = d.Over(both)
	return &both, notice, nil
}
