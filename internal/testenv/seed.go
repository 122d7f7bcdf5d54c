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
