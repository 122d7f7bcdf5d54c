package testenv

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// Seed returns a random seed, which the log of a failure shows, or that of the
// environment variable SHAPECTL_SEED.
func Seed(tb testing.TB) uint64 {
	tb.Helper()
	const variable = "SHAPECTL_SEED"
	seed := rand.Uint64()
	if s, ok := os.LookupEnv(variable); ok {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			tb.Fatalf("%s: %v; set it to a seed from a test's log", variable, err)
		}
	}
	tb.Logf("to repeat, set %s=%d", variable, seed)
	return seed
}

// Rounds returns how often a test repeats what it draws at random: n times the environment variable SHAPECTL_ROUNDS. The
// nightly tests set it, so that `make test` stays short.
func Rounds(tb testing.TB, n int) int {
	tb.Helper()
	text, set := os.LookupEnv("SHAPECTL_ROUNDS")
	if !set {
		return n
	}
	times, err := strconv.Atoi(text)
	if err != nil || times < 1 {
		tb.Fatalf("SHAPECTL_ROUNDS is %q, not a number from 1", text)
	}
	return n * times
}
