package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/events"
	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Exit codes.
const (
	exitDone     = 0
	exitInput    = 1 // bad usage or input; nothing was changed
	exitKernel   = 2 // the kernel refused, or the store of leases
	exitDiffers  = 3 // diff found differences
	exitDegraded = 4 // partly done, or not all in force
	exitMissing  = 5 // a permission or kernel feature is missing
)

// env is the environment of commands: streams, variables, and the flags of all commands.
type env struct {
	in       io.Reader
	out, err io.Writer // run escapes what is written to them
	getenv   func(string) string

	terminal *os.File  // out without escaping; nil if it is no terminal
	screen   io.Writer // err without escaping, for progress; nil if it is no terminal
	columns  int       // width of that terminal; 0 if there is none

	json    bool
	netns   string // "" for that of the process
	setupFQ bool
	confirm time.Duration // after which a change reverts; 0 for never

	// contents are what files contain that come with a request; a command then opens no others. nil for a command line.
	contents map[string][]byte
	cause    error            // of the exit code
	ctx      context.Context  // ends what only reads; nil for never
	history  *history.History // that this process records; nil if it does not
	feed     *events.Feed     // of a serve, which many requests share
	rtts     *observe.Live    // of a serve that measures round-trip times all the time
	follows  string           // the file of the policy that a serve follows; "" for none
	boots    string           // the file of the policy that the units apply at boot; "" for none

	typed      string // the arguments, as one writes them in a shell
	completing bool   // a line for a shell
	unserved   error  // what to do where serve could have run the command, and did not
}

// context is done when nobody waits for the answer any more.
func (e *env) context() context.Context {
	if e.ctx == nil {
		return context.Background()
	}
	return e.ctx
}

// wait waits, unless ctx is done before.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// setNetns refuses an empty name: it is more likely a variable that was never set than a way to say "here".
func (e *env) setNetns(name string) error {
	if name == "" {
		return errors.New("the network namespace has no name; leave -n out to work in this one")
	}
	e.netns = name
	return nil
}

// An exitError is an error with an exit code.
type exitError struct {
	error
	code int
}

func (e exitError) Unwrap() error { return e.error }

// These errors were written already.
var (
	errDegraded error = exitError{errors.New("degraded"), exitDegraded}
	errDiffers  error = exitError{errors.New("there are differences"), exitDiffers}
)

func wasTold(err error) bool { return errors.Is(err, errDegraded) || errors.Is(err, errDiffers) }

// inputError is an error that the user can correct. Nothing was changed.
func inputError(err error) error { return exitError{err, exitInput} }

func inputf(format string, args ...any) error { return inputError(fmt.Errorf(format, args...)) }

// A missingError says that what was asked for does not exist.
type missingError struct{ error }

func (e missingError) Unwrap() error { return e.error }

func missingf(format string, args ...any) error {
	return inputError(missingError{fmt.Errorf(format, args...)})
}

// run runs a command line and returns its exit code.
func (e *env) run(args []string) int {
	if isTerminal(e.err) {
		e.screen = e.err
	}
	if e.columns = e.columnsOf(e.out); isTerminal(e.out) {
		e.terminal = e.out.(*os.File)
	}
	out, told := plain.NewWriter(e.out), plain.NewWriter(e.err)
	e.out, e.err = out, told
	code := e.runPlain(args)
	if err := errors.Join(out.Flush(), told.Flush()); err != nil && code == exitDone {
		return exitDegraded
	}
	return code
}

func (e *env) runPlain(args []string) int {
	e.completing = len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd)
	words := make([]string, len(args))
	for i, arg := range args {
		words[i] = plain.Word(arg)
	}
	e.typed = strings.Join(words, " ")
	if code, done := e.runByServe(args); done {
		return code
	}
	root := e.command()
	root.SetArgs(args)
	root.SetOut(e.out)
	root.SetErr(e.err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		e.json = asksForJSON(args) // -j may stand behind the wrong flag
		return flagError(cmd, err)
	})
	err := root.Execute()
	e.cause = err
	if err == nil {
		return exitDone
	}
	if wasTold(err) {
		return exitCode(err)
	}
	var mistakes policyfile.Errors
	if errors.As(err, &mistakes) {
		doing, after, _ := strings.Cut(err.Error(), mistakes.Error())
		if !e.json {
			fmt.Fprintln(e.err, mistakes)
		}
		err = inputf("%s%s%s", doing, plain.Count(len(mistakes), "error"), cmp.Or(after, "; nothing was changed"))
	}
	e.fail(err, exitCode(err), mistakes)
	return exitCode(err)
}

