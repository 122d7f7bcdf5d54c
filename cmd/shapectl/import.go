package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/importer"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

func importCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "import csv|libreqos|tc|nft ...",
		Short: "Convert limits of another tool to a policy",
		Long: `Print a policy that has the limits of another tool. Nothing is changed.

What a policy cannot express is listed on stderr and at the top of the policy, with one line for each kind: what
becomes of the limit, what it was, where, and what to do about it. With -j, one object has the policy, its rules and
all places of each kind, with the reason.

Exit codes: 0 all was imported; 1 the input cannot be read, and there is no policy; 4 there is a policy, and something
was left out or changed: read the report before you apply it.

A file that ends within a row or an object is refused. If it ends after a row, nothing shows that others are missing:
use 'shapectl apply --max-remove' for the policy.`,
		Example: `  shapectl import libreqos ShapedDevices.csv --device eth1 >policy.yaml
  shapectl import tc eth0 eth1 >policy.yaml
  nft -j list ruleset | shapectl import nft - --device eth1 >policy.yaml`,
		RunE: needsCommand,
	}
	cmd.AddCommand(importCSVCommand(e), importLibreQoSCommand(e), importTCCommand(e), importNFTCommand(e))
	return cmd
}

func importCSVCommand(e *env) *cobra.Command {
	var o importer.CSVOptions
	cmd := &cobra.Command{
		Use:   "csv FILE|- --device DEV [--upload DEV]",
		Short: "Convert a table of customers to a policy",
		Long: `Print a policy for a table of customers in CSV, with commas or semicolons. Its first line names the columns.

These are known, in any order and case, also by other common names such as customer, ip, down and parent. Others are listed:

  name              of the customer
  address           addresses and networks, IPv4 and IPv6, several with commas;
                    also in columns ipv4 and ipv6
  download, upload  Mbit/s, or a rate with a unit such as 500k or 1 Gbps
  quota, period     100GB (or 100) per month, week or day; month by default. It
                    counts both directions together, binary: 100 GB are 107.4e9 bytes
  then              the rate once the quota is used up, or drop
  pool              the name of a row without an address, which becomes a pool
  note

Downloads are limited on egress of --device, which faces customers. Uploads are limited on its ingress; or with --upload
on egress of that device, which faces the Internet, by source address. A customer with a quota becomes a pool with the
quota and the sum of both rates, which has the rules of both directions. So does a row without an address.
No two rows have the same name or address.

Rows that cannot be read are an error, which names all of them. With --skip-bad, they are left out, and listed.`,
		Example: `  shapectl import csv customers.csv --device eth1 --then 5mbit >policy.yaml`,
		Args:    args(1, 1),
		RunE: func(_ *cobra.Command, given []string) error {
			switch o.Device {
			case "":
				return inputf("import csv: --device is missing; name the device that faces the customers")
			case o.Upload:
				return inputf("import csv: --upload is the same device; leave it out to limit ingress of %s", o.Device)
			}
			return e.importFile("csv", given[0], func(table importer.File) (importer.Imported, error) { return importer.CSV(table, o) })
		},
	}
	cmd.Flags().StringVar(&o.Device, "device", "", "the `device` that faces customers")
	cmd.Flags().StringVar(&o.Upload, "upload", "", "the `device` that faces the Internet, to limit uploads there")
	cmd.Flags().Var(&o.Then, "then", "what comes after the quota of a row that does not say it: a rate, or drop")
	cmd.Flags().BoolVar(&o.SkipBad, "skip-bad", false, "leave out rows that cannot be read, and list them")
	return cmd
}

