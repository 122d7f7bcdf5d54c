package netinfo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
)

// PPPoE returns the names of the devices that carry PPPoE sessions.
func PPPoE() ([]string, error) {
	text, err := os.ReadFile("/proc/thread-self/net/pppoe")
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // else the module is not loaded
		return nil, fmt.Errorf("list the PPPoE sessions: %w", err)
	}
	return pppoeDevices(string(text)), nil
}

// pppoeDevices reads what pppoe_seq_show in drivers/net/ppp/pppoe.c writes.
func pppoeDevices(text string) (names []string) {
	_, sessions, _ := strings.Cut(text, "\n") // after the head
	for line := range strings.Lines(sessions) {
		if fields := strings.Fields(line); len(fields) == 3 && !slices.Contains(names, fields[2]) {
			names = append(names, fields[2])
		}
	}
	return names
}
