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
		Short: "Make a policy of another tool's limits",
		Long: `Print a policy that has the limits of another tool. Nothing is changed.

What a policy cannot express is listed on stderr and at the top of the policy: what, where, why, and what to do
about it. With -j, one object has the policy, its rules and this list.

Exit codes: 0 all was imported; 1 the input cannot be read; 4 something was left out.`,
		Example: `  shapectl import libreqos ShapedDevices.csv --device eth1 >policy.yaml
  shapectl import tc eth0 eth1 >policy.yaml
  nft -j list ruleset | shapectl import nft - --device eth1 >policy.yaml`,
		Args: func(cmd *cobra.Command, given []string) error {
			if len(given) > 0 {
				return unknownCommand(cmd, given[0])
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			return inputf("import: the tool is missing; use libreqos, tc or nft")
		},
	}
	cmd.AddCommand(importLibreQoSCommand(e), importTCCommand(e), importNFTCommand(e))
	return cmd
}

func importLibreQoSCommand(e *env) *cobra.Command {
	var device, upload string
	cmd := &cobra.Command{
		Use:   "libreqos FILE|- --device DEV [--upload DEV]",
		Short: "Make a policy of LibreQoS's ShapedDevices.csv",
		Long: `Print a policy that has the limits of LibreQoS's ShapedDevices.csv, of any version with a header.

Each address and network of a row becomes a rule:

  Download Max Mbps  is the rate on egress of --device, which faces subscribers
  Upload Max Mbps    is the rate on its ingress; or with --upload on egress of
                     that device, which faces the Internet, by source address

Circuit and device become the name of the rule; circuit ID, parent node and comment become its note. Listed and left out are guaranteed rates, the tree of nodes, rates that
several addresses share (each gets all of it), rates of 0, and addresses of an earlier row.`,
		Example: `  shapectl import libreqos ShapedDevices.csv --device eth1 >policy.yaml`,
		Args:    args(1, 1),
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
	cmd.Flags().StringVar(&device, "device", "", "the `device` that faces subscribers")
	cmd.Flags().StringVar(&upload, "upload", "", "the `device` that faces the Internet, to limit uploads there")
	return cmd
}

func importNFTCommand(e *env) *cobra.Command {
	var device string
	cmd := &cobra.Command{
		Use:   "nft FILE|- [--device DEV]",
		Short: "Make a policy of the limits of nftables",
		Long: `Print a policy that has the limits of nftables, as 'nft -j list ruleset' prints them.

Limits in bytes by address are imported: 'limit rate over ... drop', 'limit rate ... accept' if the rest is
dropped, named limits and maps to them, sets, ranges, verdict maps, chains that rules jump to, and sets and
meters with a limit for each address. A rule with iifname is for ingress, one with oifname for egress. A rule with
neither is for --device: packets to an address leave it, packets from an address enter it.
Comments of nft rules become names.

Listed and left out are limits in packets, limits on more than an address, and limits on top of each other.`,
		Example: `  nft -j list ruleset | shapectl import nft - --device eth1 >policy.yaml`,
		Args:    args(1, 1),
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
		Short: "Make a policy of devices' own traffic control",
		Long: `Print a policy that has the limits that tc set on devices, as the kernel has them now.

Policers of filters by address (u32, also with hash tables, flower, matchall) on clsact, ingress and root qdiscs
are imported, also tbf, and htb classes that filters by address lead to, with the default class. htb and tbf delay
packets; these rules drop them, so they get at least the default capacity. Handles of classes become notes.

Listed and left out are guaranteed rates, borrowing, limits of parent classes, filters by firewall mark or by more
than an address, and other qdiscs. tc keeps its limits: until you remove them, both limit.`,
		Example: `  shapectl import tc eth0 eth1 >policy.yaml`,
		Args:    args(1, 1<<16),
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
			return e.imported("import tc "+strings.Join(given, " "), plain.Command(e.netns, "import tc", given...), imported)
		},
	}
}

// importFile imports a file or standard input.
func (e *env) importFile(tool, name string, cmd *cobra.Command, read func(name string, text io.Reader) (importer.Imported, error)) error {
	if e.netns != "" {
		return inputf("import %s: -n has no meaning here; leave it out", tool)
	}
	file, _, err := e.open(name)
	if err != nil {
		return inputf("import %s: %w", tool, err)
	}
	defer file.Close()
	imported, err := read(inputName(name), file)
	if errors.As(err, new(policyfile.Errors)) {
		return inputf("import %s: %w", tool, err) // they have positions
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
	return e.imported("import "+tool+" "+inputName(name), plain.Command("", command, name), imported)
}

// imported prints what command, which is for a shell, imported.
func (e *env) imported(doing, command string, i importer.Imported) error {
	// Some device names cannot be in a policy. Then nothing of it is printed.
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
