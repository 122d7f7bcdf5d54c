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
		Long: `Make a policy of another tool's limits, and print it; nothing is changed. What
can not be carried over is listed on stderr, a line for each kind of thing: what
it is, where, why, and what to do about it. It also stands at the top of the
policy. With -j, one object is printed that has the policy, its rules, and all
that was not carried over.

Exit codes: 0 all was carried over; 1 the input can not be read; 4 something was
not carried over.`,
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
			return inputf("import: say from what: libreqos, tc or nft; see 'shapectl import --help'")
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
		Long: `Make a policy of LibreQoS's ShapedDevices.csv, of any version with a header; -
reads standard input. Each address and network of a row gets a rule of its own:

  Download Max Mbps  is the rate of what leaves --device, which faces subscribers
  Upload Max Mbps    is the rate of what enters it or, with --upload, of what
                     leaves that device, which faces the Internet, by its source

Names of subscribers become comments. Not carried over, and listed: rates that
are guaranteed, the tree of nodes, a rate that several addresses share (each has
all of it), rates of 0, and addresses that are in an earlier row, too.`,
		Args: args(1, 1),
		RunE: func(cmd *cobra.Command, given []string) error {
			switch {
			case device == "":
				return inputf("import libreqos: --device is missing; name the one that faces subscribers")
			case cmd.Flags().Changed("upload") && upload == "":
				return inputf("import libreqos: --upload has no name; leave it out to limit what enters %s", device)
			case upload == device:
				return inputf("import libreqos: --upload is the same device; leave it out to limit what enters %s", device)
			}
			return e.importFile("libreqos", given[0], cmd, func(name string, text io.Reader) (importer.Imported, error) {
				return importer.LibreQoS(name, text, device, upload)
			})
		},
	}
	cmd.Flags().StringVar(&device, "device", "", "the `device` that faces subscribers")
	cmd.Flags().StringVar(&upload, "upload", "", "the `device` that faces the Internet, to limit what is uploaded as it leaves")
	return cmd
}

func importNFTCommand(e *env) *cobra.Command {
	var device string
	cmd := &cobra.Command{
		Use:   "nft FILE|- [--device DEV]",
		Short: "Make a policy of the limits of nftables",
		Long: `Make a policy of the limits of nftables: of what 'nft -j list ruleset' prints; -
reads standard input.

Carried over are limits in bytes by address: 'limit rate over ... drop', 'limit
rate ... accept' where the rest is dropped, named limits and maps to them, sets,
ranges, verdict maps, chains that rules jump to, and sets and meters with a limit
for each address. A rule's direction is ingress for iifname, and egress for
oifname. Where a rule names neither, it is for --device: what goes to an address
leaves that, and what comes from an address enters it.

Not carried over, and listed: limits in packets, limits of packets that have to
have more than an address, and limits one upon the other.`,
		Args: args(1, 1),
		RunE: func(cmd *cobra.Command, given []string) error {
			if cmd.Flags().Changed("device") && device == "" {
				return inputf("import nft: --device has no name; leave it out if the ruleset names all devices")
			}
			return e.importFile("nft", given[0], cmd, func(name string, text io.Reader) (importer.Imported, error) {
				return importer.NFT(name, text, device)
			})
		},
	}
	cmd.Flags().StringVar(&device, "device", "", "the `device` that limits are for where rules name none")
	return cmd
}

func importTCCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "tc DEV...",
		Short: "Make a policy of devices' own traffic control",
		Long: `Make a policy of devices' own traffic control, as the kernel has it now.

Carried over are policers of filters by address (u32, also with hash tables,
flower, matchall) on clsact, ingress and root qdiscs, classes of htb that filters
by address lead to, with the default class, and tbf. What htb and tbf delay is
dropped here, so these rules have the default capacity at least.

Not carried over, and listed: guaranteed rates and what classes borrow, limits of
parent classes, filters by firewall mark or by more than an address, and other
qdiscs. Nothing of traffic control is taken away: it and the rules would both
limit until it is.`,
		Args: args(1, 1<<16),
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return e.completeDevice(cmd, nil, typed)
		},
		RunE: func(cmd *cobra.Command, given []string) error {
			for i, name := range given {
				if slices.Contains(given[:i], name) {
					return inputf("import tc: device %s is named twice", name)
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

// importFile makes a policy of a file, or of standard input.
func (e *env) importFile(tool, name string, cmd *cobra.Command, read func(name string, text io.Reader) (importer.Imported, error)) error {
	if e.netns != "" {
		return inputf("import %s: -n has no meaning here, as no device is touched; leave it out", tool)
	}
	file, _, err := e.open(name)
	if err != nil {
		return inputf("import %s: %w", tool, err)
	}
	defer file.Close()
	imported, err := read(inputName(name), file)
	if errors.As(err, new(policyfile.Errors)) {
		return inputf("import %s: %w", tool, err) // they say where they are
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

// imported prints what was imported; command is what did it, for a shell.
func (e *env) imported(doing, command string, i importer.Imported) error {
	// Devices may have names that no file can have; of those there shall be no part of a policy.
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
