package loader

import (
	"cmp"
	"errors"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netns"
)

const lockPatience = 10 * time.Second

// A place is where pins of a network namespace are, or would be.
type place struct {
	bpffs  string
	cookie uint64 // of the namespace
}

// A home is the directory with all pins of a network namespace; "" if there is none.
type home string

func (dir home) pin(name string) string { return filepath.Join(string(dir), name) }

// locate tells where the state of the calling thread's namespace is, or would be.
func locate(o Options) (at place, err error) {
	at.bpffs = cmp.Or(o.BPFFS, bpffs.Default)
	at.cookie, err = netns.Cookie()
	return at, err
}

// top is the directory of all homes.
func (at place) top() string { return filepath.Join(at.bpffs, "shapectl") }

// home is that of the namespace.
func (at place) home() home { return home(filepath.Join(at.top(), strconv.FormatUint(at.cookie, 10))) }

// trustTop checks the directories on the path to the homes. The error wraps fs.ErrNotExist if one is missing.
func (at place) trustTop() error {
	if err := bpffs.TrustBase(at.bpffs); err != nil {
		return err
	}
	return bpffs.TrustDir(at.top())
}

// trust is trustTop and the same for the home.
func (at place) trust() error {
	if err := at.trustTop(); err != nil {
		return err
	}
	return bpffs.TrustDir(string(at.home()))
}

// others are the homes of other namespaces.
func (at place) others() (homes []home) {
	if at.trustTop() != nil {
		return nil
	}
	entries, _ := bpffs.List(at.top())
	for _, e := range entries {
		if cookie, err := strconv.ParseUint(e.Name(), 10, 64); err == nil && cookie != at.cookie {
			homes = append(homes, home(filepath.Join(at.top(), e.Name())))
		}
	}
	return homes
}

// lockPin is a directory that commands lock before the home, so that those that read take turns with one that changes rules.
const lockPin = "lock"

// lock keeps a command that changes rules apart from all other commands, until the process ends.
func (dir home) lock(exclusive bool, patience time.Duration) (unlock func(), err error) {
	if exclusive {
		if err := bpffs.MakeDir(dir.pin(lockPin)); err != nil {
			return nil, err
		}
	}
	// A command that changes rules waits until those that read have ended. Others begin after it, or it might wait for good.
	turn, err := bpffs.Lock(dir.pin(lockPin), exclusive, patience)
	if err != nil && (exclusive || errors.Is(err, unix.EWOULDBLOCK)) {
		return nil, err
	}
	all, err := bpffs.Lock(string(dir), exclusive, patience)
	if err != nil || !exclusive {
		turn.Close()
	}
	if err != nil {
		return nil, err
	}
	return func() { all.Close(); turn.Close() }, nil
}
