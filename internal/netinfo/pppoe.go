package netinfo

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
)

// PPPoE returns the names of the devices that carry PPPoE sessions.
func PPPoE() ([]string, error) {
	f, err := os.Open("/proc/thread-self/net/pppoe")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // the module is not loaded
	}
	if err != nil {
		return nil, fmt.Errorf("list the PPPoE sessions: %w", err)
	}
	defer f.Close()
	return pppoeDevices(f)
}

// pppoeDevices reads what pppoe_seq_show in drivers/net/ppp/pppoe.c writes.
func pppoeDevices(r io.Reader) (names []string, err error) {
	lines := bufio.NewScanner(r)
	lines.Scan() // the head
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) == 3 && !slices.Contains(names, fields[2]) {
			names = append(names, fields[2])
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("list the PPPoE sessions: %w", err)
	}
	return names, nil
}
