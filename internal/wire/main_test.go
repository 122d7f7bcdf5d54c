//go:build guest

// Package wire has tests of what leaves the wire where rules hold packets back:
// real traffic between network namespaces, in guests (scripts/guest.sh -i) whose
// time is a count of instructions on one CPU, so that times are what they are
// whatever else the machine does. Only there it is built, with the tag guest.
package wire

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	// A collection of garbage may hold a sender for milliseconds, after it has noted the time.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(512 << 20)
	if err := settle(); err != nil {
		fmt.Fprintln(os.Stderr, "wait until the guest has settled:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// settle waits until the kernel goes by its last clock: where it takes another
// one, time has a fold, and everything stops for it.
func settle() error {
	const clocksource = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
	for range 100 {
		name, err := os.ReadFile(clocksource)
		if err != nil {
			return err
		}
		var up unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
			return err
		}
		if string(name) == "tsc\n" && up.Nano() > int64(4*time.Second) {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return errors.New("no stable clock after 10 s: is this a guest of guest.sh -i?")
}
