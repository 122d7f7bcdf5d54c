package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A runtime gives plugins this variable. The test binary is then the plugin.
func TestMain(m *testing.M) {
	if os.Getenv("CNI_COMMAND") != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A rig is the network namespace of a host, and those of pods.
type rig struct {
	t     *testing.T
	host  *testenv.Netns
	bpffs string
}

func newRig(t *testing.T) *rig {
	return &rig{t, testenv.NewNetns(t), testenv.BPFFS(t)}
}

// A testPod is a namespace with eth0, whose other end has another name on the host.
type testPod struct{ name, device, pod string }

func (r *rig) pod(i int) testPod {
	name, netns := testenv.NewNamedNetns(r.t)
	p := testPod{name, fmt.Sprintf("veth%d", i), name}
	r.link(p, netns)
	return p
}

func (r *rig) link(p testPod, netns *testenv.Netns) {
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: p.device}, PeerName: "eth0", PeerNamespace: netlink.NsFd(netns.FD())}
	testenv.AddLink(r.t, veth)
}

const limits = `"ingressRate": 1000000, "ingressBurst": 400000, "egressRate": 2000000, "egressBurst": 400000`

// command is the plugin with a configuration for a pod, as a process of its own.
func (r *rig) command(command, conf string, p testPod, version string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SHAPECTL_BPFFS="+r.bpffs, "CNI_COMMAND="+command, "CNI_CONTAINERID=id-"+p.name, "CNI_IFNAME=eth0", "CNI_PATH=/",
		"CNI_NETNS=/run/netns/"+p.name, "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME="+p.pod)
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion": %q, "name": "net", "type": "shapectl-cni", "prevResult": {"cniVersion": %[1]q, "interfaces": [
		{"name": "br0"}, {"name": %q}, {"name": "eth0", "sandbox": "/run/netns/%s"}], "ips": []}, %s}`, version, p.device, p.name, conf))
	return cmd
}

// run runs the plugin and returns what it prints. It ends the test unless the error is as expected: none for "".
func (r *rig) run(command, conf string, p testPod, refused string) (out, err string) {
	r.t.Helper()
	cmd := r.command(command, conf, p, "1.1.0")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	failed := cmd.Run()
	out, err = stdout.String(), stderr.String()
	if (failed != nil) != (refused != "") || !strings.Contains(out, refused) {
		r.t.Fatalf("%s: %v, %s%s", command, failed, out, err)
	}
	return out, err
}

// tables are the rules and pools in force, a line each.
func (r *rig) tables() string {
	n, err := loader.Read(loader.Options{BPFFS: r.bpffs})
	testenv.Must(r.t, err)
	defer n.Close()
	tables, err := n.Tables(loader.Attached)
	testenv.Must(r.t, err)
	var text strings.Builder
	for _, t := range tables {
		for _, rule := range t.Rules {
			if rule.Pool {
				whose, _, annotated := policy.CutPodNote(rule.Label.Note)
				if annotated {
					whose = rule.Label.Note
				}
				fmt.Fprintf(&text, "pool %s: %v %s", rule.Label.Name, rule.Rate, whose)
				for _, name := range []string{"capacity", "within", "guarantee", "share", "excess"} {
					if o := policy.FindOption(name); o.Text(&rule) != "none" && o.Text(&rule) != "" {
						fmt.Fprintf(&text, " %s=%s", name, o.Text(&rule))
					}
				}
			} else {
				fmt.Fprintf(&text, "%s %v by %v %v: %s %s", t.Device, t.Direction, t.Match, rule.Prefix, rule.Within, rule.Label.Name)
			}
			fmt.Fprintln(&text)
		}
	}
	return text.String()
}

// put does what 'shapectl set' does.
func (r *rig) put(t policy.Table) {
	n, err := loader.Write(loader.Options{BPFFS: r.bpffs})
	testenv.Must(r.t, err)
	defer n.Close()
	_, err = n.Put(loader.ApplyOptions{}, t)
	testenv.Must(r.t, err)
}

func (r *rig) wantTables(want string) {
	r.t.Helper()
	sorted := func(s string) string {
		lines := strings.Split(strings.TrimSpace(s), "\n")
		slices.Sort(lines) // pools have the order of hashes
		return strings.Join(lines, "\n")
	}
	if got, want := sorted(r.tables()), sorted(want); got != want {
		r.t.Errorf("in force is\n%s\nwant\n%s", got, want)
	}
}

// A pod gets a rate for both families together in each direction, until DEL, which may be repeated, also when all is gone.
func TestAddDel(t *testing.T) {
	r := newRig(t)
	p := r.pod(1)
	full := t.TempDir()
	testenv.Must(t, os.WriteFile(full+"/file", nil, 0o600))
	(&rig{t, r.host, full}).run("STATUS", limits, p, "which a mount would hide")
	r.run("STATUS", limits, p, "")
	r.run("CHECK", limits, p, "has no limit")
	out, _ := r.run("ADD", limits, p, "")
	var result struct{ Interfaces []struct{ Name string } }
	if err := json.Unmarshal([]byte(out), &result); err != nil || len(result.Interfaces) != 3 {
		t.Errorf("ADD prints %v, %s", err, out)
	}
	want := fmt.Sprintf(`
