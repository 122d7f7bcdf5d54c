package policy

import (
	"strings"
	"testing"
)

func TestCgroupNames(t *testing.T) {
	for name, valid := range map[string]bool{
		"unit:backup.service": true, "unit:a@b\\x2d.service": true, "unit:backup": false, "unit:.service": false, "unit:a.": false,
		"unit:a/b.service": false, "container:web": true, "container:": false, "container:--all": false, "container:a/b": false,
		"cgroup:/a/b": true, "cgroup:a": false, "cgroup:/": false, "cgroup:/a/../b": false, "cgroup:/a/": false,
		"cgroup:/" + strings.Repeat("a", maxCgroup): false,
	} {
		if err := CheckCgroup(name); !IsCgroup(name) || (err == nil) != valid {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"eth0", "unit", "eth0:1", "units:a.service"} {
		if IsCgroup(name) {
			t.Errorf("%s is a cgroup", name)
		}
	}
}
