package main

import (
	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/pkg/loader"
)

// helpTopics are pages of help that belong to no command.
func helpTopics() []*cobra.Command {
	return []*cobra.Command{
		{
			Use:   "queue",
			Short: "--excess delay: queue excess packets instead of dropping them",
			Long: `With --excess delay, excess packets are queued, and the fq qdisc sends each at its departure time.

With --algorithm gcra, packets within the capacity leave at once. Up to --queue bytes beyond it wait. With
--algorithm leaky, all packets are paced: the output never exceeds the rate. The capacity is then the queue, and
may be given as the longest wait.

Packets that find the queue full are dropped. ECT packets that would wait longer than --ecn-above are marked. No
packet waits longer than 9s.

With --order sparse-first, a flow that sends little does not wait behind others: one that has no packet queued and
sends at most 2 KiB in the time that a full queue takes. Up to capacity and queue may then leave beyond the rate.

The device needs the fq qdisc. --setup-fq sets it up, and 'shapectl flush' restores what was there. On ingress,
packets pass through an ifb device, from Linux 6.4 on. Without fq, drops alone keep the rate.`,
			Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 20mbit --excess delay --setup-fq
  shapectl set eth0 egress 10.0.0.0/24 --rate 20mbit --excess delay \
      --algorithm leaky --capacity 50ms --setup-fq`,
		},
		{
			Use:   "patterns",
			Short: "Name several devices at once",
			Long: `A pattern in place of DEV stands for all devices that match it.

  *       any characters
  ?       one character
  [a-z]   one of these characters
  [^a-z]  one other character
  \*      the character itself

show, delete, flush and policy files take patterns. Quote a pattern, as in 'tap*', or the shell may replace it by
names of files. A device that has exactly this name is meant alone.`,
			Example: `  shapectl show 'tap*'
  shapectl flush 'tap*' egress`,
		},
		{
			Use:   "errors",
			Short: "Exit codes, and errors in JSON",
			Long: `A command says what went wrong in a line on stderr, and by its exit code:

  0  done
  1  bad usage or input, nothing was changed
  2  the kernel refused
  3  diff found differences
  4  partly done, or a limit is not in force or may be wrong
  5  a permission or a kernel feature is missing

With -j, each line on stderr is an object. An error has the keys error and exit_code and, for a policy file,
mistakes: a list with file, line, column and message. A warning has the key warning.`,
		},
		{
			Use:   "environment",
			Short: "Environment variables",
			Long: `These variables are for tests and for unusual hosts.

  SHAPECTL_HOOK    tcx or clsact: attach devices that have no rules yet only so
  SHAPECTL_BPFFS   the bpffs to pin in, if not the ` + loader.DefaultBPFFS + ` that init sees
  SHAPECTL_GROUP   the group whose members may read the rules, if not '` + loader.DefaultGroup + `'`,
		},
	}
}
