package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/importer"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
)

func importCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "import libreqos|tc|nft ...",
		Short: "Make a policy from the limits of another tool",
		Long: `Make a policy from the limits of another tool, and print it. Nothing is changed.
Limits that cannot be carried over are listed on stderr and at the top of the
policy, in one line for each kind: what, where, why, and what to do. With -j, one
object has the policy, its rules, and everything that was not carried over.

Exit codes: 0 everything was carried over; 1 the input cannot be read;
4 something was not carried over.`,
		Example: `  shapectl import libreqos ShapedDevices.csv --device eth1 >policy.yaml
  shapectl import tc eth0 eth1 >policy.yaml
  nft -j list ruleset | shapectl import nft - --device eth1 >policy.yaml`,
		Args: func(_ *cobra.Command, given []string) error {
			if len(given) > 0 {
				return inputf("import: cannot import from %q; use libreqos, tc or nft", given[0])
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			return inputf("import: the tool is missing; use libreqos, tc or nft; see 'shapectl import --help'")
		},
	}
	cmd.AddCommand(importLibreQoSCommand(e), importTCCommand(e), importNFTCommand(e))
	return cmd
}

func importLibreQoSCommand(e *env) *cobra.Command {
	var device, upload string
	cmd := &cobra.Command{
		Use:   "libreqos FILE|- --device DEV [--upload DEV]",
		Short: "Make a policy from LibreQoS's ShapedDevices.csv",
		Long: `Make a policy from LibreQoS's ShapedDevices.csv, of any version with a header.
The file - is standard input. Each address and network of a row gets its own rule:

  Download Max Mbps  rate of egress of --device, which faces the subscribers
  Upload Max Mbps    rate of its ingress or, with --upload, of egress of that
                     device, which faces the Internet, by source address

Circuit and device become the name of the rule. Circuit ID, parent node and
comment become its note.

Not carried over, and listed: guaranteed rates, the tree of nodes, rates of 0,
addresses of an earlier row, and a rate that several addresses share: each of them
gets the full rate.`,
		Args: args(1, 1),
		RunE: func(cmd *cobra.Command, given []string) error {
			switch {
			case device == "":
				return inputf("import libreqos: --device is missing; name the device that faces the subscribers")
			case cmd.Flags().Changed("upload") && upload == "":
				return inputf("import libreqos: --upload is empty; leave it out to limit ingress of %s", device)
			case upload == device:
				return inputf("import libreqos: --upload is the same device; leave it out to limit ingress of %s", device)
			}
			return e.importFile("libreqos", given[0], cmd, func(name string, text io.Reader) (importer.Imported, error) {
				return importer.LibreQoS(name, text, device, upload)
			})
		},
	}
	cmd.Flags().StringVar(&device, "device", "", "the `device` that faces the subscribers")
	cmd.Flags().StringVar(&upload, "upload", "", "limit uploads on egress of this `device`, which faces the Internet")
	return cmd
}

func importNFTCommand(e *env) *cobra.Command {
	var device string
	cmd := &cobra.Command{
		Use:   "nft FILE|- [--device DEV]",
		Short: "Make a policy from the limits of nftables",
		Long: `Make a policy from the limits of nftables, as 'nft -j list ruleset' prints them.
The file - is standard input.

Carried over are limits in bytes by address: 'limit rate over ... drop', 'limit
rate ... accept' if the rest is dropped, named limits and maps to them, sets,
ranges, verdict maps, chains that rules jump to, and sets and meters with a limit
for each address. Comments of nft rules become names.

The direction is ingress for iifname, and egress for oifname. If a rule has
neither, it is for --device: egress for destinations, and ingress for sources.

Not carried over, and listed: limits in packets, limits with more conditions than
an address, and stacked limits.`,
		Args: args(1, 1),
		RunE: func(cmd *cobra.Command, given []string) error {
			if cmd.Flags().Changed("device") && device == "" {
				return inputf("import nft: --device is empty; leave it out if the ruleset names all devices")
			}
			return e.importFile("nft", given[0], cmd, func(name string, text io.Reader) (importer.Imported, error) {
				return importer.NFT(name, text, device)
			})
		},
	}
	cmd.Flags().StringVar(&device, "device", "", "the `device` of rules that name none")
	return cmd
}

func importTCCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "tc DEV...",
		Short: "Make a policy from the traffic control of devices",
		Long: `Make a policy from the traffic control of devices, as the kernel has it now.

Carried over are policers of filters by address (u32, also with hash tables,
flower, matchall) on clsact, ingress and root qdiscs, classes of htb that filters
by address select, the default class, and tbf. Handles of classes become notes.
htb and tbf delay excess packets, and these rules drop them, so they have at least
the default capacity.

Not carried over, and listed: guaranteed rates and borrowing, limits of parent
classes, filters by firewall mark or with more conditions than an address, and
other qdiscs. Traffic control stays as it is. Until you remove it, both it and the
rules limit packets.`,
		Args: args(1, 1<<16),
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return e.completeDevice(cmd, nil, typed)
		},
		RunE: func(cmd *cobra.Command, given []string) error {
			for i, name := range given {
				if slices.Contains(given[:i], name) {
					return inputf("import tc: device %s appears twice", name)
				}
			}
			var dumps []importer.Dump
			err := loader.In(e.netns, func() error {
				for _, name := range given {
					d, err := device(name)
					if err == nil {
						err = d.CheckReadable()
					}
					if err != nil {
						return err
					}
					dump, err := importer.ReadTC(d.Name, d.Index, d.L2Bytes)
					if err != nil {
						return err
					}
					dumps = append(dumps, dump)
				}
				return nil
			})
			if err != nil {
				return fmt.Errorf("import tc: %w", e.advise(err))
			}
			imported, err := importer.TC(dumps)
			if err != nil {
				return fmt.Errorf("import tc: %w", err)
			}
			return e.imported("import tc "+strings.Join(given, " "), plain.Command("import tc", given...), imported)
		},
	}
}

// importFile makes a policy from a file or standard input.
func (e *env) importFile(tool, name string, cmd *cobra.Command, read func(name string, text io.Reader) (importer.Imported, error)) error {
	if e.netns != "" {
		return inputf("import %s: -n has no effect, because no device is used; leave it out", tool)
	}
	file, _, err := e.open(name)
	if err != nil {
		return inputf("import %s: %w", tool, err)
	}
	defer file.Close()
	imported, err := read(inputName(name), file)
	if errors.As(err, new(policyfile.Errors)) {
		return inputf("import %s: %w", tool, err) // it has the file's name
	}
	if err != nil {
		return inputf("import %s %s: %w", tool, inputName(name), err)
	}
	command := "import " + tool
	for _, flag := range []string{"device", "upload"} {
		if f := cmd.Flags().Lookup(flag); f != nil && f.Changed {
			command += " --" + flag + " " + plain.Word(f.Value.String())
		}
	}
	return e.imported("import "+tool+" "+inputName(name), plain.Command(command, name), imported)
}

// imported prints the result of an import; command is the command line, for a shell.
func (e *env) imported(doing, command string, i importer.Imported) error {
	// A policy file cannot have every device name. Print nothing then, not a part of a policy.
	answer, err := report.NewImported(command, i)
	if err != nil {
		return inputf("%s: %w", doing, err)
	}
	if err = e.print(answer, answer.Text); err == nil && !e.json {
		err = report.ImportedLines(e.err, i)
	}
	if err != nil {
		return e.degraded("%s: the answer could not be written: %w", doing, err)
	}
	if len(i.Left) > 0 {
		return errDegraded
	}
	return nil
}
