// Command shapectl-cni is a chained CNI plugin that limits the traffic of pods. It takes the configuration of the reference plugin
// bandwidth. Each pod has a pool for each direction, and rules on the host's end of its veth pair.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	spec "github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// version is set by the Makefile.
var version = "dev"

// patience is how long to wait for other commands: less than runtimes wait for a plugin.
const patience = 90 * time.Second

func main() {
	debug.SetGCPercent(-1) // it ends soon
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: del, Check: check, GC: collect, Status: status},
		spec.VersionsStartingFrom("0.3.0"), "CNI plugin shapectl-cni "+version)
}

// where says where rules are. Inside `ip netns exec` these are the pins outside.
func where() loader.Options {
	return loader.Options{BPFFS: cmp.Or(os.Getenv("SHAPECTL_BPFFS"), bpffs.Outside()), SetupFQ: true, Patience: patience}
}

func add(args *skel.CmdArgs) error {
	c, result, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	if result == nil {
		return types.NewError(types.ErrInvalidNetworkConfig, "shapectl-cni must come after another plugin, such as bridge or ptp", "")
	}
	tables, err := wanted(&c, result, args)
	if err == nil && tables != nil {
		err = limit(c.podOf(args), tables)
	}
	if errors.Is(err, loader.ErrPending) {
		return types.NewError(types.ErrTryAgainLater, "limit the pod: "+err.Error(), "")
	}
	if err != nil {
		return fmt.Errorf("limit the pod: %w", advise(err))
	}
	return types.PrintResult(c.PrevResult, c.CNIVersion)
}

// advise adds what to do about rules that this build cannot read.
func advise(err error) error {
	if errors.Is(err, maps.ErrOtherLayout) {
		err = fmt.Errorf("%w; on the host, 'shapectl flush --all' deletes all limits; then start the pods again", err)
	}
	return err
}

// wanted are the rules and pools that a pod shall have; nil for none.
func wanted(c *network, result *current.Result, args *skel.CmdArgs) ([]policy.Table, error) {
	tables, notices, err := c.limits(c.podOf(args), func() (string, error) { return hostDevice(result, args) })
	for _, n := range notices {
		fmt.Fprintln(os.Stderr, "shapectl-cni:", n)
	}
	return tables, err
}

