package loader

import (
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// expedited is how the kernel is told not to take its time for grace periods: by any number but 0.
	expedited = "/sys/kernel/rcu_expedited"
	// hurried is the number by which commands tell it so: 0x736870, "shp". Another one is the administrator's.
	hurried = "7563376"
	relaxed = "0"
	// manyHooks are so many that it is worth it.
	manyHooks = 8
)

// hurry runs f, which attaches or detaches so many hooks. For each, Linux waits for an
// RCU grace period under a lock that all share: with 200 devices that is seconds, if
// nobody tells it to hurry. Where that is not allowed, it takes its time.
func (n *Namespace) hurry(hooks int, f func() error) error {
	if hooks < manyHooks {
		return f()
	}
	// Each command in a hurry has locked another byte; the kernel unlocks it if the command is killed.
	file := n.lockHaste(unix.Flock_t{Type: unix.F_WRLCK, Start: rand.Int64N(1 << 40), Len: 1})
	if file == nil {
		return f()
	}
	defer n.relax()
	defer file.Close()
	if n.haste() == relaxed {
		file.WriteString(hurried + "\n")
	}
	return f()
}

// relax ends what hurry has begun, once no command of any namespace is in a hurry. To look for
// that takes a lock for reading only: so nobody who may not write there can keep it from ending.
func (n *Namespace) relax() {
	if n.haste() != hurried {
		return
	}
	if file := n.lockHaste(unix.Flock_t{Type: unix.F_RDLCK}); file != nil {
		file.WriteString(relaxed + "\n")
		file.Close()
	}
}

func (n *Namespace) haste() string {
	text, _ := os.ReadFile(n.root + expedited)
	number, _, _ := strings.Cut(string(text), "\n")
	return number
}

// lockHaste locks a part of the file until it is closed; nil if others have locked that, or where it may not be written.
func (n *Namespace) lockHaste(part unix.Flock_t) *os.File {
	file, err := os.OpenFile(n.root+expedited, os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	for range 10 { // while another command looks whether anybody is in a hurry
		if unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &part) == nil {
			return file
		}
		time.Sleep(time.Millisecond)
	}
	file.Close()
	return nil
}