pool shop/%[1]s receives: 1mbit cni net id-%[1]s eth0 capacity=50000b excess=drop
pool shop/%[1]s sends: 2mbit cni net id-%[1]s eth0 capacity=50000b excess=drop
veth1 egress by src 0.0.0.0/0: shop/%[1]s receives shop/%[1]s
veth1 egress by src ::/0: shop/%[1]s receives shop/%[1]s
veth1 ingress by dst 0.0.0.0/0: shop/%[1]s sends shop/%[1]s
veth1 ingress by dst ::/0: shop/%[1]s sends shop/%[1]s`, p.name)
	r.wantTables(want)
	r.run("CHECK", limits, p, "")
	r.run("ADD", strings.ReplaceAll(limits, "1000000", "3000000"), p, "")
	r.wantTables(strings.ReplaceAll(want, "1mbit", "3mbit"))
	r.run("DEL", limits, p, "")
	r.run("CHECK", limits, p, "has no limit")
	r.run("ADD", limits, p, "")
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, p.device)))
	r.run("DEL", limits, testPod{"no-such", "none", "none"}, "")
	r.run("DEL", limits, p, "")
	r.run("DEL", limits, p, "")
	r.wantEmpty()

	p = r.pod(2)
	r.run("ADD", limits, p, "")
	for _, pin := range testenv.Pins(t, r.bpffs) { // as another version might have left it
		if strings.HasSuffix(pin, "/leases") {
			testenv.Must(t, os.Remove(pin))
		}
	}
	for _, command := range []string{"ADD", "CHECK", "STATUS"} {
		r.run(command, limits, p, "flush --all")
	}
	r.run("DEL", limits, p, "")
}

// The other end of a pod's veth pair may be in a namespace where its index is that of another device of the host.
func TestBehindAnotherNamespace(t *testing.T) {
	r := newRig(t)
	testenv.AddLink(t, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}})
	name, netns := testenv.NewNamedNetns(t)
	_, third := testenv.NewNamedNetns(t)
	testenv.Must(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "veth1", Index: testenv.Link(t, "br0").Attrs().Index, Namespace: netlink.NsFd(third.FD())},
		PeerName:  "eth0", PeerNamespace: netlink.NsFd(netns.FD()),
	}))
	r.run("ADD", limits, testPod{name, "br0", name}, "is no veth whose other end an earlier plugin has made on the host")
}

func (r *rig) wantEmpty() {
	r.t.Helper()
	if pins := testenv.Pins(r.t, r.bpffs); len(pins) > 0 {
		r.t.Errorf("left: %v", pins)
	}
}

// Another pod may get a device of the same name before DEL. It gets its own rate, also if a policy has rules for its device.
func TestSameDevice(t *testing.T) {
	r := newRig(t)
	old := r.pod(1)
	r.run("ADD", limits, old, "")
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, old.device)))
	p := r.pod(1)
	rule, err := (policy.Limit{Rate: 9e6}).Rule(policy.Everything[0])
	testenv.Must(t, err)
	theirs := policy.Table{Device: p.device, Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{rule}}
	r.put(theirs)
	r.run("ADD", strings.ReplaceAll(limits, "2000000", "4000000"), p, "")
	r.run("DEL", limits, old, "")
	if got := r.tables(); strings.Contains(got, old.name) || strings.Count(got, "4mbit") != 1 || strings.Count(got, p.name) != 12 {
		t.Errorf("in force is\n%s", got)
	}
	r.run("CHECK", limits, p, "")

	link := testenv.Link(t, p.device) // renamed, its pools keep the name
	testenv.Must(t, netlink.LinkSetName(link, "renamed"))
	q := r.pod(1)
	r.put(theirs)
	r.run("ADD", limits, q, "")
	r.run("DEL", limits, p, "")
	if got := r.tables(); strings.Count(got, q.name) != 12 || strings.Contains(got, p.name) {
		t.Errorf("in force is\n%s", got)
	}
}

// A pod may start while another one of its name ends, in either order.
func TestSameName(t *testing.T) {
	r := newRig(t)
	old, p := r.pod(1), r.pod(2)
	p.pod = old.pod
	const conf = limits + `, "egress": {"within": "node"}, "pools": {"node": "1gbit"}`
	r.run("ADD", conf, old, "")
	r.run("ADD", strings.ReplaceAll(conf, "2000000", "4000000"), p, "")
	r.run("DEL", conf, old, "")
	r.run("CHECK", conf, p, "")
	if got := r.tables(); !strings.Contains(got, "sends: 4mbit cni net id-"+p.name) || strings.Contains(got, old.device) {
		t.Errorf("in force is\n%s", got)
	}
	r.run("ADD", conf, old, "")
	r.run("ADD", conf, p, "")
	r.run("DEL", conf, p, "")
	r.run("CHECK", conf, old, "")
	r.run("DEL", conf, old, "")
	r.wantEmpty()
}

// While a policy is not confirmed, pods come and go, and its revert concerns none of them.
func TestPending(t *testing.T) {
	r := newRig(t)
	before, p := r.pod(1), r.pod(2)
	r.run("ADD", limits, before, "")
	testenv.Veth(t, "va", "vb")
	n, err := loader.Write(loader.Options{BPFFS: r.bpffs})
	testenv.Must(t, err)
	tables, err := n.Tables(loader.Attached)
	testenv.Must(t, err)
	pool, err := policy.Limit{Rate: 2e9}.Pool("uplink")
	testenv.Must(t, err)
	rule, err := policy.Limit{Within: "uplink"}.Rule(policy.Everything[0])
	testenv.Must(t, err)
	tables[0].Rules = append(tables[0].Rules, pool)
	policy.SortRules(tables[0].Rules)
	tables = append(tables, policy.Table{Device: "va", Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{rule}})
	policy.SortTables(tables)
	_, err = n.Apply(tables, loader.ApplyOptions{Confirm: time.Minute})
	n.Close()
	testenv.Must(t, err)
	r.run("ADD", limits, p, "")
	r.run("ADD", strings.ReplaceAll(limits, "2000000", "4000000"), before, `"code": 11`)
	r.run("ADD", limits+`, "egress": {"within": "uplink"}`, r.pod(3), `"code": 11`)
	r.run("DEL", limits, before, "")
	n, err = loader.Write(loader.Options{BPFFS: r.bpffs})
	testenv.Must(t, err)
	_, err = n.Rollback()
	n.Close()
	testenv.Must(t, err)
	if got := r.tables(); strings.Count(got, p.name) != 12 || strings.Contains(got, before.name) || strings.Contains(got, "uplink") {
		t.Errorf("in force is\n%s", got)
	}
	r.run("DEL", limits, p, "")
	r.wantEmpty()
}

// Pools of a node are as somebody changes them, also if ADD comes again, and go with the last pod.
func TestNodePool(t *testing.T) {
	r := newRig(t)
	conf := func(rate string) string {
		return `"ingress": {"rate": "` + rate + `", "within": "node"}, "pools": {"node": {"rate": "1gbit"}}`
	}
	p, q := r.pod(1), r.pod(2)
	r.run("ADD", conf("1mbit"), p, "")
	pool, err := policy.Limit{Rate: 2e9, Note: "cni net"}.Pool("node")
	testenv.Must(t, err)
	r.put(policy.Table{Rules: []policy.Rule{pool}})
	ofOther := conf("1mbit") + `, "name": "other"` // network
	r.run("ADD", ofOther, q, "")
	r.run("ADD", conf("3mbit"), p, "")
	if got := r.tables(); !strings.Contains(got, "pool node: 2gbit") || !strings.Contains(got, "receives: 3mbit") {
		t.Errorf("in force is\n%s", got)
	}
	r.run("DEL", conf("1mbit"), p, "")
	if got := r.tables(); !strings.Contains(got, "pool node: 2gbit") || strings.Contains(got, "veth1") {
		t.Errorf("in force is\n%s", got)
	}
	r.run("DEL", ofOther, q, "")
	r.wantEmpty()
}

// A pod gets into the pool of its namespace that shapectl-kubernetes has made for another one.
func TestNamespacePool(t *testing.T) {
	r := newRig(t)
	p, q := r.pod(1), r.pod(2)
	r.run("ADD", limits, p, "")
	var pools []policy.Rule
	for _, l := range []policy.Limit{
		{Rate: 1e9, Note: policy.NamespaceNote, Name: policy.NamespacePool("shop", "egress", "")},
		{Rate: 2e6, Within: "namespace shop egress", Owner: policy.Owner{Device: "veth1", Direction: policy.Ingress}, Note: "cni net id-" + p.name + " eth0", Name: "shop/" + p.name + " sends"},
	} {
		pool, err := l.Pool(l.Name)
		testenv.Must(t, err)
		pools = append(pools, pool)
	}
	r.put(policy.Table{Rules: pools})
	r.run("ADD", limits, q, "")
	for line := range strings.Lines(r.tables()) {
		if in := strings.HasPrefix(line, "pool shop/"+q.name+" sends: "); in != (strings.Contains(line, "within=") && !strings.Contains(line, p.name)) {
			t.Errorf("in force is %s", line)
		}
	}
	r.run("CHECK", limits, q, "")
	r.run("DEL", limits, p, "")
	r.run("DEL", limits, q, "")
	r.wantEmpty()
}

func TestConfigurations(t *testing.T) {
	r := newRig(t)
	p := r.pod(1)
	long, short := strings.Repeat("n", 61)+"{namespace}", policy.ShortName(strings.Repeat("n", 61)+"shop")
	const most = `
