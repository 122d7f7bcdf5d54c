// Command shapectl holds network traffic to the rate that was agreed. Each
// command opens the state that is pinned in a bpffs, does one thing, and ends;
// the kernel goes on without it.
package main

import (
	"os"
)

// version is set by the Makefile.
var version = "dev"

func main() {
	e := &env{in: os.Stdin, out: os.Stdout, err: os.Stderr, getenv: os.Getenv}
	os.Exit(e.run(os.Args[1:]))
}
