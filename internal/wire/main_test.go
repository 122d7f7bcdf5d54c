//go:build guest

// Package wire tests departure times with real traffic between network namespaces. It
// runs in guests (scripts/guest.sh -i) with one CPU, where time is the number of
// instructions, so that measured times do not depend on the load of the machine. It is
// only built there, with the tag guest.
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
	// A garbage collection may stop a sender for milliseconds after it has read the clock.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(512 << 20)
	if err := settle(); err != nil {
		fmt.Fprintln(os.Stderr, "wait until the guest has settled:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// settle waits until the kernel uses its final clocksource: a switch stops all CPUs, and
// time jumps.
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