func importLibreQoSCommand(e *env) *cobra.Command {
	var network string
	o := importer.LibreQoSOptions{Share: policy.Share{Kind: policy.ShareFlow}}
	cmd := &cobra.Command{
		Use:   "libreqos FILE|- --device DEV [--upload DEV] [--network FILE]",
		Short: "Convert LibreQoS's files to a policy",
		Long: `Print a policy that has the limits of LibreQoS's ShapedDevices.csv, of any version with a header, and of the tree
of nodes in network.json, which is found beside it or named by --network.

Downloads are limited on egress of --device, which faces subscribers. Uploads are limited on its ingress; or with
--upload on egress of that device, which faces the Internet, by source address. For each of them:

  a node with a rate   becomes a pool, such as "AP_9 down", in that of its parent;
                       its subscribers have fair shares
  a circuit            becomes a rule in the pool of its parent node; with
                       several addresses, a pool with a rule for each. Its
                       flows have fair shares, unless --share says otherwise
  Download Max Mbps    is its rate; the same for uploads
  Download Min Mbps    is its guarantee; the same for uploads

Guarantees that add up to more than a node's rate are lowered: all within it get 3/4 of theirs, or 1/2, 3/8, 1/4 and
so on. These steps are large, so a change of one circuit seldom changes others. The report names who loses most.
Circuits that --protect names keep their guarantee, if these fit. LibreQoS lowers all to 1 Mbps or less.

Circuits are known by their ID: another circuit of the same name changes nothing. The pools of circuit 10001 are "10001
down" and "10001 up". All its rules have the name of its first row with the ID, such as "School (10001)". Without an ID,
the first address stands for it. Other names, device, comment, and a parent node without a rate become the note of a
rule. Names of more than 64 bytes and notes of more than 256 are cut. The rates of a circuit with one address become a
plan: down-50-10 and up-50-10 for 50 Mbps down and 10 Mbps up.

Rows that cannot be read are an error, which names all of them. With --skip-bad, they are left out, and listed.

A Max Mbps of 0 makes no rule, so that direction of the circuit has no limit. These circuits are listed first.
Also listed, but not imported: guarantees of circuits without a node, and addresses of an earlier circuit.`,
		Example: `  shapectl import libreqos /opt/libreqos/src/ShapedDevices.csv --device eth1 >policy.yaml`,
		Args:    args(1, 1),
		RunE: func(cmd *cobra.Command, given []string) error {
			switch {
			case o.Device == "":
				return inputf("import libreqos: --device is missing; name the device that faces the subscribers")
			case o.Upload == o.Device:
				return inputf("import libreqos: --upload is the same device; leave it out to limit ingress of %s", o.Device)
			case o.Share.Kind == policy.ShareMember:
				return inputf("import libreqos: --share member is for pools of several circuits; use flow, host or none")
			case network == given[0]:
				return inputf("import libreqos: --network needs a file of its own; name LibreQoS's network.json")
			}
			for _, pattern := range o.Protect {
				if _, err := path.Match(pattern, ""); err != nil {
					return inputf("import libreqos: --protect %q is a malformed pattern; use * for any characters, and \\ before a character to match it literally", pattern)
				}
			}
			found := ""
			if beside := filepath.Join(filepath.Dir(given[0]), "network.json"); network == "" && given[0] != "-" {
				if _, err := os.Stat(beside); !errors.Is(err, fs.ErrNotExist) {
					network, found = beside, beside
				}
			}
			return e.importFile("libreqos", given[0], func(devices importer.File) (importer.Imported, error) {
				imported, err := e.importLibreQoS(devices, network, o)
				if found != "" {
					imported.Notes = append(imported.Notes, "the tree of nodes is that of "+found)
				}
				return imported, err
			})
		},
	}
	cmd.Flags().StringVar(&o.Device, "device", "", "the `device` that faces subscribers")
	cmd.Flags().StringVar(&o.Upload, "upload", "", "the `device` that faces the Internet, to limit uploads there")
	cmd.Flags().StringVar(&network, "network", "", "the `file` with the tree of nodes (default network.json beside FILE)")
	cmd.Flags().Var(&o.Share, "share", "who has fair shares of a circuit's rate: flow, host, /N or none")
	cmd.Flags().StringArrayVar(&o.Protect, "protect", nil, "do not lower guarantees of circuits whose ID, name or comment matches this `pattern`; may be repeated")
	cmd.Flags().BoolVar(&o.SkipBad, "skip-bad", false, "leave out rows that cannot be read, and list them")
	return cmd
}

// importLibreQoS imports a ShapedDevices.csv with a tree of nodes; "" for none.
func (e *env) importLibreQoS(devices importer.File, network string, o importer.LibreQoSOptions) (importer.Imported, error) {
	if network == "" {
		return importer.LibreQoS(devices, importer.File{}, o)
	}
	tree, err := e.open(network)
	if err != nil {
		return importer.Imported{}, err
	}
	defer tree.Close()
	return importer.LibreQoS(devices, importer.File{Name: inputName(network), Text: tree}, o)
}

