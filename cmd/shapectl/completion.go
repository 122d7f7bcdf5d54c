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

// suggestions are those words of find that begin as typed and that a shell takes as they are.
// Errors go nowhere: they would stand in the line that is being typed.
func (e *env) suggestions(typed string, find func(suggest func(word string) bool) error) []string {
	words := map[string]bool{}
	_ = netns.In(e.netns, func() error {
		return find(func(word string) bool {
			if strings.HasPrefix(word, typed) && plain.Word(word) == word && !strings.HasPrefix(word, "-") {
				words[word] = true
			}
			return len(words) < mostSuggested
		})
	})
	return slices.Sorted(stdmaps.Keys(words))
}

// completeRule completes DEV ingress|egress.
func (e *env) completeRule(_ *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
	var words []string
	switch len(given) {
	case 0:
		words = e.suggestions(typed, func(suggest func(string) bool) error {
			devices, err := netinfo.Devices()
			for _, d := range devices {
				suggest(d.Name)
			}
			return err
		})
	case 1:
		words = []string{"ingress", "egress"}
	}
	return words, cobra.ShellCompDirectiveNoFileComp
}

// completeNetwork completes DEV ingress|egress CIDR, the latter with those of rules.
func (e *env) completeNetwork(cmd *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(given) != 2 {
		return e.completeRule(cmd, given, typed)
	}
	words := e.suggestions(typed, func(suggest func(string) bool) error {
		suggest("any")
		d, err := policy.ParseDirection(given[1])
		if err != nil {
			return err
		}
		return e.eachEntry(filterRules{device: given[0], direction: &d}, func(entry maps.Entry) bool {
			return suggest(entry.Prefix.String())
		})
	})
	return words, cobra.ShellCompDirectiveNoFileComp
}

// labelled completes the first argument with texts of labels, too, once a part of it is typed.
func (e *env) labelled(complete cobra.CompletionFunc, texts func(policy.Label) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
		words, directive := complete(cmd, given, typed)
		if len(given) == 0 && typed != "" {
			words = append(words, e.texts(typed, texts)...)
		}
		return words, directive
	}
}

// texts are the texts of labels that begin as typed.
func (e *env) texts(typed string, of func(policy.Label) []string) []string {
	return e.suggestions(typed, func(suggest func(string) bool) error {
		return e.eachEntry(filterRules{}, func(entry maps.Entry) bool {
			return !slices.ContainsFunc(of(entry.Label), func(text string) bool { return !suggest(text) })
		})
	})
}

func nameOf(l policy.Label) []string        { return []string{l.Name} }
func planOf(l policy.Label) []string        { return []string{l.Plan} }
func nameAndPlanOf(l policy.Label) []string { return []string{l.Name, l.Plan} }

// completePlan completes plans of rules.
func (e *env) completePlan(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	return e.texts(typed, planOf), cobra.ShellCompDirectiveNoFileComp
}

// orPool completes the first argument with names of pools, too, once a part of it is typed.
func (e *env) orPool(complete cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
		words, directive := complete(cmd, given, typed)
		if len(given) == 0 && typed != "" {
			pools, _ := e.completePool(cmd, nil, typed)
			words = append(words, pools...)
		}
		return words, directive
	}
}

// completeNamed completes DEV ingress|egress CIDR, or a name: only that of a pool, or any.
func (e *env) completeNamed(onlyPools bool, texts func(policy.Label) []string) cobra.CompletionFunc {
	if onlyPools {
		return e.completePool
	}
	return e.orPool(e.labelled(e.completeNetwork, texts))
}

// completePool completes [NAME] of pools.
func (e *env) completePool(_ *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(given) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return e.suggestions(typed, func(suggest func(string) bool) error {
		return e.eachEntry(filterRules{pools: true}, func(entry maps.Entry) bool { return suggest(entry.Label.Name) })
	}), cobra.ShellCompDirectiveNoFileComp
}

// completeWithin completes pools as the value of a flag.
func (e *env) completeWithin(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	return e.completePool(cmd, nil, typed)
}

// eachEntry calls f for the rules that a filter lets through, until f returns false.
func (e *env) eachEntry(want filterRules, f func(maps.Entry) bool) error {
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
		if h.Set.Store.Size().Rules > mostListed && !want.pools {
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

// completeDevice completes [DEV].
func (e *env) completeDevice(cmd *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(given) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return e.completeRule(cmd, given, typed)
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
