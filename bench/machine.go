package main

import (
	"bytes"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// machine is what the figures were taken on.
type machine struct {
	CPU         string
	CPUs        int
	Caches      string
	Memory      string
	Kernel      string
	ClockSource string
	Versions    string
}

func thisMachine() machine {
	var name unix.Utsname
	unix.Uname(&name)
	return machine{
		CPU:         cpuModel(),
		CPUs:        runtime.NumCPU(),
		Kernel:      string(bytes.TrimRight(name.Release[:], "\x00")),
		ClockSource: readLine("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
	}
}

// readLine is the text of a file of one line; empty where there is none.
func readLine(path string) string {
	data, _ := os.ReadFile(path)
	return strings.TrimSpace(string(data))
}

func cpuModel() string {
	data, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(data)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
