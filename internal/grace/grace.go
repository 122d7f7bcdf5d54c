// Package grace waits for packets that may still use what was removed from the maps of a namespace.
package grace

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
)

// MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// Wait waits for packets that may still use what was removed in an epoch; 0 means never. The epoch tells what has been waited
// for, so many removals wait once.
func Wait(c *bpf.AbiChange, epoch uint32) {
	if epoch != c.Epoch {
		return
	}
	// This is synchronize_rcu(), and programs run as RCU readers. Kernels with nohz_full
	// refuse it; then wait much longer than any packet takes.
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(50 * time.Millisecond)
	}
	if c.Epoch++; c.Epoch == 0 {
		c.Epoch = 1
	}
}
