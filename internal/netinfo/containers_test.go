package netinfo

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A runtime that hangs delays no other cgroup, is asked seldom, and names its containers once it answers. Only root makes containers.
func TestContainers(t *testing.T) {
	testenv.Root(t)
	mount, err := cgroupMount()
	testenv.Must(t, err)
	top, err := os.MkdirTemp(mount, "shapectltest*.slice")
	testenv.Must(t, err)
	bin, id := t.TempDir(), fmt.Sprintf("%064x", os.Getpid())
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	docker := filepath.Join(bin, "docker")
	answer := func(text string) {
		testenv.Must(t, os.WriteFile(docker+".new", []byte("#!/bin/sh\necho >>"+docker+".count\n"+text+"\n"), 0o755))
		testenv.Must(t, os.Rename(docker+".new", docker))
	}
	answer("sleep 60 & sleep 60")
	names := []string{"cgroup:/" + filepath.Base(top) + "/b", "container:" + id[:12], "container:web"}
	for i := range 30 {
		names = append(names, fmt.Sprintf("container:x%02d", i))
	}
	var all CgroupArrivals
	defer all.Close()
	var have []string
	has := func(name string, within time.Duration) {
		t.Helper()
		for began := time.Now(); !strings.Contains(fmt.Sprint(have), name); {
			if time.Since(began) > within {
				t.Fatalf("no %s within %v, but %v", name, within, have)
			}
			select {
			case <-all.More():
			case <-time.After(10 * time.Millisecond):
			}
			fresh, _, err := all.Take(names)
			testenv.Must(t, err)
			for _, d := range fresh {
				have = append(have, d.Name)
			}
		}
	}
	mkdir := func(path string, uid int) {
		path = filepath.Join(top, path)
		testenv.Must(t, os.Mkdir(path, 0o755))
		testenv.Must(t, os.Chown(path, uid, uid))
		t.Cleanup(func() { os.Remove(path) })
	}
	t.Cleanup(func() { os.Remove(top) })
	mkdir("user", 65534)
	mkdir("user/"+id, 65534)
	if d, err := KnownDevice("container:" + id); err == nil {
		t.Errorf("a user has made %v", d)
	}
	_, _, err = all.Take(names)
	testenv.Must(t, err)
	mkdir("libpod-conmon-"+id+".scope", 0)
	mkdir("libpod-"+id+".scope", 0)
	has(names[1], 300*time.Millisecond)
	watched := 0
	_, err = find(names, func(dir string) {
		if watched++; strings.Contains(dir, "/user") {
			t.Errorf("a user may make this process work, in %s", dir)
		}
	})
	if testenv.Must(t, err); watched == 0 {
		t.Error("nothing is watched")
	}
	mkdir("_cpu.service", 0)
	if _, err := KnownDevice("unit:cpu.service"); err != nil {
		t.Errorf("a unit whose name systemd escapes: %v", err)
	}
	mkdir("b", 0)
	has(names[0], 300*time.Millisecond)
	answer("echo " + id + " alias,web")
	has("container:web", 5*time.Second)
	if runs, err := os.ReadFile(docker + ".count"); err != nil || len(runs) > 3 {
		t.Errorf("docker ran %d times, %v", len(runs), err)
	}
}

// Where the kernel allows no more watches, that is an error, and cgroups are found later.
func TestCgroupsUnwatched(t *testing.T) {
	testenv.Root(t)
	if os.Getenv("SHAPECTL_TEST_UNWATCHED") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestCgroupsUnwatched$")
		cmd.Env = append(os.Environ(), "SHAPECTL_TEST_UNWATCHED=1")
		root := []syscall.SysProcIDMap{{Size: 1}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: root, GidMappings: root}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	testenv.Must(t, os.WriteFile("/proc/sys/user/max_inotify_watches", []byte("0"), 0))
	mount, err := cgroupMount()
	testenv.Must(t, err)
	name := fmt.Sprintf("/shapectltest%d", os.Getpid())
	var all CgroupArrivals
	defer all.Close()
	if _, _, err := all.Take([]string{"cgroup:" + name}); err == nil || !strings.Contains(err.Error(), "fs.inotify.max_user_watches") {
		t.Errorf("without a watch: %v", err)
	}
	testenv.Must(t, os.Mkdir(mount+name, 0o755))
	defer os.Remove(mount + name)
	testenv.Eventually(t, "a cgroup that is not watched for", func() bool {
		fresh, _, _ := all.Take([]string{"cgroup:" + name})
		return len(fresh) == 1
	})
}
