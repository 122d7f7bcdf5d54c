package policyfile

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// random makes policies, and changes to them.
type random struct {
	*rand.Rand
	pools []string // that exist
}

// poolNames holds names of pools. A pool is within one before it.
var poolNames = []string{"uplink", "null", "Müller & Söhne", "12: #", "yes"}

func (r random) one(of ...string) string { return of[r.IntN(len(of))] }
func (r random) chance(percent int) bool { return r.IntN(100) < percent }

var somewhere = []Device{{Name: "eth0", L2Bytes: 14}, {Name: "eth1", L2Bytes: 14}, {Name: "tap0", L2Bytes: 14}, {Name: "tap1", L2Bytes: 14}, {Name: "wg0", L2Bytes: 0}, {Name: "x*y", L2Bytes: 14}}

// prefix returns one of few networks, so that files and changes overlap.
func (r random) prefix() string {
	n := r.IntN(8)
	switch r.IntN(6) {
	case 0:
		return r.one("0.0.0.0/0", "::/0", "any", "2001:db8::/128")
	case 1:
		return fmt.Sprintf("10.%d.0.0/16", n)
	case 2:
		return fmt.Sprintf("2001:db8:%d::/48", n)
	case 3:
		return fmt.Sprintf("2001:DB8:%d::%d", n, n)
	case 4:
		return fmt.Sprintf("10.0.%d.0/24", n)
	}
	return fmt.Sprintf("10.0.0.%d%s", n, r.one("", "/32"))
}

// networks returns the networks of a key.
func networks(key string) []netip.Prefix {
	if key == policy.Any {
		return policy.Everything[:]
	}
	p, err := policy.ParsePrefix(key)
	if err != nil {
		panic(err)
	}
	return []netip.Prefix{p}
}

// parts returns random parts of a rule, defaults or a plan.
func (r random) parts(key string) (parts []string) {
	may := func(percent int, part string) {
		if r.chance(percent) {
			parts = append(parts, part)
		}
	}
	within := func(percent int) {
		if len(r.pools) == 0 || !r.chance(percent) {
			return
		}
		parts = append(parts, "within: "+word(r.one(r.pools...)))
		may(30, "guarantee: "+r.one("8kbit", "10kbit", "none"))
		may(30, "weight: "+r.one("1", "2", "256"))
	}
	switch {
	case key == "rule" && len(r.pools) > 0 && r.chance(15):
		within(100)
		may(10, "overhead: 4")
		parts = append(parts, r.label(20)...)
		return parts
	case key == "rule" && r.chance(20):
		parts = append(parts, "rate: unlimited")
	case key == "rule" && r.chance(20):
		parts = append(parts, "plan: "+r.one("gold", "silver"))
		may(50, "cir: 3mbit")
	default:
		parts = append(parts, r.one("rate", "cir")+": "+r.one("1mbit", "10mbit", "1250000", "2.5MB/s", `"1gbit"`))
	}
	if parts[0] != "rate: unlimited" {
		may(20, "each: "+r.one("all", "host", "flow"))
		may(20, r.one("capacity", "burst")+": "+r.one("100ms", "64kb", "300ms", "1000000"))
		may(30, "algorithm: "+r.one("leaky", "leaky", "gcra"))
		leaky := parts[len(parts)-1] == "algorithm: leaky"
		may(30, "excess: "+r.one("ecn", "drop", "pass", "delay", "delay", "delay"))
		switch delays := parts[len(parts)-1] == "excess: delay"; {
		case leaky && !delays:
			may(60, "penalty: "+r.one("none", "fill", "30s"))
		case delays || key == "defaults":
			may(40, "ecn-above: "+r.one("5ms", "never", "1s"))
			if !leaky || key == "defaults" {
				may(60, "queue: "+r.one("50ms", "64kb", "1000000", "20000"))
				if key == "defaults" || !slices.Contains(parts, "each: flow") {
					may(40, "order: "+r.one("fifo", "sparse-first"))
				}
			}
		}
	}
	within(30)
	if own := strings.Join(parts, ", "); strings.Contains(own, "guarantee: ") && (strings.Contains(own, "each: host") || strings.Contains(own, "each: flow")) {
		may(80, "members: "+r.one("1", "5"))
	} else if !strings.Contains(own, "each: ") && !strings.Contains(own, "penalty: ") && !strings.Contains(own, "rate: unlimited") {
		may(20, "share: "+r.one("host", "flow", "none"))
	}
	if own := strings.Join(parts, ", "); !strings.Contains(own, "rate: unlimited") && !strings.Contains(own, "within: ") && r.chance(30) {
		parts = r.coloured(parts)
	}
	may(10, "fail: closed")
	may(20, "overhead: "+r.one("ethernet", "38", "-4", "38/84", "'pppoe-ptm,ether-vlan'"))
	may(10, "mpu: "+r.one("0", "64"))
	if key != "defaults" {
		parts = append(parts, r.label(20)...)
	}
	shadows := []string{"none", "5mbit", "{rate: 2mbit, each: host}", "{burst: 50ms, rate: 4mbit, overhead: ethernet}"}
	if slices.Contains(parts, "algorithm: trtcm") {
		shadows = []string{"none", "5mbit", "{rate: 2mbit, pir: 5mbit, pbs: 64kb}"}
	}
	may(20, "shadow: "+r.one(shadows...))
	r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
	return parts
}