pool NAME receives: 400gbit NOTE capacity=15000000000b excess=drop
veth1 egress by src 0.0.0.0/0: NAME receives NAME
veth1 egress by src ::/0: NAME receives NAME`
	for _, c := range []struct{ name, conf, want, says, refused string }{
		{"nothing", `"ingressRate": 0`, "", "", ""},
		{"of the runtime", `"runtimeConfig": {"bandWidth": {"ingressRate": 1000000, "ingressBurst": 2147483647}}`, `
pool NAME receives: 1mbit NOTE annotated {} capacity=128kb excess=drop
veth1 egress by src 0.0.0.0/0: NAME receives NAME
veth1 egress by src ::/0: NAME receives NAME`, "", ""},
		{"over the network", `"runtimeConfig": {"bandwidth": {"ingressRate": 1000000}}, "ingress": {"rate": "3mbit", "capacity": "100ms", "guarantee": "2mbit", "within": "node"},
			"pools": {"node": {"rate": "1gbit"}}`, `
pool node: 1gbit cni net capacity=37500000b excess=drop
pool NAME receives: 1mbit NOTE annotated {"capacity":"100ms","guarantee":"2mbit","rate":"3mbit"} capacity=12500b within=node guarantee=1mbit excess=drop
veth1 egress by src 0.0.0.0/0: NAME receives NAME
veth1 egress by src ::/0: NAME receives NAME`, "", ""},
		{"slow over the network", `"runtimeConfig": {"bandwidth": {"ingressRate": 8000}}, "ingress": {"capacity": "100ms"}`, `
