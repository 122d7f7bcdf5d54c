package netinfo

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

var containerID = regexp.MustCompile(`[0-9a-f]{64}`)

// A runtime is a program that knows the names of containers.
type runtime struct {
	command string
	busy    sync.Mutex    // while it is asked
	after   time.Time     // when to ask again
	pause   time.Duration // after failures
}

var runtimes = []*runtime{{command: "podman"}, {command: "docker"}, {command: "nerdctl"}}

// known is what runtimes have said of containers, by ID. No other container gets the same ID.
var known = struct {
	sync.Mutex
	names map[string][]string
	by    map[string]map[*runtime]bool // who was asked since it appeared
}{names: map[string][]string{}, by: map[string]map[*runtime]bool{}}

// nameContainers adds the directories of containers with these names to dirs. containers has all directories by ID. It returns the IDs
// that may have names of those not found.
func nameContainers(names []string, containers, dirs map[string]string) (unknown []string) {
	known.Lock()
	defer known.Unlock()
	ids := slices.Sorted(maps.Keys(containers))
	unnamed := func(id string) bool { return known.names[id] == nil }
	if slices.ContainsFunc(ids, unnamed) {
		readPodman()
	}
	complete := true
	for _, device := range names {
		name := strings.TrimPrefix(device, "container:")
		for _, id := range ids {
			if slices.Contains(known.names[id], name) || dirs[device] == "" && len(name) >= 12 && strings.HasPrefix(id, name) {
				dirs[device] = containers[id]
			}
		}
		complete = complete && dirs[device] != ""
	}
	return slices.DeleteFunc(ids, func(id string) bool { return complete || !unnamed(id) || len(known.by[id]) == len(runtimes) })
}

// readPodman reads podman's own files, as podman does not run in the sandbox of the unit of 'serve'.
func readPodman() {
	files, _ := filepath.Glob("/var/lib/containers/storage/*-containers/containers.json")
	for _, file := range files {
		var all []struct {
			ID    string
			Names []string
		}
		text, _ := os.ReadFile(file)
		json.Unmarshal(text, &all)
		for _, c := range all {
			known.names[c.ID] = c.Names
		}
	}
}

// ask asks a runtime for the names of all containers, unless somebody is asking it. After a failure it waits, or does not ask. It
// reports whether there may be news.
func (r *runtime) ask(ids []string, wait bool) (news bool) {
	if !r.busy.TryLock() {
		return false
	}
	defer r.busy.Unlock()
	known.Lock()
	asked := !slices.ContainsFunc(ids, func(id string) bool { return !known.by[id][r] })
	known.Unlock()
	if asked || !wait && time.Now().Before(r.after) {
		return false
	}
	time.Sleep(time.Until(r.after))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, r.command, "ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Names}}")
	cmd.WaitDelay = 100 * time.Millisecond // a child may have its standard output
	out, err := cmd.Output()
	if err != nil && !errors.Is(err, exec.ErrNotFound) {
		r.pause = min(max(2*r.pause, time.Second), time.Minute)
		r.after = time.Now().Add(r.pause)
		return true
	}
	r.pause = 0
	known.Lock()
	defer known.Unlock()
	for line := range strings.Lines(string(out)) {
		if id, names, _ := strings.Cut(strings.TrimSpace(line), " "); containerID.MatchString(id) {
			known.names[id] = strings.Split(names, ",")
		}
	}
	for _, id := range ids {
		if known.by[id] == nil {
			known.by[id] = map[*runtime]bool{}
		}
		known.by[id][r] = true
	}
	return true
}