// coloured returns parts without those that a rule with colours cannot have, and with colours.
func (r random) coloured(parts []string) []string {
	parts = slices.DeleteFunc(parts, func(part string) bool {
		key, _, _ := strings.Cut(part, ":")
		return slices.Contains([]string{"algorithm", "excess", "penalty", "ecn-above", "queue", "order", "share"}, key)
	})
	may := func(percent int, part string) {
		if r.chance(percent) {
			parts = append(parts, part)
		}
	}
	switch parts = append(parts, "algorithm: "+r.one("srtcm", "trtcm", "trtcm", "rfc4115")); parts[len(parts)-1] {
	case "algorithm: trtcm":
		parts = append(parts, "pir: "+r.one("1gbit", "2gbit"))
		may(40, "pbs: "+r.one("300ms", "64kb", "300000"))
	case "algorithm: rfc4115":
		parts = append(parts, "eir: "+r.one("8kbit", "1gbit"))
		may(40, "ebs: "+r.one("300ms", "64kb", "300000", "0"))
	default:
		may(40, "ebs: "+r.one("300ms", "64kb", "300000", "0"))
	}
	may(60, "colour-aware: "+r.one("true", "true", "false"))
	if slices.Contains(parts, "colour-aware: true") {
		may(50, "colours: "+r.one("{AF12: yellow, 63: red}", "{be: red}", "'AF12=yellow,CS1=red'"))
	}
	may(80, "within: none") // pools of devices would be in the way
	for _, colour := range []string{"green", "yellow", "red"} {
		may(30, colour+": "+r.one("pass", "drop", "ecn", "dscp:AF12", "dscp:0"))
	}
	return parts
}

// pool returns random parts of a pool. It can keep the guarantees of all pools after it.
func (r random) pool(name string) []string {
	parts := []string{"rate: 1gbit"}
	may := func(percent int, part string) {
		if r.chance(percent) {
			parts = append(parts, part)
		}
	}
	if len(r.pools) > 0 && r.chance(70) {
		parts = append(parts, "within: "+word(r.one(r.pools...)))
		if i := slices.Index(poolNames, name); i >= 0 {
			may(50, fmt.Sprintf("guarantee: %dmbit", 800>>i))
		}
		may(30, "weight: 7")
	}
	may(40, "share: "+r.one("none", "host", "/64", "flow", "member"))
	if slices.Contains(parts, "share: host") {
		may(50, "nat: true")
	}
	may(20, "excess: "+r.one("ecn", "delay"))
	may(20, r.one("capacity", "burst")+": "+r.one("10ms", "1mb"))
	may(20, "note: "+r.one("alice", "' '' '"))
	r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
	return parts
}