pool NAME receives: 8kbit NOTE annotated {"capacity":"100ms"} capacity=1514b excess=drop
veth1 egress by src 0.0.0.0/0: NAME receives NAME
veth1 egress by src ::/0: NAME receives NAME`, "", ""},
		{"below the least", `"egressRate": 800, "egressBurst": 200`, `
pool NAME sends: 8kbit NOTE capacity=1514b excess=drop
veth1 ingress by dst 0.0.0.0/0: NAME sends NAME
veth1 ingress by dst ::/0: NAME sends NAME`, "egressRate 800 is below 8 kbit/s, the slowest rate; the pod gets 8 kbit/s", ""},
		{"above the most", `"ingressRate": 500000000000`, most, "ingressRate 500000000000 is above 400 Gbit/s, the fastest rate; the pod gets 400 Gbit/s", ""},
		{"unlimited", `"ingress": {"rate": "unlimited"}`, most, "", ""},
		{"no options", `"ingress": {}`, most, "", ""},
		{"shaped", `"ingressRate": 1000000, "ingressBurst": 400000, "shapedSubnets": ["10.0.0.1/8", "fd00::/8"]`, `
pool NAME receives: 1mbit NOTE capacity=50000b excess=drop
veth1 egress by src 10.0.0.0/8: NAME receives NAME
veth1 egress by src fd00::/8: NAME receives NAME`, "", ""},
		{"unshaped", `"runtimeConfig": {"bandwidth": {"egressRate": 1000000, "egressBurst": 400000}}, "unshapedSubnets": ["10.0.0.0/8"]`, `