// hostDevice is the host's end of a pod's veth pair.
func hostDevice(result *current.Result, args *skel.CmdArgs) (string, error) {
	var end netlink.Link
	err := netns.In(args.Netns, func() (err error) {
		end, err = netlink.LinkByName(args.IfName)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("look for %s in %s: %w", args.IfName, args.Netns, err)
	}
	for _, i := range result.Interfaces { // the index of the other end may be that of another device if that end is not on the host
		if i.Sandbox != "" {
			continue
		}
		dev, err := netlink.LinkByName(i.Name)
		if err == nil && dev.Type() == "veth" && end.Type() == "veth" &&
			dev.Attrs().Index == end.Attrs().ParentIndex && dev.Attrs().ParentIndex == end.Attrs().Index {
			return dev.Attrs().Name, nil
		}
	}
	return "", fmt.Errorf("%s is no veth whose other end an earlier plugin has made on the host", args.IfName)
}

// limit brings the rules of a pod into force: at once where there are none, also while another change is pending.
func limit(p pod, tables []policy.Table) (err error) {
	n, err := loader.WriteFirst(where())
	if err != nil {
		return err
	}
	defer func() {
		if _, ofPools := errors.AsType[policy.PoolError](err); ofPools && n.Pending() != nil { // which may add or remove the pool
			err = fmt.Errorf("%w, and %w", n.Pending(), err)
		}
		n.Close()
	}()
	p.joinNamespace(n, tables[0].Rules)
	inForce := func(own policy.Rule) (maps.Entry, bool) {
		pools := n.Pools()
		defer pools.Close()
		if pools.Set == nil {
			return maps.Entry{}, false
		}
		return pools.Set.Find(own.Prefix)
	}
	if !slices.ContainsFunc(tables[0].Rules, func(own policy.Rule) bool { // of a pod of that name, which may be about to end
		e, _ := inForce(own)
		return own.Label.Owner.Device != "" && e.Label.Owner.Device != "" && !strings.HasPrefix(e.Label.Note, p.note+" ")
	}) {
		done, err := n.ApplyNew(tables, tables, nil)
		if err != nil || len(done) == len(tables)-1 {
			return err
		}
	}
	// A policy, or the same attachment, has rules for the device. Pools of others stay as they are.
	tables[0].Rules = slices.DeleteFunc(tables[0].Rules, func(p policy.Rule) bool {
		_, found := inForce(p)
		return found && p.Label.Owner.Device == ""
	})
	_, err = n.Put(loader.ApplyOptions{}, tables...)
	return err
}

// joinNamespace puts pools of a pod within those that shapectl-kubernetes has made for other pods of its namespace.
func (p pod) joinNamespace(n *loader.Namespace, pools []policy.Rule) {
	have := n.Pools()
	defer have.Close()
	for i := range pools {
		own := &pools[i]
		name := policy.NamespacePool(p.ns, policy.PodDirections[own.Label.Owner.Direction], own.Within)
		if have.Set == nil || own.Label.Owner.Device == "" {
			continue
		}
		if group, found := have.Set.Find(policy.PoolKey(name)); found && group.Label.Note == policy.NamespaceNote {
			if own.Within = policy.Within(name); group.Cluster.Name != "" {
				own.Guarantee = 0
			}
		}
	}
}

func del(args *skel.CmdArgs) error {
	var c network
	if err := json.Unmarshal(args.StdinData, &c.PluginConf); err != nil { // the rest may not be valid any more
		return err
	}
	mine := c.noteOf(args.ContainerID, args.IfName)
	return remove(func(pod string) bool { return pod == mine })
}

// collect removes the limits of pods that are no longer valid.
func collect(args *skel.CmdArgs) error {
	var c network
	if err := json.Unmarshal(args.StdinData, &c.PluginConf); err != nil {
		return err
	}
	valid := map[string]bool{}
	for _, a := range c.ValidAttachments {
		valid[c.noteOf(a.ContainerID, a.IfName)] = true
	}
	return remove(func(pod string) bool { return strings.HasPrefix(pod, c.note()+" ") && !valid[pod] })
}

// remove removes the rules of pods, which their notes tell, and then the pools of pods, nodes and namespaces in which nothing is left.
// Devices that are gone have none.
func remove(pods func(pod string) bool) error {
	which := func(note string) bool {
		pod, _, _ := policy.CutPodNote(note)
		return pods(pod)
	}
	n, err := loader.Write(where())
	if err != nil {
		return err
	}
	defer n.Close()
	pools := n.Pools()
	defer pools.Close()
	if pools.Set == nil {
		return nil
	}
	var devices []netinfo.Device
	for set, r := range pools.Set.Store.EveryRule() { // a pool may have the note of another attachment of the pod's name
		if !r.Pool && which(r.Label.Note) {
			devices = append(devices, netinfo.Device{Name: set.Device(), Index: set.Ifindex()})
		}
	}
	if devices != nil {
		hooks, err := n.Hooks(devices...)
		defer loader.CloseHooks(hooks)
		var theirs []*loader.Hook // and not those of another device that has the name of one now
		for _, h := range hooks {
			if slices.ContainsFunc(h.Set.Policy(), func(r policy.Rule) bool { return which(r.Label.Note) }) {
				theirs = append(theirs, h)
			}
		}
		if err == nil {
			err = n.Flush(theirs...)
		}
		if err != nil && !errors.Is(err, loader.ErrPending) { // then they go with the device
			return err
		}
	}
	return n.DropPools(func(p policy.Rule) bool { return p.OfPods() })
}

// check finds out whether the limits of a pod are in force. Their rates may have been changed meanwhile.
func check(args *skel.CmdArgs) error {
	c, result, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	if result == nil {
		return types.NewError(types.ErrInvalidNetworkConfig, "prevResult is missing", "")
	}
	tables, err := wanted(&c, result, args)
	if err != nil || tables == nil {
		return err
	}
	n, err := loader.Read(where())
	if err != nil {
		return err
	}
	defer n.Close()
	if err := n.Readable(); err != nil {
		return advise(err)
	}
	for _, t := range tables[1:] {
		h, err := n.Find(t.Device, t.Direction)
		if err != nil {
			return err
		}
		if h == nil {
			return fmt.Errorf("%s %s has no limit", t.Device, t.Direction)
		}
		defer h.Close()
		if h.State != loader.Attached {
			return fmt.Errorf("%s %s: the limit is not in force: %s", t.Device, t.Direction, h.State)
		}
		for _, r := range t.Rules {
			if have, found := h.Set.Find(r.Prefix); !found || have.Limits() != r.Limits() {
				return fmt.Errorf("%s %s %s has another limit", t.Device, t.Direction, r.Prefix)
			}
		}
	}
	return nil
}

// status finds out whether this host can limit pods.
func status(*skel.CmdArgs) error {
	err := bpffs.Mount(where().BPFFS) // as ADD does
	if err == nil {
		_, err = loader.HookMode(where())
	}
	n, failed := loader.Read(where())
	if failed == nil {
		defer n.Close()
		failed = n.Readable()
	}
	if err = cmp.Or(err, failed); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "this host cannot limit pods", advise(err).Error())
	}
	return nil
}