// ownPool returns the pool of a device or direction, or not.
func (r random) ownPool(indent, percent int) []string {
	if !r.chance(percent) {
		return nil
	}
	return []string{"pool:" + r.one(" 5mbit", r.value(indent, r.pool("own")))}
}

// label returns a name and a note, or not.
func (r random) label(percent int) (parts []string) {
	if r.chance(percent) {
		parts = append(parts, "name: "+r.one("alice", "Bob B.", "'O''Brien'", `"a \"b\", {c}: #1"`, "Müller  # Co", "12", `""`))
	}
	if r.chance(percent) {
		parts = append(parts, "note: "+r.one("alice", "pays late", `"\u200d \U0001f600"`, "''"))
	}
	return parts
}

// value returns a mapping of parts, in braces or in lines.
func (r random) value(indent int, parts []string) string {
	if r.chance(70) {
		return " {" + strings.Join(parts, r.one(", ", ",", " , ", ",\n"+strings.Repeat(" ", indent+3))) + r.one("", "", ",") + "}" + r.comment()
	}
	return r.lines(indent+1+r.IntN(4), parts)
}

func (r random) lines(indent int, entries []string) string {
	s := r.comment()
	for _, e := range entries {
		for r.chance(20) {
			s += "\n" + r.one("", strings.Repeat(" ", r.IntN(indent+4))+"# above "+r.one("a", "b", "c"))
		}
		s += "\n" + strings.Repeat(" ", indent) + e
		if !strings.Contains(e, "#") {
			s += r.comment()
		}
	}
	return s
}

func (r random) comment() string { return r.one("", "", "  # it's {so}", " #") }

func (r random) quoted(key string) string {
	return r.one(key, key, key, `"`+key+`"`, "'"+key+"'")
}

// rules returns the entries of a direction.
func (r random) rules(indent int, defaults bool) (entries []string) {
	if r.chance(20) {
		entries = append(entries, "match: "+r.one("dst", "src"))
	}
	if defaults && r.chance(30) {
		entries = append(entries, "defaults:"+r.value(indent, r.parts("defaults")))
	}
	if defaults {
		entries = append(entries, r.label(10)...)
		entries = append(entries, r.ownPool(indent, 10)...)
	}
	seen := map[netip.Prefix]bool{}
	for range r.IntN(6) {
		prefix := r.prefix()
		all := networks(prefix)
		if slices.ContainsFunc(all, func(p netip.Prefix) bool { return seen[p] }) {
			continue
		}
		for _, p := range all {
			seen[p] = true
		}
		e := r.quoted(prefix) + ": " + r.one("10mbit", "unlimited", "gold", "silver", "'3mbit'")
		if r.chance(50) {
			e = r.quoted(prefix) + ":" + r.value(indent, r.parts("rule"))
		}
		entries = append(entries, e)
	}
	r.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
	return entries
}