pool NAME sends: 1mbit NOTE annotated {} capacity=50000b excess=drop
veth1 ingress by dst 0.0.0.0/0: NAME sends NAME
veth1 ingress by dst 10.0.0.0/8:  NAME
veth1 ingress by dst ::/0: NAME sends NAME`, "", ""},
		{"pools", `"ingress": {"within": "ns {namespace}", "guarantee": "2mbit", "share": "flow", "excess": "ecn"},
			"pools": {"node": {"rate": "1gbit", "share": "member"}, "ns {namespace}": {"rate": "100mbit", "within": "node"}, "other": {"rate": "1mbit"}}`, `
pool NAME receives: 400gbit NOTE capacity=15000000000b within=ns shop guarantee=2mbit share=flow excess=ecn
pool node: 1gbit cni net capacity=37500000b share=member excess=drop
pool ns shop: 100mbit cni net capacity=3750000b within=node excess=drop
veth1 egress by src 0.0.0.0/0: NAME receives NAME
veth1 egress by src ::/0: NAME receives NAME`, "", ""},
		{"all unshaped", `"ingressRate": 1000000, "ingressBurst": 400000, "unshapedSubnets": ["10.0.0.0/8", "0.0.0.0/0"` + strings.Repeat(`, "9.0.0.0/8"`, 9) + `]`, `
pool NAME receives: 1mbit NOTE capacity=50000b excess=drop
veth1 egress by src 0.0.0.0/0:  NAME
veth1 egress by src 9.0.0.0/8:  NAME
veth1 egress by src 10.0.0.0/8:  NAME
veth1 egress by src ::/0: NAME receives NAME`, "", ""},
		{"long name", `"ingressRate": 1000000, "ingressBurst": 400000, "ingress": {"within": "` + long + `"}, "pools": {"` + long + `": {"rate": "1gbit"}}`, `
pool NAME receives: 1mbit NOTE capacity=50000b within=` + short + ` excess=drop
pool ` + short + `: 1gbit cni net capacity=37500000b excess=drop
veth1 egress by src 0.0.0.0/0: NAME receives NAME
veth1 egress by src ::/0: NAME receives NAME`, "", ""},
		{"JSON types", `"ingress": {"rate": 10000000, "nat": true, "share": "host", "weight": 3, "within": "node"}, "pools": {"node": {"rate": "1gbit"}}`, `
