package testenv

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// Seed is where a test's random numbers begin: another place each time, which
// a failure prints, unless the environment says which.
func Seed(tb testing.TB) uint64 {
	tb.Helper()
	const variable = "SHAPECTL_SEED"
	seed := rand.Uint64()
	if s, ok := os.LookupEnv(variable); ok {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			tb.Fatalf("%s: %v; set it to a number that a test has printed", variable, err)
		}
	}
	tb.Logf("repeat this with %s=%d", variable, seed)
	return seed
}
