package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// machine describes where figures were measured.
type machine struct {
	CPU         string
	CPUs        int
	Caches      string
	Memory      string
	Kernel      string
	ClockSource string
	Peers       string // versions of their tools
}

func thisMachine() machine {
	var name unix.Utsname
	var info unix.Sysinfo_t
	unix.Uname(&name) // neither can fail
	unix.Sysinfo(&info)
	model := cpuInfo("model name")
	if model == "" {
		model = runtime.GOARCH
	}
	if strings.Contains(" "+cpuInfo("flags")+" ", " hypervisor ") {
		model += ", in a virtual machine"
	}
	return machine{
		CPU:         model,
		CPUs:        runtime.NumCPU(),
		Caches:      caches(),
		Memory:      fmt.Sprintf("%.0f GiB", float64(info.Totalram)*float64(info.Unit)/(1<<30)),
		Kernel:      string(bytes.TrimRight(name.Release[:], "\x00")),
		ClockSource: readLine("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
		Peers:       peerVersions(),
	}
}

// readLine returns the text of a file of one line, or "" if it cannot be read.
func readLine(path string) string {
	data, _ := os.ReadFile(path)
	return strings.TrimSpace(string(data))
}

// cpuInfo returns a field of the first CPU.
func cpuInfo(what string) string { return readField("/proc/cpuinfo", what) }

// readField returns the first value of a name in a file of names and values, or "".
func readField(path, name string) string {
	data, _ := os.ReadFile(path)
	for line := range strings.Lines(string(data)) {
		if found, value, _ := strings.Cut(line, ":"); strings.TrimSpace(found) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// readMiB returns a value that such a file has in kB, or 0.
func readMiB(path, name string) float64 {
	kib, _ := strconv.ParseFloat(strings.TrimSuffix(readField(path, name), " kB"), 64)
	return kib / 1024
}

// caches returns the data caches of the first CPU, nearest first.
func caches() string {
	var list []string
	dirs, _ := filepath.Glob("/sys/devices/system/cpu/cpu0/cache/index[0-9]")
	for _, dir := range dirs {
		if readLine(dir+"/type") == "Instruction" {
			continue
		}
		list = append(list, "L"+readLine(dir+"/level")+" "+readLine(dir+"/size"))
	}
	return strings.Join(list, ", ")
}

// peerVersions returns the versions of the tools of peers, in their words.
func peerVersions() string {
	var list []string
	for _, command := range [][]string{{"tc", "-V"}, {"nft", "--version"}, {"iptables", "-V"}, {"iperf3", "--version"}} {
		output, err := exec.Command(command[0], command[1:]...).Output()
		if err != nil {
			continue // not installed
		}
		line, _, _ := strings.Cut(string(output), "\n")
		line, _, _ = strings.Cut(line, " (")
		list = append(list, strings.TrimPrefix(strings.TrimSpace(line), "tc utility, "))
	}
	return strings.Join(list, ", ")
}

// shapectlVersion is the version of the sources.
func shapectlVersion() string {
	output, err := exec.Command("git", "describe", "--tags", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(output))
}