// file returns a policy, which may not be valid.
func (r random) file() []byte {
	if r.chance(15) {
		return r.inBraces()
	}
	indent := 1 + r.IntN(4)
	s := r.one("", "# top\n\n", "---\n", "\uFEFF")
	var pools []string
	for _, name := range poolNames {
		if r.chance(60) {
			pools = append(pools, r.one(word(name), strconv.Quote(name))+":"+r.one(" 1gbit", r.value(indent, r.pool(name)), r.value(indent, r.pool(name))))
			r.pools = append(r.pools, name)
		}
	}
	if len(pools) > 0 {
		s += "pools:" + r.lines(indent, pools) + "\n"
	}
	if r.chance(20) {
		s += "colours: {" + r.one("AF12: yellow", "CS1: red, 63: yellow") + "}" + r.comment() + "\n"
	}
	if r.chance(30) {
		s += "defaults:" + r.value(0, r.parts("defaults")) + "\n"
	}
	s += "plans:" + r.lines(indent, []string{
		"gold:" + r.value(indent, r.parts("plan")),
		"silver:" + r.value(indent, r.parts("plan")),
	}) + "\n"
	var devices []string
	for _, key := range []string{"eth0", "'eth?'", "tap*", "'*p[0]'", "tap1", "wg0", `"x\\*y"`, "gone0"} {
		if r.chance(40) {
			continue
		}
		var directions []string
		for _, d := range []string{"egress", "ingress"} {
			entries := r.rules(3*indent, true)
			switch {
			case r.chance(30):
			case len(entries) == 0:
				directions = append(directions, d+": {}"+r.comment())
			default:
				directions = append(directions, d+":"+r.lines(3*indent, entries))
			}
		}
		if r.chance(20) {
			directions = append(directions, "defaults:"+r.value(2*indent, r.parts("defaults")))
		}
		directions = append(directions, r.label(15)...)
		directions = append(directions, r.ownPool(2*indent, 30)...)
		if len(directions) == 0 {
			devices = append(devices, key+": {}"+r.comment())
		} else {
			devices = append(devices, key+":"+r.lines(2*indent, directions))
		}
	}
	if len(devices) == 0 {
		s += "devices: {}"
	} else {
		s += "devices:" + r.lines(indent, devices)
	}
	s += r.one("", "\n", "\n\n# end\n", "\n...\n")
	if r.chance(20) {
		s = strings.ReplaceAll(s, "\n", "\r\n")
	}
	return []byte(s)
}

// inBraces returns a policy that is all in braces, like JSON.
func (r random) inBraces() []byte {
	entries := func(entries []string) string {
		return "{" + strings.Join(entries, r.one(", ", ",\n  ")) + "}"
	}
	var devices []string
	for _, key := range []string{"eth0", `"tap*"`, "wg0"} {
		var rules []string
		for _, prefix := range []string{`"10.0.0.0/24"`, "10.0.0.1", "2001:db8::/32", "::/0"} {
			if r.chance(60) {
				rules = append(rules, prefix+": "+r.one(`"10mbit"`, "{rate: 1mbit, each: host}", "unlimited"))
			}
		}
		devices = append(devices, key+": "+entries([]string{r.one("egress", `"ingress"`) + ": " + entries(rules)}))
	}
	return []byte(r.one("{devices: ", `{ "devices" : `, "{\n  devices: ") + entries(devices) + r.one("}", "\n}\n"))
}

// limit returns the limit of some parts.
func (r random) limit(parts []string) (l policy.Limit) {
	for _, part := range parts {
		key, value, _ := strings.Cut(part, ": ")
		if value = strings.Trim(value, `"'`); key == "name" {
			value, _, _ = strings.Cut(value, "  #")
		}
		if inner, ok := strings.CutPrefix(value, "{"); ok && key == "colours" {
			value = strings.NewReplacer(": ", "=", ", ", ",", "}", "").Replace(inner)
		}
		if key != "shadow" {
			if err := l.Set(key, value); err != nil {
				panic(err)
			}
		} else if value != noShadow {
			l.Shadow = &policy.Draft{Limit: policy.Limit{Rate: policy.Rate(1+r.IntN(3)) * 1_000_000, Overhead: policy.Overhead(r.one("", "7"))}}
			if slices.Contains(parts, "algorithm: trtcm") && r.chance(50) {
				l.Shadow.Colours.PIR = 3_000_000
			}
		}
	}
	return l
}

// rule returns a valid rule for a network.
func (r random) rule(p netip.Prefix, l2Bytes uint8) policy.Rule {
	for {
		all := append([]string{"- rate: 8mbit"}, r.parts("plan")...)[1:]
		if r.chance(20) {
			all = []string{"rate: unlimited"}
		}
		l := r.limit(all)
		if rule, err := l.Rule(p); err == nil {
			rule.Label.Plan = r.shown()
			return rule.On(l2Bytes)
		}
	}
}

// shown returns the name of a plan, or "".
func (r random) shown() string {
	return r.one("", "", "", "gold", "gold", "silver", "alice", "Gold 100", "null", "10mbit", "\"#, {}:", "unlimited", "\u00ad\ufeff\ufffe\u00a0")
}

