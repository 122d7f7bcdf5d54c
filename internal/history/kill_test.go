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

	"github.com/shapectl/shapectl/internal/testenv"
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
	h := Open(path, Options{Boot: boot}, func(s string) { panic(s) })
	l := newLoad(100, 50)
	l.reading.Time = l.reading.Time.Add(time.Duration(os.Getpid())) // no two segments begin at the same time
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
		testenv.Must(t, err)
		testenv.Must(t, c.Start())
		lines, written, kill := bufio.NewScanner(out), 0, 1+rand.IntN(150)
		for lines.Scan() {
			written, err = strconv.Atoi(strings.TrimSpace(lines.Text()))
			testenv.Must(t, err)
			if written == kill {
				testenv.Must(t, c.Process.Kill())
			}
		}
		c.Wait()
		all += written
		h := Open(path, Options{}, func(s string) { t.Error(s) })
		n := 0
		testenv.Must(t, reader(t, h).Query(noon, noon.AddDate(1, 0, 0), func(s *Series) bool { return s.Name == "home-7" }, func(r *Reading) { n += len(r.Samples) / 2 }))
		testenv.Must(t, h.Close())
		if n != all && n != all+1 {
			t.Fatalf("%d readings are there, of %d that were written", n, all)
		}
		all = n
	}
	t.Log(all, "readings after 12 kills")
}