pool node: 1gbit cni net capacity=37500000b excess=drop
pool NAME receives: 10mbit NOTE capacity=375000b within=node share=host excess=drop
veth1 egress by src 0.0.0.0/0: NAME receives NAME
veth1 egress by src ::/0: NAME receives NAME`, "", ""},
		{"just a rate", `"ingress": "unlimited"`, most, "", ""},
		{"not valid", `"ingress": 5`, "", "", `\"ingress\" cannot be of the JSON type number`},
		{"no number", `"ingressRate": "5"`, "", "", `\"ingressRate\" cannot be of the JSON type string`},
		{"not valid pool", `"pools": {"other": "1gbit", "node": 5}`, "", "", `\"pools.node\" cannot be of the JSON type number`},
		{"no value", `"pools": {"node": {"rate": null}}`, "", "", `\"pools.node\": the value of \"rate\" must be a text, a number, true or false`},
		{"misspelt", `"egres": {}`, "", "", `unknown key \"egres\"; did you mean \"egress\"?`},
		{"misspelt capability", `"capabilities": {"bandwith": true}`, "", "", `unknown capability \"bandwith\"; did you mean \"bandwidth\"?`},
		{"misspelt capabilities", `"capability": {"bandwidth": true}`, "", "", `unknown key \"capability\"; did you mean \"capabilities\"?`},
		{"no such key", `"colour": {}`, "", "", `unknown key \"colour\"; remove it`},
		{"known keys", `"ipam": {}, "dns": {}, "args": {}, "capabilities": {"mac": true, "bandwidth": true}, "cni.dev/attachments": []`, "", "", ""},
		{"misspelt namespace", `"ingress": {}, "pools": {"ns-{namespac}": {"rate": "1gbit"}}`, "", "", `\"ns-{namespac}\" has braces; only {namespace} may have them`},
		{"no interface", limits + `, "prevResult": {"interfaces": [null]}`, "", "", "an interface of prevResult is null"},
		{"no such pool", `"ingress": {"within": "nowhere"}`, "", "", "there is no such pool"},
		{"no such option", `"ingress": {"colour": "red"}`, "", "", "is not possible here; use rate, "},
		{"misspelt option", `"ingress": {"rates": "1mbit"}`, "", "", `unknown option \"rates\"; did you mean \"rate\"?`},
		{"twice", `"ingress": {"rate": "1mbit", "cir": "2mbit"}`, "", "", "rate is given twice; remove one of them"},
		{"no rate", `"ingressBurst": 1`, "", "", "ingressBurst needs ingressRate"},
		{"both", limits + `, "shapedSubnets": ["::/0"], "unshapedSubnets": ["::/0"]`, "", "", "exclude each other"},
		{"no network", limits + `, "shapedSubnets": ["here"]`, "", "", "here"},
	} {
		t.Log(c.name)
		_, says := r.run("ADD", c.conf, p, c.refused)
		if !strings.Contains(says, c.says) || (c.says == "") != (says == "") {
			t.Errorf("ADD says %q", says)
		}
		r.wantTables(strings.NewReplacer("NOTE", "cni net id-"+p.name+" eth0", "NAME", "shop/"+p.name).Replace(c.want))
		if c.refused == "" {
			r.run("CHECK", c.conf, p, "")
		}
		r.run("DEL", c.conf, p, "")
		r.wantEmpty()
	}
}

