package history

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// killedEnv makes the test binary record into this file until it is killed.
const killedEnv = "SHAPECTL_TEST_HISTORY"

func TestMain(m *testing.M) {
	if path := os.Getenv(killedEnv); path != "" {
		recordForEver(path)
	}
	os.Exit(m.Run())
}

// recordForEver adds readings, ten seconds of their own time apart, and says how many are in the file.
func recordForEver(path string) {
	boot := time.Now().String() // the clock of the readings begins anew
	h, err := Open(path, Limits{Boot: boot, Bytes: 4_000_000}, func(s string) { panic(s) })
	if err != nil {
		panic(err)
	}
	l := newLoad(200, mixedUse)
	for i := 1; ; i++ {
		h.Add(l.next())
		fmt.Println(i)
	}
}

// A process that is killed at any time loses at most the reading that it was adding. The next one goes on.
func TestKill9(t *testing.T) {
	path, all := filepath.Join(t.TempDir(), "history"), 0
	for range 12 {
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), killedEnv+"="+path)
		c.Stderr = os.Stderr
		out, err := c.StdoutPipe()
		must(t, err)
		must(t, c.Start())
		lines, written, kill := bufio.NewScanner(out), 0, 1+rand.IntN(150)
		for lines.Scan() {
			written, err = strconv.Atoi(strings.TrimSpace(lines.Text()))
			must(t, err)
			if written == kill {
				must(t, c.Process.Kill())
			}
		}
		c.Wait()
		all += written - 1 // intervals
		h, err := Open(path, Limits{}, func(s string) { t.Error(s) })
		must(t, err)
		n := 0
		must(t, h.Query(Query{time.Unix(0, 0), time.Now().AddDate(10, 0, 0), func(s *Series) bool { return s.Name == "home-7" && s.Direction == "egress" }}, func(it Interval) {
			if it.Gap == NoGap {
				n++
			}
		}))
		must(t, h.Close())
		if n != all && n != all+1 {
			t.Fatalf("%d intervals are there, of %d that were written", n, all)
		}
		all = n
	}
	t.Log(all, "intervals after 12 kills")
}