// changedPools returns the pools of tables with random changes, and their names. A pool stays if rules of tables
// are within it.
func (r *random) changedPools(tables []policy.Table, percent int) (pools policy.Table) {
	had, used := map[string]policy.Rule{}, map[string]bool{}
	for _, t := range tables {
		for _, rule := range t.Rules {
			if rule.Pool {
				had[rule.Label.Name] = rule
			} else {
				used[string(rule.Within)] = true
			}
		}
	}
	above := map[string]bool{} // a pool that was above others might get within them
	for i := range had {
		used[string(had[i].Within)], above[string(had[i].Within)] = true, true
	}
	others := slices.DeleteFunc(slices.Sorted(maps.Keys(had)), func(name string) bool { return slices.Contains(poolNames, name) })
	r.pools = nil
	for _, name := range slices.Concat(poolNames, others) {
		p, ok := had[name]
		switch {
		case ok && !used[name] && r.chance(percent), !ok && !r.chance(percent):
			continue
		case !ok || !above[name] && r.chance(percent):
			l := r.limit(r.pool(name))
			var err error
			if p, err = l.Pool(name); err != nil {
				panic(err)
			}
			_, p.Label.Line = p.Label.Owner.Set(r.one("", "tap7", "tap7 egress", "br-lan ingress 12: #")), policy.LineOf(r.one("", "12", "eth0"))
		}
		r.pools = append(r.pools, name)
		pools.Rules = append(pools.Rules, p)
	}
	policy.SortRules(pools.Rules)
	return pools
}

// changed returns tables with random changes.
func (r random) changed(tables []policy.Table) (out []policy.Table) {
	percent := r.IntN(40) * r.IntN(3)
	if pools := r.changedPools(tables, percent); len(pools.Rules) > 0 {
		out = append(out, pools)
	}
	for _, d := range somewhere {
		for _, direction := range []policy.Direction{policy.Egress, policy.Ingress} {
			t := policy.Table{Device: d.Name, Direction: direction, Match: direction.FarSide()}
			if i := slices.IndexFunc(tables, func(t policy.Table) bool { return t.Device == d.Name && t.Direction == direction }); i >= 0 {
				t = tables[i]
			} else if !r.chance(percent) {
				continue
			}
			rules := map[netip.Prefix]policy.Rule{}
			for _, rule := range t.Rules {
				rules[rule.Prefix] = rule
				switch {
				case r.chance(percent / 2):
					delete(rules, rule.Prefix)
				case r.chance(percent):
					rules[rule.Prefix] = r.rule(rule.Prefix, d.L2Bytes)
				case r.chance(percent):
					rule.Label = policy.Label{Plan: r.shown(), Name: r.one("", "alice", "12"), Note: r.one("", "x", " \u00a0é'\"#\U0010ffff")}
					rules[rule.Prefix] = rule
				case r.chance(percent):
					rule.Rate, rule.Capacity = 7_000_000, 5_000_000
					if rule.Validate() == nil {
						rules[rule.Prefix] = rule
					}
				}
			}
			for r.chance(percent) {
				for _, p := range networks(r.prefix()) {
					rules[p] = r.rule(p, d.L2Bytes)
				}
			}
			if r.chance(percent) {
				t.Match = policy.Match(r.IntN(2))
			}
			t.Rules = nil
			for _, rule := range rules {
				t.Rules = append(t.Rules, rule)
			}
			policy.SortRules(t.Rules)
			if len(t.Rules) > 0 && !r.chance(percent/2) {
				out = append(out, t)
			}
		}
	}
	policy.SortTables(out)
	return out
}

// damaged returns a file with random changes to its text.
func (r random) damaged(text []byte) []byte {
	for range 1 + r.IntN(3) {
		lines := bytes.SplitAfter(text, []byte("\n"))
		line := r.IntN(len(lines))
		switch r.IntN(5) {
		case 0:
			lines = slices.Insert(lines, line, lines[r.IntN(len(lines))])
		case 1:
			lines = slices.Delete(lines, line, line+1)
		case 2:
			lines[line] = append([]byte(r.one(" ", "  ", "\t", "- ", "? ", "# ")), lines[line]...)
		default:
			at := r.IntN(len(lines[line]) + 1)
			put := r.one("{", "}", "[", "]", ",", ":", ": ", " #", "#", "'", "\"", "&a ", "*a", "!", "|", ">", "-", "?", "%", "@", "\t", "\n", " ", "~", "\\", "é")
			lines[line] = slices.Concat(lines[line][:at], []byte(put), lines[line][min(len(lines[line]), at+r.IntN(2)):])
		}
		text = bytes.Join(lines, nil)
	}
	return text
}