// Pods come and go in any order, several at once, and some processes are killed. Who was added has his limit, and in the end
// nothing is left.
func TestStorm(t *testing.T) {
	const pods = 8
	rounds := testenv.Rounds(t, 60)
	random := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	r := newRig(t)
	var all []testPod
	for i := range pods {
		all = append(all, r.pod(i))
	}
	added, unknown := map[testPod]bool{}, map[testPod]bool{}
	gc := func() string {
		valid := []types.GCAttachment{{ContainerID: "id-other", IfName: "eth0"}}
		for p := range added {
			valid = append(valid, types.GCAttachment{ContainerID: "id-" + p.name, IfName: "eth0"})
		}
		for p := range unknown { // a runtime does not know of these
			delete(unknown, p)
		}
		text, err := json.Marshal(valid)
		testenv.Must(t, err)
		return limits + `, "cni.dev/valid-attachments": ` + string(text)
	}
	for range rounds {
		var running sync.WaitGroup
		var lock sync.Mutex
		began := time.Now()
		for _, p := range all {
			command, kill := []string{"ADD", "DEL", "CHECK"}[random.IntN(3)], random.IntN(4) == 0
			after := time.Duration(random.Int64N(int64(30 * time.Millisecond)))
			if command == "ADD" && added[p] || command == "CHECK" && !added[p] {
				continue
			}
			cmd := r.command(command, limits, p, "1.0.0")
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			testenv.Must(t, cmd.Start())
			running.Go(func() {
				if kill {
					time.Sleep(after)
					cmd.Process.Kill()
				}
				err := cmd.Wait()
				lock.Lock()
				defer lock.Unlock()
				killed := cmd.ProcessState.ExitCode() < 0
				switch {
				case killed && command != "CHECK":
					delete(added, p)
					unknown[p] = true
				case killed:
				case err != nil:
					t.Errorf("%s: %v, %s", command, err, out.String())
				case command == "ADD":
					added[p] = true
					delete(unknown, p)
				case command == "DEL":
					delete(added, p)
					delete(unknown, p)
				}
			})
		}
		running.Wait()
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("a round took %v", took)
		}
		if random.IntN(4) == 0 {
			r.run("GC", gc(), all[0], "")
		}
		text := r.tables()
		for _, p := range all {
			if got := strings.Count(text, "shop/"+p.name+"\n"); !unknown[p] && got != map[bool]int{true: 4}[added[p]] {
				t.Fatalf("pod %s, added: %v, has %d rules:\n%s", p.name, added[p], got, text)
			}
		}
	}
	clear(added)
	r.run("GC", gc(), all[0], "")
	r.wantEmpty()
	for _, p := range all {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			chain, err := netinfo.Chain(testenv.Link(t, p.device).Attrs().Index, d, nil)
			if testenv.Must(t, err); len(chain) > 0 {
				t.Errorf("left on %s %v: %v", p.device, d, chain)
			}
		}
	}
}

// Inside `ip netns exec`, where /sys/fs/bpf is out of sight, limits outlive the plugin.
func TestOwnMounts(t *testing.T) {
	r := newRig(t)
	p := r.pod(1)
	cmd := r.command("ADD", limits, p, "0.3.1")
	for i, v := range cmd.Env {
		if strings.HasPrefix(v, "SHAPECTL_BPFFS=") {
			cmd.Env[i] = "SHAPECTL_BPFFS="
		}
	}
	self, err := os.Executable()
	testenv.Must(t, err)
	testenv.Must(t, bpffs.Mount(bpffs.Default))
	cmd.Path, cmd.Args = "/usr/bin/unshare", []string{"unshare", "--mount", "sh", "-c", "mount --make-rslave / && umount -l /sys/fs/bpf && exec " + self}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v, %s", err, out)
	}
	r.bpffs = ""
	if got := r.tables(); strings.Count(got, "shop/"+p.name) != 10 {
		t.Errorf("in force is\n%s", got)
	}
	r.run("DEL", limits, p, "")
	r.wantTables("")
}

// Pods without a namespace share no pool of one.
func TestNoNamespace(t *testing.T) {
	c := network{Ingress: options{"within": "ns-{namespace}"}}
	if _, _, err := c.limits(pod{}, func() (string, error) { return "veth1", nil }); err == nil || !strings.Contains(err.Error(), "gave no K8S_POD_NAMESPACE") {
		t.Error(err)
	}
}

// shapectl-kubernetes looks for the rules of a pod by this name.
func TestLongName(t *testing.T) {
	name := strings.Repeat("n", 253)
	c := network{Ingress: options{}}
	p := c.podOf(&skel.CmdArgs{Args: "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=" + name, IfName: "net1"})
	tables, _, err := c.limits(p, func() (string, error) { return "veth1", nil })
	testenv.Must(t, err)
	if pool, rule := tables[0].Rules[0].Label.Name, tables[1].Rules[0].Label.Name; rule != policy.ShortName("shop/"+name) || !strings.HasSuffix(pool, " net1 receives") {
		t.Errorf("the pod is called %q, its pool %q", rule, pool)
	}
}
