package main

import (
	"bytes"
	stdmaps "maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func completionCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish",
		Short: "Print a script that completes command lines",
		Long:  `Print a script that completes command lines in a shell. The packages install it.`,
		Example: `  source <(shapectl completion bash)
  shapectl completion bash >/etc/bash_completion.d/shapectl
  shapectl completion zsh >/usr/local/share/zsh/site-functions/_shapectl
  shapectl completion fish >/etc/fish/completions/shapectl.fish`,
		Args:      args(1, 1),
		ValidArgs: []string{"bash", "zsh", "fish"},
		RunE: func(cmd *cobra.Command, given []string) error {
			root := cmd.Root()
			var script bytes.Buffer // errors are those of e.out alone
			switch given[0] {
			case "bash":
				root.GenBashCompletionV2(&script, true)
			case "zsh":
				root.GenZshCompletion(&script)
			case "fish":
				root.GenFishCompletion(&script, true)
			default:
				return inputf("completion: shell %q is unknown; use bash, zsh or fish", given[0])
			}
			_, err := inert.WriteString(e.out, script.String())
			return err
		},
	}
}

// inert changes cobra's scripts, which evaluate the line before it is complete. In bash and zsh, that runs
// commands in $() and backticks. In fish, it also runs those in quotes (spf13/cobra#2096).
var inert = strings.NewReplacer(
	"    out=$(eval ", "    [[ ${requestComp} == *[\\(\\`]* ]] && return 1\n    out=$(eval ",
	"set -l args (commandline -opc)", "set -l args (commandline -opc)[1] (commandline -opc | string escape)[2..-1]",
)

// completes says how the value of a flag is completed. The library keeps such functions, with all that they refer to, until
// the process ends. So only a process that completes a line has them: serve runs commands for weeks.
func (e *env) completes(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	if e.completing {
		must(cmd.RegisterFlagCompletionFunc(flag, f))
	}
}

// completeChoices completes the flags of a command whose type is a choice of
// words; of those, some stand for numbers.
func (e *env) completeChoices(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		words := strings.Split(f.Value.Type(), "|")
		if len(words) == 1 {
			return
		}
		words = slices.DeleteFunc(words, func(w string) bool { return w == "size" || w == "time" || w == "/N" || w == "dscp:NAME" })
		e.completes(cmd, f.Name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
	})
}

const (
	// completionPatience is how long somebody at a prompt waits for another command to end.
	completionPatience = 200 * time.Millisecond
	// mostListed is how many rules are read to complete a word; more take too long.
	mostListed = 100_000
	// mostSuggested is how many suggestions somebody reads at most.
	mostSuggested = 500
)

// A finder suggests words for an argument that begins as typed, until suggest returns false. given are the arguments before it.
// Its errors go nowhere: they would stand in the line that is being typed.
type finder func(given []string, typed string, suggest func(word string) bool) error

// complete completes arguments, each with the words of a finder that begin as typed and that a shell takes as they are.
func (e *env) complete(arguments ...finder) cobra.CompletionFunc {
	return func(_ *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
		words := map[string]bool{}
		suggest := func(word string) bool {
			if strings.HasPrefix(word, typed) && plain.Word(word) == word && !strings.HasPrefix(word, "-") {
				words[word] = true
			}
			return len(words) < mostSuggested
		}
		if len(given) < len(arguments) {
			_ = netns.In(e.netns, func() error { return arguments[len(given)](given, typed, suggest) })
		}
		return slices.Sorted(stdmaps.Keys(words)), cobra.ShellCompDirectiveNoFileComp
	}
}

// completesValue is complete for the value of a flag.
func (e *env) completesValue(cmd *cobra.Command, flag string, of finder) {
	e.completes(cmd, flag, func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		return e.complete(of)(cmd, nil, typed)
	})
}

// completeNamed completes DEV ingress|egress CIDR, or in place of DEV a name or with plans a plan; only pools if onlyPools says so then.
func (e *env) completeNamed(plans bool, onlyPools func() bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
		if onlyPools != nil && onlyPools() {
			return e.complete(e.pools)(cmd, given, typed)
		}
		return e.complete(e.labels(plans), directions, e.networks)(cmd, given, typed)
	}
}

// oneOf suggests some words.
func oneOf(some ...string) finder {
	return func(_ []string, _ string, suggest func(string) bool) error {
		for _, word := range some {
			suggest(word)
		}
		return nil
	}
}

var directions = oneOf("ingress", "egress")

func devices(_ []string, _ string, suggest func(string) bool) error {
	all, err := netinfo.Devices()
	for _, d := range all {
		suggest(d.Name)
	}
	return err
}

// labels suggests devices and, once a part is typed, names of rules and pools, and plans.
func (e *env) labels(andPlans bool) finder {
	return func(given []string, typed string, suggest func(string) bool) error {
		err := devices(nil, typed, suggest)
		if typed == "" || err != nil {
			return err
		}
		if err := e.pools(nil, typed, suggest); err != nil {
			return err
		}
		return e.eachEntry(target{}, func(entry maps.Entry) bool {
			return suggest(entry.Label.Name) && (!andPlans || suggest(entry.Label.Plan))
		})
	}
}

func (e *env) pools(_ []string, _ string, suggest func(string) bool) error {
	return e.eachEntry(target{kind: kindPool}, func(entry maps.Entry) bool { return suggest(entry.Label.Name) })
}

func (e *env) plans(_ []string, _ string, suggest func(string) bool) error {
	return e.eachEntry(target{}, func(entry maps.Entry) bool { return suggest(entry.Label.Plan) })
}

// networks suggests those of the rules of a device and a direction.
func (e *env) networks(given []string, _ string, suggest func(string) bool) error {
	suggest(policy.Any)
	want, err := parseTarget("", "", given)
	if err != nil {
		return err
	}
	return e.eachEntry(want, func(entry maps.Entry) bool { return suggest(policy.CIDR(entry.Prefix)) })
}

// eachEntry calls f for the rules or pools of a target, until f returns false.
func (e *env) eachEntry(want target, f func(maps.Entry) bool) error {
	o, err := e.options()
	if err != nil {
		return err
	}
	o.Patience = completionPatience
	n, err := loader.Read(o)
	if err != nil {
		return err
	}
	defer n.Close()
	hooks, err := want.hooks(n)
	defer loader.CloseHooks(hooks)
	for _, h := range hooks {
		if h.Set.Store.Size().Rules > mostListed && want.kind != kindPool {
			continue
		}
		for _, entry := range h.Set.Rules() {
			if !f(entry) {
				return nil
			}
		}
	}
	return err
}

// completePolicy completes FILE.
func completePolicy(_ *cobra.Command, given []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(given) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
}

// completeNetns completes the names that `ip netns` lists; a path is completed by the shell.
func completeNetns(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	if strings.Contains(typed, "/") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	var names []string
	entries, _ := os.ReadDir(netns.Dir) // without it there is nothing to suggest
	for _, entry := range entries {
		if plain.Word(entry.Name()) == entry.Name() {
			names = append(names, entry.Name())
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
