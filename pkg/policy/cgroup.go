package policy

import (
	"fmt"
	"path"
	"strings"
)

// maxCgroup is the longest name of a cgroup in bytes: maps hold one more.
const maxCgroup = 111

// IsCgroup reports whether a device is a cgroup, by its name.
func IsCgroup(device string) bool {
	kind, _, _ := strings.Cut(device, ":")
	return kind != device && (kind == "unit" || kind == "container" || kind == "cgroup")
}

// CheckCgroup returns an error if the name of a cgroup is not valid.
func CheckCgroup(device string) error {
	kind, name, _ := strings.Cut(device, ":")
	switch {
	case len(device) > maxCgroup:
		return fmt.Errorf("%.32s… has %d bytes; the name of a cgroup has at most %d", device, len(device), maxCgroup)
	case kind == "cgroup" && (len(name) < 2 || path.Clean(name) != name || name[0] != '/'):
		return fmt.Errorf("%q: write the path of a cgroup below the root, such as cgroup:/system.slice", device)
	case kind == "unit" && (strings.Contains(name, "/") || path.Ext(name) == name || strings.HasSuffix(name, ".") || path.Ext(name) == ""):
		return fmt.Errorf("%q: write the whole name of a unit, such as unit:backup.service", device)
	case kind == "container" && (name == "" || name[0] == '-' || strings.ContainsAny(name, "/ ")):
		return fmt.Errorf("%q: write the name or ID of a container, such as container:web", device)
	}
	return nil
}
