package doctor

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
)

func systemFinding(status report.Status, check, finding, advice string) []report.Finding {
	return []report.Finding{{Status: status, Check: check, Finding: finding, Advice: advice}}
}

func checkKernel(s System) []report.Finding {
	return systemFinding(report.OK, "kernel", s.Kernel, "")
}

func (s System) has(capability int) bool { return s.Capabilities&(1<<capability) != 0 }

func checkPermissions(s System) []report.Finding {
	switch missing := program.Missing(s.Capabilities); {
	case len(missing) > 0:
		return systemFinding(report.Failed, "permissions",
			"this process lacks "+strings.Join(missing, " and ")+", so it can set no rule", "run as root, or give it these")
	case !s.has(unix.CAP_SYS_ADMIN):
		return systemFinding(report.Note, "permissions",
			"enough for rules; without CAP_SYS_ADMIN the names of other programs are not known, and no bpffs can be mounted", "")
	}
	return systemFinding(report.OK, "permissions", "all that shapectl needs", "")
}

func checkPrograms(s System) []report.Finding {
	switch {
	case len(program.Missing(s.Capabilities)) > 0:
		return nil // they cannot load then
	case s.Probe != nil:
		return systemFinding(report.Failed, "programs",
			"the kernel does not load shapectl's program for this process: "+plain.OneLine(s.Probe),
			"in a container, seccomp or a lockdown of the host may forbid it")
	case !s.JIT:
		return systemFinding(report.Note, "programs",
			"the kernel loads shapectl's program but interprets it: limits are right, but each packet takes much more time",
			"enable the JIT compiler: sysctl net.core.bpf_jit_enable=1, then set a rule again")
	}
	return systemFinding(report.OK, "programs", "the kernel loads shapectl's program and compiles it (JIT)", "")
}

func checkHook(s System) []report.Finding {
	switch {
	case !s.has(unix.CAP_NET_ADMIN):
		return systemFinding(report.Note, "hook",
			"without CAP_NET_ADMIN it is not known whether the kernel has tcx, nor what else is attached to devices", "")
	case errors.Is(s.HookErr, loader.ErrNoTCX):
		return systemFinding(report.Failed, "hook", "SHAPECTL_HOOK=tcx, but "+s.HookErr.Error(), "leave it unset to attach by clsact")
	case s.Hook == loader.Clsact:
		return systemFinding(report.OK, "hook",
			"clsact: shapectl attaches a filter at the first free priority; filters of a lower one run before it", "")
	}
	return systemFinding(report.OK, "hook", "tcx: shapectl runs first on a device, before other programs and filters", "")
}

func checkBPFFS(s System) []report.Finding {
	fs := s.BPFFS
	switch {
	case !fs.Mounted && s.has(unix.CAP_SYS_ADMIN):
		return systemFinding(report.OK, "bpffs", "none on "+fs.Path+" yet; the first rule mounts one", "")
	case !fs.Mounted:
		return systemFinding(report.Failed, "bpffs",
			"none on "+fs.Path+", and this process may not mount one; rules need it to outlive the command",
			"as root: mount -t bpf bpf "+fs.Path+", or name another one in SHAPECTL_BPFFS")
	case fs.Untrusted != nil:
		return systemFinding(report.Failed, "bpffs", "not used: "+plain.OneLine(fs.Untrusted), "")
	case !fs.Writable:
		return systemFinding(report.Failed, "bpffs",
			"this process may not write to "+fs.Path+", so it can set no rule",
			"run as root, or name a bpffs of your own in SHAPECTL_BPFFS")
	}
	return systemFinding(report.OK, "bpffs", fs.Path+" is mounted and writable", "")
}

func checkKept(f Facts) []report.Finding {
	if len(f.Kept) == 0 {
		return nil
	}
	return systemFinding(report.Note, "leftovers",
		fmt.Sprintf("%s have no rule since the last change; their state is kept for a rollback: %s",
			plain.Count(len(f.Kept), "device direction"), plain.List(f.Kept)),
		"the next command that changes a rule frees it; so does "+plain.Suggest(f.Netns, "serve")+" after an hour")
}

// checkElsewhere finds programs without pins.
func checkElsewhere(f Facts) (findings []report.Finding) {
	if f.KnowsOthers {
		return nil // devices move
	}
	for _, at := range f.Elsewhere {
		device, direction, _ := strings.Cut(at, " ")
		findings = append(findings, report.Finding{
			Status: report.Failed, Check: "bpffs", Device: device, Direction: direction,
			Finding: "programs of shapectl have no pins in this bpffs: it was unmounted, or it is another one. Their rules cannot be shown or changed, and may be in force",
			Advice:  "flush them where that bpffs is still mounted; else remove them with 'tc filter del' or 'bpftool link detach', and set the rules again",
		})
	}
	return findings
}

// checkLeft finds pins of network namespaces that no longer exist.
func checkLeft(f Facts) (findings []report.Finding) {
	var dead []string
	for _, path := range f.Left {
		dead = append(dead, fmt.Sprintf("%q", path))
	}
	if len(dead) > 0 {
		findings = append(findings, systemFinding(report.Note, "leftovers",
			fmt.Sprintf("pins of %s that no longer exist: %s", plain.Count(len(dead), "network namespace"), plain.List(dead)),
			"the next command that changes a rule removes them; so does "+plain.Suggest(f.Netns, "serve"))...)
	}
	return findings
}
