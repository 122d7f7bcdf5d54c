package doctor

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

func (s System) has(capability int) bool { return s.Capabilities&(1<<capability) != 0 }

func (f *Facts) checkPermissions() {
	f.say(nil, report.OK, "kernel", f.System.Kernel, "")
	switch missing := program.Missing(f.System.Capabilities); {
	case len(missing) > 0:
		f.say(nil, report.Failed, "permissions", "this process lacks "+strings.Join(missing, " and ")+", so it can set no rule", "run as root, or give it these")
	case !f.System.has(unix.CAP_SYS_ADMIN):
		f.say(nil, report.Note, "permissions", "enough for rules; without CAP_SYS_ADMIN the names of other programs are not known, and no bpffs can be mounted", "")
	default:
		f.say(nil, report.OK, "permissions", "all that shapectl needs", "")
	}
}

func (f *Facts) checkPrograms() {
	switch {
	case len(program.Missing(f.System.Capabilities)) > 0: // they cannot load then
	case f.System.Probe != nil:
		f.say(nil, report.Failed, "programs", "the kernel does not load shapectl's program for this process: "+plain.OneLine(f.System.Probe),
			"in a container, seccomp or a lockdown of the host may forbid it")
	case !f.System.JIT:
		f.say(nil, report.Note, "programs", "the kernel loads shapectl's program but interprets it: limits are right, but each packet takes much more time",
			"enable the JIT compiler: sysctl net.core.bpf_jit_enable=1, then set a rule again")
	default:
		f.say(nil, report.OK, "programs", "the kernel loads shapectl's program and compiles it (JIT)", "")
	}
}

func (f *Facts) checkHook() {
	switch s := f.System; {
	case !s.has(unix.CAP_NET_ADMIN):
		f.say(nil, report.Note, "hook", "without CAP_NET_ADMIN it is not known whether the kernel has tcx, nor what else is attached to devices", "")
	case errors.Is(s.HookErr, loader.ErrNoTCX):
		f.say(nil, report.Failed, "hook", "SHAPECTL_HOOK=tcx, but "+s.HookErr.Error(), "leave it unset to attach by clsact")
	case s.Hook == loader.Clsact:
		f.say(nil, report.OK, "hook", "clsact: shapectl attaches a filter at the first free priority; filters of a lower one run before it", "")
	default:
		f.say(nil, report.OK, "hook", "tcx: shapectl runs first on a device, before other programs and filters", "")
	}
}

func (f *Facts) checkBPFFS() {
	switch fs := f.System.BPFFS; {
	case f.Lost != "":
		f.say(nil, report.Failed, "programs", "something deleted the pin "+f.Lost+", so not all limits are in force",
			"apply the policy again or set any rule, which restores it; "+f.suggest("serve")+" does, too")
	case !fs.Mounted && f.System.has(unix.CAP_SYS_ADMIN):
		f.say(nil, report.OK, "bpffs", "none on "+fs.Path+" yet; the first rule mounts one", "")
	case !fs.Mounted:
		f.say(nil, report.Failed, "bpffs", "none on "+fs.Path+", and this process may not mount one; rules need it to outlive the command",
			"as root: mount -t bpf bpf "+fs.Path+", or name another one in SHAPECTL_BPFFS")
	case fs.Untrusted != nil:
		f.say(nil, report.Failed, "bpffs", "not used: "+plain.OneLine(fs.Untrusted), "")
	case !fs.Writable:
		f.say(nil, report.Failed, "bpffs", "this process may not write to "+fs.Path+", so it can set no rule", "run as root, or name a bpffs of your own in SHAPECTL_BPFFS")
	default:
		f.say(nil, report.OK, "bpffs", fs.Path+" is mounted and writable", "")
	}
}

func (f *Facts) checkChange() {
	switch f.Change {
	case maps.Pending:
		f.say(nil, report.Note, report.Change, fmt.Sprintf("%sreverts in %v", report.LastNotConfirmed(f.MadeBy), time.Duration(f.Until).Round(time.Second)),
			f.suggest("confirm")+" if all is well, else "+f.suggest("rollback"))
	case maps.Expired:
		f.say(nil, report.Note, report.Change, "the last change was not confirmed in time, and reverted", "")
	case maps.Committed:
		f.say(nil, report.OK, report.Change, f.suggest("rollback")+" would undo the last change", "")
	}
}

// checkLeft finds pins that are kept for a rollback, or of network namespaces that no longer exist.
func (f *Facts) checkLeft() {
	if n := len(f.Kept); n > 0 {
		f.say(nil, report.Note, "leftovers",
			fmt.Sprintf("%s have no rule since the last change; their state is kept for a rollback: %s", plain.Count(n, "device direction"), plain.List(f.Kept)),
			"the next command that changes a rule frees it; so does "+f.suggest("serve")+" after an hour")
	}
	if n := len(f.Left); n > 0 {
		f.say(nil, report.Note, "leftovers", fmt.Sprintf("pins of %s that no longer exist: %s", plain.Count(n, "network namespace"), plain.List(f.Left)),
			"the next command that changes a rule removes them; so does "+f.suggest("serve"))
	}
}

// checkElsewhere finds programs without pins.
func (f *Facts) checkElsewhere() {
	if f.KnowsOthers {
		return // devices move
	}
	for _, at := range f.Elsewhere {
		device, direction, _ := strings.Cut(at, " ")
		f.findings = append(f.findings, report.Finding{
			Status: report.Failed, Check: "bpffs", Device: device, Direction: direction,
			Finding: "programs of shapectl have no pins in this bpffs: it was unmounted, or it is another one. Their rules cannot be shown or changed, and may be in force",
			Advice:  "flush them where that bpffs is still mounted; else remove them with 'tc filter del' or 'bpftool link detach', and set the rules again",
		})
	}
}

// fewPeriods is how many later periods of a quota at least are known while serve renews them.
const fewPeriods = 10

// checkPeriods finds quotas that may not begin anew in time.
func (f *Facts) checkPeriods() {
	for _, p := range f.Periods {
		if p.Err != nil {
			f.say(nil, report.Warning, "quotas", fmt.Sprintf("the time zone of quotas by %q is not known here: %s", p.Name, plain.OneLine(p.Err)),
				"install the package tzdata, or give these quotas another --quota-zone")
		}
		if p.Known < fewPeriods {
			f.say(nil, report.Warning, "quotas", fmt.Sprintf("only %s of quotas by %q are known; after the last one, no quota begins anew", plain.Count(p.Known, "later period"), p.Name),
				"any command that changes a rule renews them, as "+f.suggest("serve")+" does; if that fails, see that the clock is right")
		}
	}
	if f.Unset && len(f.Periods) > 0 {
		f.say(nil, report.Warning, "quotas", "the clock was never set, so periods of quotas begin at wrong times", "set it, such as by NTP")
	}
}
