package testenv

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// SeedVariable is the environment variable that repeats a random test as it was.
const SeedVariable = "SHAPECTL_SEED"

// Seed is where a test's random numbers begin: another place each time, which
// a failure prints, unless the environment says which.
func Seed(tb testing.TB) uint64 {
	tb.Helper()
	seed := rand.Uint64()
	if s, ok := os.LookupEnv(SeedVariable); ok {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			tb.Fatalf("%s: %v; set it to a number that a test has printed", SeedVariable, err)
		}
	}
	tb.Logf("repeat this with %s=%d", SeedVariable, seed)
	return seed
}
