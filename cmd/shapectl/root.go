package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

// Exit codes.
const (
	exitDone     = 0
	exitInput    = 1 // bad usage or input; nothing was changed
	exitKernel   = 2 // the kernel refused
	exitDiffers  = 3 // diff found differences
	exitDegraded = 4 // partly done, or not all in force
	exitMissing  = 5 // a permission or kernel feature is missing
)

// env is what commands have of the world.
type env struct {
	in       io.Reader
	out, err io.Writer // while a command runs, all that is written there is escaped
	getenv   func(string) string

	// screen is err as it is, for what moves the cursor and has no names in it; nil if that is no terminal.
	screen      io.Writer
	outIsScreen bool // out is a terminal

	json    bool
	netns   string // "" for the one this is
	setupFQ bool
}

// setNetns refuses an empty name: it is more likely that of a variable that was never set than a way to say "here".
func (e *env) setNetns(name string) error {
	if name == "" {
		return errors.New("a network namespace has a name; leave -n out for the one this is")
	}
	e.netns = name
	return nil
}

// An exitError has an exit code that its error alone does not tell.
type exitError struct {
	error
	code int
}

func (e exitError) Unwrap() error { return e.error }

// These were told about already.
var (
	errDegraded error = exitError{errors.New("degraded"), exitDegraded}
	errDiffers  error = exitError{errors.New("there are differences"), exitDiffers}
)

func wasTold(err error) bool { return errors.Is(err, errDegraded) || errors.Is(err, errDiffers) }

// inputError is that something is the user's to mend; nothing was changed.
func inputError(err error) error { return exitError{err, exitInput} }

func inputf(format string, args ...any) error { return inputError(fmt.Errorf(format, args...)) }

// run runs a command line and reports its exit code.
func (e *env) run(args []string) int {
	if isTerminal(e.err) {
		e.screen = e.err
	}
	e.outIsScreen = isTerminal(e.out)
	out, told := plain.NewWriter(e.out), plain.NewWriter(e.err)
	e.out, e.err = out, told
	code := e.runPlain(args)
	if err := errors.Join(out.Flush(), told.Flush()); err != nil && code == exitDone {
		return exitDegraded
	}
	return code
}

func (e *env) runPlain(args []string) int {
	root := e.command()
	root.SetArgs(args)
	root.SetOut(e.out)
	root.SetErr(e.err)
	err := root.Execute()
	if err == nil {
		return exitDone
	}
	if wasTold(err) {
		return exitCode(err)
	}
	var mistakes policyfile.Errors
	if errors.As(err, &mistakes) {
		doing, _, _ := strings.Cut(err.Error(), mistakes.Error())
		fmt.Fprintln(e.err, strings.TrimPrefix(err.Error(), doing))
		err = inputf("%s%s; nothing was changed", doing, plain.Count(len(mistakes), "error"))
	}
	e.say("shapectl: %w", err)
	return exitCode(err)
}

// say writes a line on stderr: one, whatever is in the arguments.
func (e *env) say(format string, args ...any) {
	fmt.Fprintln(e.err, plain.OneLine(fmt.Errorf(format, args...)))
}

// degraded tells what kept a command from doing all of it.
func (e *env) degraded(format string, args ...any) error {
	e.say("shapectl: "+format, args...)
	return errDegraded
}

// print writes an answer, which text writes for people to read.
func (e *env) print(answer any, text func(io.Writer) error) error {
	if e.json {
		return report.JSON(e.out, answer)
	}
	return text(e.out)
}

// missing are errors of a permission or kernel feature that is not there.
var missing = []error{
	fs.ErrPermission, ebpf.ErrNotSupported, loader.ErrNoTCX, program.ErrPerfmon, loader.ErrNoClsact, fq.ErrNoFQ, fq.ErrNoIfb,
	fq.ErrOldIfb, loader.ErrUntrusted,
}

func exitCode(err error) int {
	var own exitError
	switch {
	case errors.As(err, &own):
		return own.code
	case slices.ContainsFunc(missing, func(m error) bool { return errors.Is(err, m) }):
		return exitMissing
	}
	return exitKernel
}

