// Package hurry expedites the RCU grace periods of the kernel while a command attaches or detaches many programs.
package hurry

import (
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// File makes the kernel expedite grace periods, by any number but 0.
	File = "/sys/kernel/rcu_expedited"
	// Number is what commands write: 0x736870, "shp". Any other number is the administrator's.
	Number  = "7563376"
	relaxed = "0"
	// many is the smallest number of programs for which commands do that: those of a pod.
	many = 2
)

// A haste is the file that makes the kernel expedite grace periods.
type haste string

// Up runs f, which attaches or detaches so many programs. For each, Linux waits for an RCU
// grace period under a global lock: that takes seconds for 200 devices, unless grace
// periods are expedited. Where this process may not do that, f takes longer.
func Up(programs int, f func() error) error { return haste(File).up(programs, f) }

// Relax ends what a killed command began, once no command of any namespace needs it.
func Relax() { haste(File).relax() }

func (file haste) up(programs int, f func() error) error {
	if programs < many {
		return f()
	}
	// Each such command locks another byte; the kernel unlocks it if the command is killed.
	locked := file.lock(unix.Flock_t{Type: unix.F_WRLCK, Start: rand.Int64N(1 << 40), Len: 1})
	if locked == nil {
		return f()
	}
	defer file.relax()
	defer locked.Close()
	if file.now() == relaxed {
		locked.WriteString(Number + "\n")
	}
	return f()
}

// relax takes a read lock on a file opened for writing, so a process that may not write cannot prevent it.
func (file haste) relax() {
	if file.now() != Number {
		return
	}
	if locked := file.lock(unix.Flock_t{Type: unix.F_RDLCK}); locked != nil {
		locked.WriteString(relaxed + "\n")
		locked.Close()
	}
}

func (file haste) now() string {
	text, _ := os.ReadFile(string(file))
	number, _, _ := strings.Cut(string(text), "\n")
	return number
}

// lock locks a part of the file until it is closed; nil if others have locked it, or if the file is not writable.
func (file haste) lock(part unix.Flock_t) *os.File {
	opened, err := os.OpenFile(string(file), os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	for range 10 { // while another command looks whether anybody is in a hurry
		if unix.FcntlFlock(opened.Fd(), unix.F_OFD_SETLK, &part) == nil {
			return opened
		}
		time.Sleep(time.Millisecond)
	}
	opened.Close()
	return nil
}
