package loader

import (
	"fmt"
	"io"
	"os/exec"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A process that goes on keeps its bpffs, also after the process has ended whose file system that is in.
func TestSettled(t *testing.T) {
	testenv.BPFFS(t) // the test may mount
	sh := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", "mount -t tmpfs tmpfs /sys/fs/bpf && mkdir /sys/fs/bpf/here && echo ready && read line")
	in, err := sh.StdinPipe()
	testenv.Must(t, err)
	out, err := sh.StdoutPipe()
	testenv.Must(t, err)
	testenv.Must(t, sh.Start())
	ready := make([]byte, len("ready\n"))
	_, err = io.ReadFull(out, ready)
	testenv.Must(t, err)

	defer func(was func() view) { lastingView = was }(lastingView)
	process := fmt.Sprintf("/proc/%d/", sh.Process.Pid)
	lastingView = func() view { return view{root: process + "root", mounts: process + "ns/mnt"} }
	o, err := Options{}.Settled()
	testenv.Must(t, err)
	testenv.Must(t, in.Close())
	sh.Wait() // read has failed
	lastingView = func() view { return view{} }
	at, err := locate(o)
	testenv.Must(t, err)
	if !exists(at.bpffs() + "/here") {
		t.Errorf("%s is another file system", at.bpffs())
	}
	mounted := ""
	testenv.Must(t, at.inMounts(func() error {
		mounted = fmt.Sprint(exists("/sys/fs/bpf/here"))
		return nil
	}))
	if mounted != "true" {
		t.Error("mounts would be made elsewhere")
	}
}