func importNFTCommand(e *env) *cobra.Command {
	var device string
	cmd := &cobra.Command{
		Use:   "nft FILE|- [--device DEV]",
		Short: "Convert limits of nftables to a policy",
		Long: `Print a policy that has the limits of nftables, as 'nft -j list ruleset' prints them.

Limits in bytes by address are imported: 'limit rate over ... drop', named limits and maps to them, sets, ranges,
verdict maps, chains that rules jump to, and sets and meters with a limit for each address. A rule with iifname is
for ingress, one with oifname for egress. A rule with neither is for --device: packets to an address leave it, packets
from an address enter it. 'limit rate ... accept' is listed: write it as 'limit rate over ... drop' first.
Comments of nft rules become names.

If packets must conform to several limits, such as one for each host and one for all, the limit of more networks
becomes a pool, and the rules of the others are within it.

Listed, but not imported: limits in packets, limits on more than an address or on all but some, quotas, matches of
iptables, limits whose excess packets jump to a chain, and limits in chains for NAT.`,
		Example: `  nft -j list ruleset | shapectl import nft - --device eth1 >policy.yaml`,
		Args:    args(1, 1),
		RunE: func(_ *cobra.Command, given []string) error {
			return e.importFile("nft", given[0], func(ruleset importer.File) (importer.Imported, error) {
				return importer.NFT(ruleset.Name, ruleset.Text, device)
			})
		},
	}
	cmd.Flags().StringVar(&device, "device", "", "the `device` of rules that name none")
	return cmd
}

func importTCCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "tc DEV...",
		Short: "Convert limits of tc to a policy",
		Long: `Print a policy that has the limits that tc set on devices, as the kernel has them now.

Policers of filters by address (u32, also with hash tables, flower, matchall) on clsact, ingress and root
qdiscs are imported, also tbf, and htb classes that filters by address lead to, with the default class. htb and tbf
delay packets; these rules drop them. So they have the burst of tc as capacity, but at least the default. With
'excess: delay', set queue to the limit of tbf. Handles of classes become notes.

Limits of an ifb device become ingress rules of the device that redirects its packets there, or egress rules if it
redirects what leaves. Name both devices. If several devices redirect to it, they share its limits as pools.

A class becomes a rule, or a pool if it has classes below it or filters for several networks. ceil is its rate, rate
its guarantee in the pool of its parent class, and its weight there follows from quantum. A class without a parent
has its rate, because it cannot borrow. Guarantees that add up to more than the parent's rate are lowered to 3/4 of
theirs, or 1/2, 3/8 and so on; htb would exceed that rate.

Everything else that may limit packets is listed, but not imported: priorities of classes, policers that do not drop,
filters by firewall mark or by more than an address, other filters and actions, limits inside a queue, 'fq maxrate',
and other qdiscs. So are peak rates and size tables. For cake, the report has the 'shapectl line' command that does
the same. tc keeps its limits: until you remove them, both limit.`,
		Example: `  shapectl import tc eth0 eth1 >policy.yaml`,
		Args:    args(1, 1<<16),
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return e.complete(devices)(cmd, nil, typed)
		},
		RunE: func(cmd *cobra.Command, given []string) error {
			for i, name := range given {
				if slices.Contains(given[:i], name) {
					return inputf("import tc: device %s appears twice", name)
				}
			}
			var dumps []importer.Dump
			err := netns.In(e.netns, func() error {
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
			imported, err := importer.TC(dumps, e.netns)
			if err != nil {
				return fmt.Errorf("import tc: %w", err)
			}
			return e.imported("import tc "+strings.Join(given, " "), imported)
		},
	}
}

// importFile imports a file or standard input.
func (e *env) importFile(tool, name string, read func(importer.File) (importer.Imported, error)) error {
	if e.netns != "" {
		return inputf("import %s: -n has no meaning here; leave it out", tool)
	}
	file, err := e.open(name)
	if err != nil {
		return inputf("import %s: %w", tool, err)
	}
	defer file.Close()
	imported, err := read(importer.File{Name: inputName(name), Text: file})
	if errors.As(err, new(policyfile.Errors)) {
		return inputf("import %s: %w; nothing was written", tool, err) // they have positions
	}
	if err != nil {
		return inputf("import %s %s: %w", tool, inputName(name), err)
	}
	return e.imported("import "+tool+" "+inputName(name), imported)
}

// imported prints what was imported.
func (e *env) imported(doing string, i importer.Imported) error {
	// Some device names cannot be in a policy. Then nothing of it is printed.
	policy, err := report.ImportedPolicy("shapectl "+e.typed, i)
	if err != nil {
		return inputf("%s: %w", doing, err)
	}
	if e.json {
		err = report.JSON(e.out, report.NewImported(policy, i))
	} else if _, err = io.WriteString(e.out, policy); err == nil {
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
