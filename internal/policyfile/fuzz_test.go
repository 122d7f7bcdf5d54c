package policyfile

import (
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// FuzzParse runs examine on any text.
func FuzzParse(f *testing.F) {
	f.Add([]byte(small))
	examples, err := filepath.Glob("../../examples/*.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range examples {
		text, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	for seed := range uint64(20) {
		f.Add(random{Rand: rand.New(rand.NewPCG(seed, 0))}.file())
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		hash := fnv.New64()
		hash.Write(text)
		examine(t, random{Rand: rand.New(rand.NewPCG(hash.Sum64(), 0))}, text)
	})
}