// print writes an answer: as JSON with -j, else by text.
func (e *env) print(answer any, text func(io.Writer) error) error {
	if e.json {
		return report.JSON(e.out, answer)
	}
	return text(e.out)
}

// nothing answers that there was nothing to do, and why: the answer is for JSON.
func (e *env) nothing(answer any, why string) error {
	return e.print(answer, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, why)
		return err
	})
}

// sentences writes a line for each rule, folded for a terminal.
func (e *env) sentences(rules report.Rules) func(io.Writer) error {
	width := 0
	if e.terminal != nil {
		width = e.columns
	}
	return func(w io.Writer) error { return rules.Sentences(w, width) }
}

// missing are errors about a missing permission or kernel feature.
var missing = []error{
	fs.ErrPermission, ebpf.ErrNotSupported, loader.ErrNoTCX, loader.ErrNoClsact, loader.ErrNoClsBPF, fq.ErrNoFQ, fq.ErrNoIfb,
	fq.ErrOldIfb, observe.ErrNoTCX, bpffs.ErrUntrusted, bpffs.ErrMounts, loader.ErrFewFiles,
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
	var wantsVersion bool
	version := versionCommand(e)
	root := &cobra.Command{
		Use:   "shapectl",
		Short: "Limit network traffic per network, host or flow",
		Long: `shapectl limits network traffic per network, host or flow, with eBPF on any Linux device.

A rule belongs to a device, a direction and a network. Egress rules limit packets that leave the device, by their
destination. Ingress rules limit packets that enter it, by their source. Rules stay in force after the command ends.`,
		Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host
  shapectl show
  shapectl delete eth0 egress 10.0.0.0/24`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(cmd *cobra.Command, given []string) error {
			if len(given) > 0 {
				return unknownCommand(cmd, given[0])
			}
			return nil
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return checkEmpty(cmd) },
		RunE: func(*cobra.Command, []string) error {
			if wantsVersion {
				return version.RunE(version, nil)
			}
			return inputf("no command was given; 'shapectl --help' lists the commands")
		},
	}
	root.PersistentFlags().BoolVarP(&e.json, "json", "j", false, "print JSON, also errors")
	root.PersistentFlags().VarP(flagValue{"netns", "", e.setNetns}, "netns", "n", "work in this network namespace: a name, a path or a process id")
	root.Flags().BoolVar(&wantsVersion, "version", false, "show the version")
	must(root.Flags().MarkHidden("version")) // the command is listed
	e.completes(root, "netns", completeNetns)
	root.SetHelpCommand(&cobra.Command{
		Use:                   "help [COMMAND|TOPIC]",
		Short:                 "Show the help of a command",
		DisableFlagsInUseLine: true,
		ValidArgsFunction: func(_ *cobra.Command, given []string, typed string) (names []string, _ cobra.ShellCompDirective) {
			for _, cmd := range root.Commands() {
				if len(given) == 0 && !cmd.Hidden && strings.HasPrefix(cmd.Name(), typed) {
					names = append(names, cmd.Name())
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, given []string) error {
			cmd, rest, err := root.Find(given)
			if err == nil && len(rest) > 0 {
				err = unknownCommand(cmd, rest[0])
			}
			if err != nil {
				return err
			}
			return cmd.Help()
		},
	})
	groups := []commandGroup{
		{"Change limits:", []*cobra.Command{setCommand(e), deleteCommand(e), flushCommand(e), topupCommand(e), lineCommand(e), applyCommand(e), confirmCommand(e), rollbackCommand(e)}},
		{"Look at limits:", []*cobra.Command{showCommand(e), topCommand(e), explainCommand(e), eventsCommand(e), reportCommand(e), doctorCommand(e), diffCommand(e), exportCommand(e), clusterCommand(e)}},
		{"Try limits:", []*cobra.Command{replayCommand(e), importCommand(e)}},
		{"Run:", []*cobra.Command{serveCommand(e), completionCommand(e), version}},
	}
	for _, group := range groups {
		for _, cmd := range group.commands {
			for _, cmd := range append(cmd.Commands(), cmd) {
				cmd.Flags().SortFlags = false
				cmd.DisableFlagsInUseLine = true // Use says where there are any
				e.completeChoices(cmd)
			}
			if cmd.ValidArgsFunction == nil && cmd.ValidArgs == nil && !cmd.HasSubCommands() {
				cmd.ValidArgsFunction = cobra.NoFileCompletions
			}
			root.AddCommand(cmd)
		}
	}
	root.AddCommand(helpTopics()...)
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) { e.help(cmd, groups) })
	return root
}

// must ends the process on an error of the program itself.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// options are those of the environment and the flags.
func (e *env) options() (loader.Options, error) {
	o := loader.Options{BPFFS: e.getenv("SHAPECTL_BPFFS"), State: e.getenv("SHAPECTL_STATE"), SetupFQ: e.setupFQ}
	switch mode := e.getenv("SHAPECTL_HOOK"); mode {
	case "", string(loader.Auto), string(loader.TCX), string(loader.Clsact):
		o.Mode = loader.Mode(mode)
	default:
		return o, inputf("SHAPECTL_HOOK=%s: use tcx, clsact or auto", mode)
	}
	return o, nil
}

type opener func(loader.Options) (*loader.Namespace, error)

// with runs f on the state of the network namespace of -n. Errors begin with doing, and end
// with what to do about them.
func (e *env) with(open opener, doing string, f func(*loader.Namespace) error) error {
	o, err := e.options()
	if err != nil {
		return err
	}
	shown := progress{to: e.screen, begun: time.Now()}
	defer shown.clear() // where it failed
	o.Progress = shown.at
	// The lock must not be held until a pager has shown the last page.
	out, text := e.out, new(bytes.Buffer)
	for err = loader.ErrFaster; errors.Is(err, loader.ErrFaster); {
		text.Reset()
		e.out = text
		err = netns.In(e.netns, func() error {
			n, err := open(o)
			if err != nil {
				return err
			}
			defer n.Close()
			if n.Restored != "" {
				e.say("shapectl: restored limits that were not in force, as something had deleted the pin %s", n.Restored)
			}
			err = f(n)
			if collected := n.Collected; err == nil && len(collected) > 0 {
				e.say("shapectl: removed the rules of deleted devices: %s", plain.List(collected))
			}
			if trouble := n.Trouble(); trouble != nil {
				e.say("shapectl: %w", trouble)
			}
			return err
		})
		e.out = out
	}
	if _, err := text.WriteTo(out); err != nil {
		return e.degraded("%s: done, but the answer could not be written: %w", doing, err)
	}
	if err == nil || wasTold(err) {
		return err
	}
	return fmt.Errorf("%s: %w", doing, e.advise(err))
}

// An advice says what to do about an error.
type advice struct {
	of    error
	input bool     // nothing was changed, and the user can correct it
	says  string   // with a %s for each of verbs
	verbs []string // of commands that it suggests
}

var advices = []advice{
	{fq.ErrTaken, true, "", nil},
	{fq.ErrConfigured, true, "", nil},
	{fq.ErrNoFQ, false, "; load that module, use a kernel that has it, or use another excess than delay", nil},
	{fq.ErrNoIfb, false, "; load that module, use a kernel that has it, or use another excess than delay", nil},
	{fq.ErrOldIfb, false, "; use another excess than delay, or limit the traffic where it leaves", nil},
	{netns.ErrNone, true, "; give a name that 'ip netns' lists, a path, or the id of a process", nil},
	{netinfo.ErrUnsupportedDevice, true, "", nil},
	{loader.ErrCgroup, true, "; use another excess or colour action, leave nat out, or limit the device that the packets pass", nil},
	{loader.ErrUntagged, true, "; limit the device that has them", nil},
	{loader.ErrMatch, true, "; match the same address, or flush them first", nil},
	{loader.ErrPending, true, "; %s it or %s first", []string{"confirm", "rollback"}},
	{loader.ErrBusy, false, "; nothing was changed, try again", nil},
	{loader.ErrNoChange, true, "; see %s", []string{"show"}},
	{loader.ErrTooLate, true, "; make the change again if it was right", nil},
	{maps.ErrFull, true, "; delete rules that are not needed, or join them in a wider one", nil},
	{maps.PinError(""), false, "; rules may still be in force; nothing was changed: %s deletes them, then apply the policy again", []string{"flush --all"}},
	{maps.ErrOtherLayout, false, "; nothing was changed: export all rules with that version, then %s and apply them with this one", []string{"flush --all"}},
	{loader.ErrPoolInUse, true, "; delete these first, or move them to another pool", nil},
	{loader.ErrMoved, true, "; flush them by this name first", nil},
	{loader.ErrElsewhere, false, "; flush them there first; if that bpffs was unmounted, remove them with 'tc filter del' or 'bpftool link detach'", nil},
	{loader.ErrNoTCX, false, "; leave SHAPECTL_HOOK unset to attach by clsact", nil},
	{loader.ErrOneProgram, false, "; 'bpftool cgroup tree' shows it; detach it, or attach it with multi", nil},
	{loader.ErrNoClsact, false, "; load the module sch_ingress, or use a kernel with tcx (6.6)", nil},
	{loader.ErrNoClsBPF, false, "; load the module cls_bpf, or use a kernel with tcx (6.6)", nil},
	{loader.ErrLessee, true, "; end that one first", nil},
	{bpffs.ErrMounts, false, "; instead of 'ip netns exec NAME shapectl', run 'shapectl -n NAME' outside, or name another bpffs in SHAPECTL_BPFFS", nil},
	{fs.ErrPermission, false, "; run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN and a bpffs that you may write to", nil},
	{loader.ErrFewFiles, false, "; raise it by 'ulimit -n 1024' as root, or by LimitNOFILE=1024 in a systemd unit", nil},
	{unix.ENOENT, false, "; the device may just have gone: see 'ip link' and try again", nil},
	{unix.ENODEV, false, "; the device may just have gone: see 'ip link' and try again", nil},
}

// advise adds to an error what to do about it.
func (e *env) advise(err error) error {
	var unheld *loader.UnqueuedError
	var pending *loader.PendingError
	switch {
	case errors.As(err, new(exitError)):
		return err
	case errors.As(err, new(policy.PoolError)):
		return inputf("%w; nothing was changed", err)
	case errors.As(err, &pending):
		by := report.MadeBy(pending)
		if by != "" {
			by = " (" + by + ")"
		}
		return inputf("%w%s, and %s; %s it or %s first", err, by, report.Reverts(*live.Ahead(pending.Until)), e.suggest("confirm"), e.suggest("rollback"))
	case errors.As(err, &unheld):
		return inputf("%w; %s", err, e.adviseFQ(unheld))
	case e.unserved != nil && errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w; %w", err, e.unserved)
	}
	at := slices.IndexFunc(advices, func(a advice) bool { return errors.Is(err, a.of) })
	if at < 0 {
		return err
	}
	a := advices[at]
	var commands []any
	for _, verb := range a.verbs {
		commands = append(commands, e.suggest(verb))
	}
	if err = fmt.Errorf("%w%s", err, fmt.Sprintf(a.says, commands...)); a.input {
		err = inputError(err)
	}
	return err
}

// device finds a device that a command needs.
func device(name string) (netinfo.Device, error) {
	d, err := netinfo.DeviceByName(name)
	if errors.Is(err, netinfo.ErrNoDevice) {
		return d, noDevice(name)
	}
	return d, err
}

// mayBeGone returns an error for a device that does not exist, unless it is a cgroup: these end with their processes.
func mayBeGone(name string) error {
	_, err := device(name)
	if policy.IsCgroup(name) && policy.CheckCgroup(name) == nil {
		return nil
	}
	return err
}

func noDevice(name string) error {
	if policy.IsCgroup(name) {
		if _, err := netinfo.DeviceByName(name); err != nil && err != netinfo.ErrNoDevice {
			return missingf("%s: %w", plain.Line(name), err)
		}
		return missingf("there is no cgroup of %s now; one exists while its processes run, and 'systemd-cgls' lists all; a policy with this name limits it whenever it starts", plain.Line(name))
	}
	if policyfile.IsPattern(name) {
		return missingf("there is no device %s; name one: only show, delete and flush take patterns", plain.Line(name))
	}
	return missingf("there is no device %s; %s", cmp.Or(plain.Line(name), `""`), didYouMean(name, withDevices(nil), "'ip link' lists the devices"))
}

// withDevices adds the names of all devices to others.
func withDevices(names []string) []string {
	devices, _ := netinfo.Devices()
	for _, d := range devices {
		names = append(names, d.Name)
	}
	return names
}

// didYouMean asks for one of some names that may be meant by one that does not exist. If there is none, it says otherwise.
func didYouMean(name string, names []string, otherwise string) string {
	if similar := plain.SimilarName(name, names); similar != "" {
		return "did you mean " + plain.Word(similar) + "?"
	}
	return otherwise
}
