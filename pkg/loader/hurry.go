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

// A haste is the file by which the kernel is told whether to hurry.
type haste string

// hurry runs f, which attaches or detaches so many hooks. For each, Linux waits for an
// RCU grace period under a lock that all share: with 200 devices that is seconds, if
// nobody tells it to hurry. Where that is not allowed, it takes its time.
func (file haste) hurry(hooks int, f func() error) error {
	if hooks < manyHooks {
		return f()
	}
	// Each command in a hurry has locked another byte; the kernel unlocks it if the command is killed.
	locked := file.lock(unix.Flock_t{Type: unix.F_WRLCK, Start: rand.Int64N(1 << 40), Len: 1})
	if locked == nil {
		return f()
	}
	defer file.relax()
	defer locked.Close()
	if file.now() == relaxed {
		locked.WriteString(hurried + "\n")
	}
	return f()
}

// relax ends what hurry has begun, once no command of any namespace is in a hurry. To look for
// that takes a lock for reading only: so nobody who may not write there can keep it from ending.
func (file haste) relax() {
	if file.now() != hurried {
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

// lock locks a part of the file until it is closed; nil if others have locked that, or where it may not be written.
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