// TestRandom examines random files, whole and damaged.
func TestRandom(t *testing.T) {
	r := random{Rand: rand.New(rand.NewPCG(testenv.Seed(t), 0))}
	for n, valid := 0, 0; valid < 100; n++ { // with fewer valid files, the test tells little
		if n == 4000 {
			t.Fatalf("of %d files only %d were valid", n, valid)
		}
		text := r.file()
		if examine(t, r, text) {
			valid++
		}
		examine(t, r, r.damaged(text))
	}
}

// examine checks that a text parses the same with and without clear lines cut out. If it is a policy,
// examine changes its rules and checks that Write makes a file with these rules.
func examine(t *testing.T, r random, text []byte) (valid bool) {
	t.Helper()
	f, err := Parse("random.yaml", text)
	if whole, errWhole := parse("random.yaml", text, false); !reflect.DeepEqual(whole, f) || !reflect.DeepEqual(errWhole, err) {
		t.Fatalf("%v; as a whole: %v; of\n%s", err, errWhole, text)
	}
	if err != nil {
		for _, e := range err.(Errors) {
			if e.Line < 1 || e.Column < 1 || e.Message == "" {
				t.Errorf("an error is without a place or a reason: %v", e)
			}
		}
		return false
	}
	tables := r.changed(tablesOf(f))
	for _, table := range tables {
		for _, rule := range table.Rules {
			limit := policy.Draft{}.Missing(&rule)
			made, err := limit.Rule(rule.Prefix)
			if rule.Pool {
				made, err = limit.Pool(rule.Label.Name)
			}
			if err != nil || made != withoutPlan(rule) {
				t.Errorf("%v: a limit of %+v makes %+v", err, rule, made)
			}
		}
	}
	var out bytes.Buffer
	if err := Write(&out, tables); err != nil {
		t.Fatal(err)
	}
	f = same(t, out.Bytes(), tables)
	var plain, again bytes.Buffer
	if err := errors.Join(Write(&plain, tables), Write(&again, tablesOf(f))); err != nil || plain.String() != again.String() {
		t.Fatalf("%v: written twice, it became\n%s\nof\n%s", err, &again, &plain)
	}
	return true
}

func withoutPlan(r policy.Rule) policy.Rule {
	r.Label.Plan = ""
	return r
}

// tablesOf returns the tables of the devices that at most one pattern matches.
func tablesOf(f *File) (tables []policy.Table) {
	pools := f.Pools()
	for _, d := range somewhere {
		of, _ := f.For(d)
		own, _ := f.OwnPools(d)
		tables, pools.Rules = append(tables, of...), append(pools.Rules, own...)
	}
	if policy.SortRules(pools.Rules); len(pools.Rules) > 0 {
		tables = append(tables, pools)
	}
	policy.SortTables(tables)
	return tables
}

// same parses a text and checks that its rules are those of tables.
func same(t *testing.T, text []byte, tables []policy.Table) *File {
	t.Helper()
	f, err := Parse("written.yaml", text)
	if err != nil {
		t.Fatalf("%v\nin\n%s", err, text)
	}
	got, _, err := f.Tables(somewhere)
	if err != nil {
		t.Fatal(err)
	}
	if len(got)+len(tables) > 0 && !reflect.DeepEqual(got, tables) {
		for _, d := range policy.Diff(got, tables) {
			t.Errorf("%s %v: got %+v, want %+v", d.Device, d.Direction, d.Have, d.Want)
		}
		t.Fatalf("in\n%s", text)
	}
	return f
}
