package main

import (
	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/pkg/loader"
)

// helpTopics are pages of help that belong to no command.
func helpTopics() []*cobra.Command {
	return []*cobra.Command{
		{
			Use:   "queue",
			Short: "--excess delay: queue excess packets instead of dropping them",
			Long: `With --excess delay, excess packets are queued, and the fq qdisc sends each at its departure time.

With --algorithm gcra, a burst of --capacity leaves at once. --queue is the length of the queue behind it. With
--algorithm leaky, all packets are paced, and the output never exceeds the rate. --capacity is then the length of
the queue: a size, or a time such as 50ms.

Packets that find the queue full are dropped. Packets that would wait longer than --ecn-above are marked, if they
allow ECN. No packet waits longer than 9s.

With --order sparse-first, flows that send little go ahead of others. Such a flow has no packet queued, and in the
time that a full queue takes to drain, it sends at most a sixteenth of that, but at least 2 KiB and at most 16 KiB.
In addition to the rate, as many bytes as capacity and queue hold may then leave.

The device needs the fq qdisc. --setup-fq replaces the kernel's default qdisc by fq, until 'shapectl flush'. If fq
is removed later, packets are dropped, and the rate still holds. On ingress, packets are queued on an ifb device,
which needs Linux 6.4.`,
			Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 20mbit --excess delay --setup-fq
  shapectl set eth0 egress 10.0.0.0/24 --rate 20mbit --excess delay \
      --algorithm leaky --capacity 50ms --setup-fq`,
		},
		{
			Use:   "patterns",
			Short: "Name several devices at once",
			Long: `Write a pattern in place of DEV to name all devices that match it.

  *       any characters
  ?       one character
  [a-z]   one of these characters
  [^a-z]  one other character
  \*      the character itself

show, delete, flush and policy files take patterns. Quote a pattern, as in 'tap*', or the shell may replace it with
names of files. If a device has exactly this name, only that device is meant. show --pools takes patterns of names.`,
			Example: `  shapectl show 'tap*'
  shapectl flush 'tap*' egress`,
		},
		{
			Use:   "errors",
			Short: "Exit codes, and errors in JSON",
			Long: `A command that fails prints a line on stderr. Its exit code says what went wrong:

  0  done
  1  bad usage or input, nothing was changed
  2  the kernel refused, or the store of a cluster
  3  diff found differences
  4  partly done, or a limit is not in force or may be wrong
  5  a permission or a kernel feature is missing

With -j, each line on stderr is an object. An error has the keys error and exit_code and, for a policy file,
mistakes: a list with file, line, column and message. A warning has the key warning.`,
		},
		{
			Use:   "environment",
			Short: "Environment variables",
			Long: `SHAPECTL_STORE is set where several hosts share rates. SHAPECTL_HOOK, SHAPECTL_BPFFS and SHAPECTL_STATE are for
tests and for unusual hosts.

  SHAPECTL_STORE  the URL of the store for serve and cluster, if no flag has it
  SHAPECTL_HOOK   tcx or clsact: the way to attach to devices without rules
  SHAPECTL_BPFFS  the bpffs for pins (default ` + bpffs.Default + `)
  SHAPECTL_STATE  the directory for what is used of quotas (default ` + loader.StateDir + `; none with another bpffs)
  COLUMNS         the width of text output (default: that of the terminal)
  NO_COLOR        if it is set, top shows no colours
  TERM            if it is dumb, top shows no screen
  SUDO_UID        by sudo: root reads policies and tokens of this user, too
  SUDO_USER       by sudo: who made a change that is not confirmed`,
		},
	}
}
