// Package testenv has the requirements and shared helpers of tests. Only tests import
// it.
package testenv

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// NoSkip is an environment variable. If it is 1, skips are failures: in CI nobody
// would notice a skipped test.
const NoSkip = "SHAPECTL_NO_SKIP"

// Skip skips the test, or fails it if NoSkip is set.
func Skip(tb testing.TB, why string) {
	tb.Helper()
	if os.Getenv(NoSkip) == "1" {
		tb.Fatalf("%s, and %s is set", why, NoSkip)
	}
	tb.Skip(why)
}

// Root skips a test that is not run as root.
func Root(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() != 0 {
		Skip(tb, "needs root")
	}
}

// OlderThan reports whether the kernel is older than Linux major.minor.
func OlderThan(tb testing.TB, major, minor int) bool {
	tb.Helper()
	var name unix.Utsname
	Must(tb, unix.Uname(&name))
	var ma, mi int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &ma, &mi); err != nil {
		tb.Fatalf("parse the kernel release: %v", err)
	}
	return ma < major || ma == major && mi < minor
}

// Must ends the test unless err is nil. It skips the test if the error says that the
// kernel lacks a feature.
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