func (e *env) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "shapectl",
		Short: "Hold network traffic to the rate that was agreed",
		Long: `shapectl holds network traffic to the rate that was agreed, per network, host
or flow, with eBPF at the traffic control hooks of any device.

  shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host
  shapectl show
  shapectl delete eth0 egress 10.0.0.0/24
  shapectl apply policy.yaml --confirm 60s

A rule is named by device, direction and network. Egress leaves the device,
ingress enters it; the network is the address on the far side. Rules keep
working when the command has ended.

Exit codes: 0 done; 1 bad usage or input, nothing was changed; 2 the kernel
refused; 3 diff found differences; 4 partly done or degraded; 5 a permission or kernel feature is missing.

Environment: SHAPECTL_HOOK=tcx|clsact attaches a device that has no rules yet that
way only; SHAPECTL_BPFFS is the bpffs in which to pin, if not the
` + loader.DefaultBPFFS + ` that init sees; SHAPECTL_GROUP is the group whose members may read
the rules, if not '` + loader.DefaultGroup + `'.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(_ *cobra.Command, given []string) error {
			if len(given) > 0 {
				return inputf("unknown command %q; 'shapectl --help' lists them", given[0])
			}
			return nil
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return inputf("no command was given; 'shapectl --help' lists them")
		},
	}
	root.PersistentFlags().BoolVarP(&e.json, "json", "j", false, "print JSON")
	root.PersistentFlags().VarP(flagValue{"name", "", e.setNetns}, "netns", "n", "work in the network namespace of this `name`")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return inputf("%s: %w; see '%s --help'", cmd.Name(), err, cmd.CommandPath())
	})
	root.SetHelpCommand(&cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Show the help of a command",
		RunE: func(_ *cobra.Command, given []string) error {
			cmd, rest, err := root.Find(given)
			if err != nil || len(rest) > 0 {
				return inputf("help: there is no command %q; 'shapectl --help' lists them", strings.Join(given, " "))
			}
			cmd.InitDefaultHelpFlag() // which --help would have made
			return cmd.Help()
		},
	})
	root.AddCommand(setCommand(e), deleteCommand(e), flushCommand(e), showCommand(e), askCommand(e), explainCommand(e),
		applyCommand(e), diffCommand(e), exportCommand(e), importCommand(e), confirmCommand(e), rollbackCommand(e),
		watchCommand(e), replayCommand(e), doctorCommand(e), versionCommand(e), completionCommand(e))
	for _, cmd := range root.Commands() {
		completeChoices(cmd)
	}
	return root
}

// args checks the number of arguments, with an error that says which there are.
func args(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, given []string) error {
		if len(given) < least || len(given) > most {
			return inputf("%s: %d arguments where it takes '%s'", cmd.Name(), len(given), cmd.UseLine())
		}
		return nil
	}
}

// options say how to reach the state.
func (e *env) options() (loader.Options, error) {
	o := loader.Options{BPFFS: e.getenv("SHAPECTL_BPFFS"), Group: e.getenv("SHAPECTL_GROUP"), SetupFQ: e.setupFQ}
	switch mode := e.getenv("SHAPECTL_HOOK"); mode {
	case "", string(loader.Auto), string(loader.TCX), string(loader.Clsact):
		o.Mode = loader.Mode(mode)
	default:
		return o, inputf("SHAPECTL_HOOK=%s: use tcx, clsact or auto", mode)
	}
	return o, nil
}

type opener func(loader.Options) (*loader.Namespace, error)

// with runs f on the state of the namespace that was asked for. doing says what
// for, and is put before the errors, which get a word on what to do about them.
func (e *env) with(open opener, doing string, f func(*loader.Namespace) error) error {
	o, err := e.options()
	if err != nil {
		return err
	}
	// Nobody else should have to wait until a pager has shown the last page.
	out, text := e.out, new(pages)
	e.out = text
	err = loader.In(e.netns, func() error {
		n, err := open(o)
		if err != nil {
			return err
		}
		defer n.Close()
		err = f(n)
		if takes := n.Unknown(); takes != "" && (err == nil || wasTold(err)) {
			e.say("shapectl: whether the rules are in force is not known: to see what is attached takes %s", takes)
		}
		if collected := n.Collected(); err == nil && len(collected) > 0 {
			e.say("shapectl: removed the rules of deleted devices: %s", plain.List(collected))
		}
		return err
	})
	e.out = out
	if _, err := text.WriteTo(out); err != nil {
		e.say("shapectl: %s: done, but the answer could not be written: %w", doing, err)
		return errDegraded
	}
	if err == nil || wasTold(err) {
		return err
	}
	return fmt.Errorf("%s: %w", doing, e.advise(err))
}

// advice is what to do about errors; of those with input, nothing was changed, and they are the user's to mend.
var advice = []struct {
	of    error
	input bool
	says  string
}{
	{fq.ErrTaken, true, ""},
	{fq.ErrFixed, true, ""},
	{fq.ErrNoFQ, false, "; load that module, use a kernel that has it, or let excess be dropped"},
	{fq.ErrNoIfb, false, "; load that module, use a kernel that has it, or let excess be dropped"},
	{fq.ErrOldIfb, false, "; let excess be dropped, or limit the traffic where it leaves"},
	{loader.ErrNoNamespace, true, "; 'ip netns' lists them"},
	{netinfo.ErrUnsupportedDevice, true, ""},
	{loader.ErrMatch, true, "; match the side that they do, or flush them first"},
	{loader.ErrPending, true, "; 'shapectl confirm' it or 'shapectl rollback' first"},
	{loader.ErrBusy, false, "; nothing was changed, try again"},
	{loader.ErrNoChange, true, ": either no policy was applied, or that has been seen to, or another command changed rules since; see 'shapectl show'"},
	{loader.ErrTooLate, true, "; apply the policy again"},
	{maps.ErrFull, true, "; delete rules that are not needed, or join them in a wider one"},
	{maps.ErrOtherLayout, false, "; nothing was changed: export all rules with that version, then 'shapectl flush --all' and apply them with this one"},
	{loader.ErrMoved, true, "; flush them by this name first"},
	{loader.ErrElsewhere, false, "; flush them there first, or here if that namespace no longer exists"},
	{loader.ErrNoTCX, false, "; leave SHAPECTL_HOOK unset to attach by clsact"},
	{loader.ErrNoClsact, false, "; load the module sch_ingress, or use a kernel with tcx (6.6)"},
	{loader.ErrMayNotRead, false, "; run as root, or ask root to add you to the group shapectl (or to the one in SHAPECTL_GROUP)"},
	{loader.ErrNoGroup, true, "; name a group that there is in SHAPECTL_GROUP, or unset it"},
	{program.ErrPerfmon, false, "; run as root, or give it CAP_PERFMON"},
	{fs.ErrPermission, false, "; run as root, or with CAP_BPF and CAP_NET_ADMIN and a bpffs that you may write to"},
	{unix.ENOENT, false, "; the device may just have gone: see 'ip link' and try again"},
	{unix.ENODEV, false, "; the device may just have gone: see 'ip link' and try again"},
}

// advise adds what to do about an error, where there is something to be done.
func (e *env) advise(err error) error {
	var unheld *loader.UnqueuedError
	switch {
	case errors.As(err, new(exitError)):
		return err
	case errors.As(err, &unheld):
		return inputf("%w; %s", err, e.adviseFQ(unheld))
	}
	for _, a := range advice {
		if !errors.Is(err, a.of) {
			continue
		}
		if err = fmt.Errorf("%w%s", err, a.says); a.input {
			err = inputError(err)
		}
		break
	}
	return err
}

// device finds a device for a command that needs it to be there.
func device(name string) (netinfo.Device, error) {
	d, err := netinfo.DeviceByName(name)
	if errors.Is(err, netinfo.ErrNoDevice) {
		return d, noDevice(name)
	}
	return d, err
}

func noDevice(name string) error {
	if policyfile.IsPattern(name) {
		return inputf("there is no device %s; name one, as only show, delete and flush take patterns", name)
	}
	return inputf("there is no device %s; 'ip link' lists those there are", cmp.Or(name, `""`))
}

// completeRule completes DEV ingress|egress.
func (e *env) completeRule(_ *cobra.Command, given []string, _ string) ([]string, cobra.ShellCompDirective) {
	switch len(given) {
	case 0:
		var names []string
		// Without an answer there is nothing to suggest, and nobody to tell.
		_ = loader.In(e.netns, func() error {
			devices, err := netinfo.Devices()
			for _, d := range devices {
				if plain.Word(d.Name) == d.Name && !strings.HasPrefix(d.Name, "-") { // a shell may not take others as they are
					names = append(names, d.Name)
				}
			}
			return err
		})
		return names, cobra.ShellCompDirectiveNoFileComp
	case 1:
		return []string{"ingress", "egress"}, cobra.ShellCompDirectiveNoFileComp
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}
