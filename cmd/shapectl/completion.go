package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func completionCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish|powershell",
		Short: "Print a script that completes command lines",
		Long: `Print a script that completes command lines in a shell. For bash:

  source <(shapectl completion bash)                                  # this shell
  shapectl completion bash > /etc/bash_completion.d/shapectl          # each new one`,
		Args:      args(1, 1),
		ValidArgs: []string{"bash", "zsh", "fish", "powershell"},
		RunE: func(cmd *cobra.Command, given []string) error {
			root := cmd.Root()
			switch given[0] {
			case "bash":
				return root.GenBashCompletionV2(e.out, true)
			case "zsh":
				return root.GenZshCompletion(e.out)
			case "fish":
				return root.GenFishCompletion(e.out, true)
			case "powershell":
				return root.GenPowerShellCompletionWithDesc(e.out)
			}
			return inputf("completion: %q is none of bash, zsh, fish and powershell", given[0])
		},
	}
}

// completeChoices completes the flags of a command whose type is a choice of
// words; of those, some stand for numbers.
func completeChoices(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		words := strings.Split(f.Value.Type(), "|")
		if len(words) == 1 {
			return
		}
		words = slices.DeleteFunc(words, func(w string) bool { return w == "size" || w == "time" || w == "/N" })
		err := cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
		if err != nil {
			panic(err) // each flag is there, and once
		}
	})
}
