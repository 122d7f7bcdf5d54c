// Package bpf is the kernel side: the programs gcra.c and leaky.c over the
// headers they share, compiled, and the Go types of what is in their maps. All
// Go code here is generated; `make generate` makes it anew, with the clang
// version that is named here so that the result is the same everywhere.
package bpf

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -cflags "-O2 -g -mcpu=v3 -mllvm -no-stack-slot-sharing -Wall -Wextra -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -type rule -type own -type bucket -type line -type key -type counters -type prefixes -type length -type lengths -type hook -type layout -type algorithm -type each -type excess -type rule_flag Abi abi.c
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -cflags "-O2 -g -mcpu=v3 -mllvm -no-stack-slot-sharing -Wall -Wextra -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -no-global-types Gcra gcra.c
//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -cflags "-O2 -g -mcpu=v3 -mllvm -no-stack-slot-sharing -Wall -Wextra -Werror -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu" -no-global-types Leaky leaky.c
