package main

import (
	"github.com/spf13/cobra"
)

func (e *env) completionCommand() *cobra.Command {
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
