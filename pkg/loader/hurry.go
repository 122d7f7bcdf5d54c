package loader

import (
	"os"
	"path/filepath"
	"strings"
)

const (
	// expedited is how the kernel is told not to take its time for grace periods.
	expedited = "/sys/kernel/rcu_expedited"
	// hurryPin marks that a command has told it so.
	hurryPin = "hurry"
	// manyHooks are so many that it is worth it.
	manyHooks = 8
)

// hurry runs f, which attaches or detaches so many hooks. For each, Linux waits for an
// RCU grace period under a lock that all share: with 200 devices that is seconds, if
// nobody tells it to hurry. Where that is not allowed, it takes its time.
func (n *Namespace) hurry(hooks int, f func() error) error {
	if hooks < manyHooks || !relaxed() {
		return f()
	}
	mark := filepath.Join(n.dir, hurryPin)
	if err := makeDir(mark); err != nil {
		return err
	}
	os.WriteFile(expedited, []byte("1"), 0)
	defer relax(n.dir)
	return f()
}

func relaxed() bool {
	text, err := os.ReadFile(expedited)
	return err == nil && strings.TrimSpace(string(text)) == "0"
}

// relax ends what hurry has begun for a namespace, also in a command that was killed.
func relax(home string) error {
	mark := filepath.Join(home, hurryPin)
	if !exists(mark) {
		return nil
	}
	os.WriteFile(expedited, []byte("0"), 0)
	return unlink(mark)
}
