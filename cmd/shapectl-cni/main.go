// Command shapectl-cni is a chained CNI plugin that limits the traffic of pods. It takes the configuration of the reference plugin
// bandwidth. Each pod has a pool for each direction, and rules on the host's end of its veth pair.
package main

import (
	"cmp"
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
		err = limit(tables)
	}
	if err != nil {
		return fmt.Errorf("limit the pod: %w", err)
	}
	return types.PrintResult(c.PrevResult, c.CNIVersion)
}

// wanted are the rules and pools that a pod shall have; nil for none.
func wanted(c *network, result *current.Result, args *skel.CmdArgs) ([]policy.Table, error) {
	if tables, _, err := c.limits(c.podOf(args), "pod"); tables == nil || err != nil {
		return nil, err
	}
	device, err := hostDevice(result, args)
	if err != nil {
		return nil, err
	}
	tables, notices, err := c.limits(c.podOf(args), device)
	for _, n := range notices {
		fmt.Fprintln(os.Stderr, "shapectl-cni:", n)
	}
	return tables, err
}

// hostDevice is the host's end of a pod's veth pair.
func hostDevice(result *current.Result, args *skel.CmdArgs) (string, error) {
	peer := 0
	err := netns.In(args.Netns, func() error {
		link, err := netlink.LinkByName(args.IfName)
		if err == nil && link.Type() == "veth" {
			peer = link.Attrs().ParentIndex
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("look for %s in %s: %w", args.IfName, args.Netns, err)
	}
	dev, _, err := netinfo.DeviceByIndex(peer)
	if err != nil {
		return "", err
	}
	if !slices.ContainsFunc(result.Interfaces, func(i *current.Interface) bool { return i.Sandbox == "" && i.Name == dev.Name }) {
		return "", fmt.Errorf("%s is no veth whose other end an earlier plugin has made on the host", args.IfName)
	}
	return dev.Name, nil
}

// limit brings the rules of a pod into force: at once where there are none, also while another change is pending.
func limit(tables []policy.Table) error {
	n, err := loader.WriteFirst(where())
	if err != nil {
		return err
	}
	defer n.Close()
	if err := dropOld(n, tables[1].Device); err != nil {
		return err
	}
	done, err := n.ApplyNew(tables, tables, nil)
	if err != nil || len(done) == len(tables)-1 {
		return err
	}
	// A policy, or the same attachment, has rules for the device. Pools of others stay as they are.
	pools := n.Pools()
	defer pools.Close()
	tables[0].Rules = slices.DeleteFunc(tables[0].Rules, func(p policy.Rule) bool {
		_, found := pools.Set.Find(p.Prefix)
		return found && p.Label.Owner.Device == ""
	})
	_, err = n.Put(loader.ApplyOptions{}, tables...)
	return err
}

// dropOld removes pools that a deleted device has left, if a pod's device has its name now.
func dropOld(n *loader.Namespace, device string) error {
	pools := n.Pools()
	defer pools.Close()
	if pools.Set == nil || !slices.ContainsFunc([]policy.Direction{policy.Egress, policy.Ingress}, func(d policy.Direction) bool {
		_, found := pools.Set.Find(policy.PoolKey(policy.Owner{Device: device, Direction: d}.String()))
		return found
	}) {
		return nil
	}
	if err := n.Collect(nil); err != nil {
		return err
	}
	return n.DropPools(func(p policy.Rule) bool { return p.Label.Owner.Device == device })
}

func del(args *skel.CmdArgs) error {
	c, _, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	mine := c.noteOf(args.ContainerID, args.IfName)
	return remove(c.note(), func(note string) bool { return note == mine })
}

// collect removes the limits of pods that are no longer valid.
func collect(args *skel.CmdArgs) error {
	c, _, err := parse(args.StdinData)
	if err != nil {
		return err
	}
	valid := map[string]bool{}
	for _, a := range c.ValidAttachments {
		valid[c.noteOf(a.ContainerID, a.IfName)] = true
	}
	return remove(c.note(), func(note string) bool { return strings.HasPrefix(note, c.note()+" ") && !valid[note] })
}

// remove removes the limits of pods with some notes, and then the pools of a node or namespace, with the note of the network, in
// which nothing is left. Devices that are gone have none.
func remove(network string, which func(note string) bool) error {
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
	for _, p := range pools.Set.Policy() {
		if which(p.Label.Note) {
			devices = append(devices, netinfo.Device{Name: p.Label.Owner.Device})
		}
	}
	if devices != nil {
		hooks, err := n.Hooks(devices...)
		defer loader.CloseHooks(hooks)
		if err == nil {
			err = n.Flush(hooks...)
		}
		if err != nil && !errors.Is(err, loader.ErrPending) { // then they go with the device
			return err
		}
	}
	return n.DropPools(func(p policy.Rule) bool { return which(p.Label.Note) || p.Label.Note == network })
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
	n, err := loader.Read(where())
	if err == nil {
		defer n.Close()
		if err = n.Readable(); err == nil {
			_, err = loader.HookMode(where())
		}
	}
	if err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "this host cannot limit pods", err.Error())
	}
	return nil
}
