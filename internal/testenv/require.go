// Package testenv says what a test needs, and finds what tests share. Only
// tests import it.
package testenv

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// NoSkip is the environment variable that turns every skip into a failure: in
// CI a test that can not run is one that nobody would miss.
const NoSkip = "SHAPECTL_NO_SKIP"

// Skip skips the test, or fails it where skips are not allowed.
func Skip(tb testing.TB, why string) {
	tb.Helper()
	if os.Getenv(NoSkip) == "1" {
		tb.Fatalf("%s, and %s is set", why, NoSkip)
	}
	tb.Skip(why)
}

// Root skips a test that loads programs or makes devices where it may not.
func Root(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() != 0 {
		Skip(tb, "needs root")
	}
}

// OlderThan reports whether the kernel is an older one than Linux major.minor.
func OlderThan(tb testing.TB, major, minor int) bool {
	tb.Helper()
	var name unix.Utsname
	Must(tb, unix.Uname(&name))
	var ma, mi int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &ma, &mi); err != nil {
		tb.Fatalf("what the kernel calls itself: %v", err)
	}
	return ma < major || ma == major && mi < minor
}

// Must ends the test unless err is nil. It skips only where the kernel has
// said, by a typed error, that it lacks what was asked for.
func Must(tb testing.TB, err error) {
	tb.Helper()
	if err == nil {
		return
	}
	if errors.Is(err, ebpf.ErrNotSupported) {
		Skip(tb, "kernel lacks a feature: "+err.Error())
	}
	tb.Fatal(err)
}
