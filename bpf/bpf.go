// Package bpf is the kernel side: the program shapectl.c, which contains the
// meters gcra.c and leaky.c, compiled, and the Go types of what is in its maps.
// All other Go code here is generated; `make generate` makes it anew, with the clang
// version that is named here so that the result is the same everywhere.
package bpf

import (
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
)

// Without CAP_PERFMON the verifier lets nothing be written over a place on the
// stack that held a pointer, which no-stack-slot-sharing keeps the compiler from.

//go:generate -command compile go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -cflags "-O2 -g -mcpu=v3 -mllvm -no-stack-slot-sharing -Wall -Wextra -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu"
//go:generate compile -type rule -type params -type cold_params -type bucket -type line -type key -type counters -type prefixes4 -type prefixes6 -type view -type change -type phase -type label_key -type label -type affected_key -type affected -type hook -type layout -type rule_flag Abi abi.c
//go:generate compile -no-global-types Shapectl shapectl.c

var read = sync.OnceValues(LoadShapectl)

// Spec is the program and its maps as they were compiled. The caller may change it.
func Spec() (*ebpf.CollectionSpec, error) {
	spec, err := read()
	if err != nil {
		return nil, fmt.Errorf("read the built-in program: %w", err)
	}
	return spec.Copy(), nil
}
