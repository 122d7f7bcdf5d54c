package history

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A recording is a history under test, its clock and what it told the operator.
type recording struct {
	*History
	t       *testing.T
	path    string
	o       Options
	notices []string
	now     Reading
}

func record(t *testing.T, o Options) *recording {
	dir, err := os.MkdirTemp("/dev/shm", "history-test-*") // a disk would be slow
	testenv.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &recording{t: t, path: filepath.Join(dir, "history"), o: o}
	r.o.Boot = "boot-1"
	r.now = Reading{Time: noon, Mono: 1e12}
	r.open()
	t.Cleanup(func() { r.Close() })
	return r
}

func (r *recording) open() {
	r.t.Helper()
	h := Open(r.path, r.o, func(s string) { r.notices = append(r.notices, s) })
	r.History = h
}

// after reads the counters of these rules some time later.
func (r *recording) after(d time.Duration, samples ...Sample) {
	r.now.Time, r.now.Mono = r.now.Time.Add(d), r.now.Mono+uint64(d)
	r.now.Samples = samples
	r.Add(r.now)
}

// told checks the next notice.
func (r *recording) told(want string) {
	r.t.Helper()
	if len(r.notices) == 0 || !strings.Contains(r.notices[0], want) {
		r.t.Fatalf("the notices are %q; want %q", r.notices, want)
	}
	r.notices = r.notices[1:]
}

func rule(network string, passed, dropped uint64) Sample {
	return Sample{&Series{Key: Key{"eth0", "egress", network, ""}, Name: network, Rate: 8e6, Capacity: 300000}, Counters{Passed: passed, Dropped: dropped}}
}

// all is what is read, by a reader of another process.
func (r *recording) all() (all []*Reading) {
	r.t.Helper()
	reader, err := NewReader(r.path)
	testenv.Must(r.t, err)
	defer reader.Close()
	testenv.Must(r.t, reader.Query(time.Unix(0, 0), noon.AddDate(100, 0, 0), func(*Series) bool { return true }, func(r *Reading) { all = append(all, r) }))
	return all
}

// passed is what each reading has of a rule or pool; -1 where that is missing.
func (r *recording) passed(want ...int) {
	r.t.Helper()
	var got []int
	for _, reading := range r.all() {
		got = append(got, -1)
		for _, s := range reading.Samples {
			if s.Name == "a" {
				got[len(got)-1] = int(s.Passed)
			}
		}
	}
	if !slices.Equal(got, want) {
		r.t.Errorf("%d is there, want %d", got, want)
	}
}

const tick = Interval

// TestLossless sees that all comes back: counters, parameters and clocks, whatever becomes of rules and of the process.
func TestLossless(t *testing.T) {
	r := record(t, Options{})
	l := newLoad(100, 50)
	var want []Reading
	for i := range 500 {
		l.reading.Samples = slices.Clone(l.reading.Samples)
		switch {
		case i%7 == 0:
			l.churn(3)
		case i%11 == 0:
			own := *l.reading.Samples[5].Series
			own.Rate++
			l.reading.Samples[5].Series = &own
		case i == 200:
			l.reading.Samples[9].Counters = Counters{}
		case i == 300:
			r.Close()
			r.open()
		}
		want = append(want, l.next())
		r.Add(want[i])
	}
	got := r.all()
	if len(got) != len(want) {
		t.Fatalf("%d readings, want %d", len(got), len(want))
	}
	byKey := func(samples []Sample) map[Key]string {
		all := map[Key]string{}
		for _, s := range samples {
			all[s.Key] = fmt.Sprint(*s.Series, s.Counters)
		}
		return all
	}
	for i := range want {
		if g, w := fmt.Sprint(byKey(got[i].Samples)), fmt.Sprint(byKey(want[i].Samples)); g != w || !got[i].Time.Equal(want[i].Time) || got[i].Mono != want[i].Mono {
			t.Fatalf("reading %d is %.500s; want %.500s", i, g, w)
		}
	}
	if len(r.notices) > 0 {
		t.Errorf("notices %q", r.notices)
	}
}

// TestSizeOfHistory sees that a history keeps its size, and has old data with fewer readings.
func TestSizeOfHistory(t *testing.T) {
	r := record(t, Options{Bytes: 400_000})
	l := newLoad(50, 50)
	for range 30 * 360 {
		if l.random.IntN(6) == 0 {
			l.churn(1)
		}
		r.Add(l.next())
		if size := dirSize(t, r.path); size > r.o.Bytes {
			t.Fatalf("%d bytes", size)
		}
	}
	r.told("full with less than a day")
	all := r.all()
	seen, fine := all[len(all)-1].Time.Sub(all[0].Time), 0
	for i, a := range all[1:] {
		between := a.Time.Sub(all[i].Time)
		if between < 11*time.Second {
			fine++
		}
		if between > 311*time.Second {
			t.Errorf("%v without a reading", between)
		}
	}
	t.Logf("%v, with %d readings of %d each 10 s", seen, fine, len(all))
	if last := all[len(all)-1]; seen < 6*time.Hour || fine < 200 || len(last.Samples) != len(l.reading.Samples) {
		t.Errorf("%v are kept, %d readings", seen, fine)
	}
	before := all[0]
	for _, reading := range all[1:] { // what is left out of old data is no byte that was counted
		for _, s := range reading.Samples {
			if i := slices.IndexFunc(before.Samples, func(b Sample) bool { return b.Key == s.Key }); i >= 0 {
				if _, anew := s.since(before.Samples[i].Counters); anew {
					t.Fatalf("%v: a counter falls", reading.Time)
				}
			}
		}
		before = reading
	}
}

func dirSize(t testing.TB, path string) (size int64) {
	files, err := os.ReadDir(path)
	testenv.Must(t, err)
	for _, f := range files {
		info, err := f.Info()
		testenv.Must(t, err)
		size += info.Size()
	}
	return size
}

// TestDamage sees that damaged bytes are not read as something else, that what was written before them is read, and that
// recording goes on.
func TestDamage(t *testing.T) {
	r := record(t, Options{})
	for i := range 50 {
		r.after(tick, rule("a", uint64(i*i), 0), rule("b", uint64(i), uint64(i*i*i)))
	}
	r.Close()
	name := filepath.Join(r.path, r.segments[0].name)
	good, err := os.ReadFile(name)
	testenv.Must(t, err)
	random := rand.New(rand.NewPCG(5, 6))
	for i := range 300 {
		damaged, at := slices.Clone(good), random.IntN(len(good))
		if damaged[at] ^= byte(1 + random.IntN(255)); i%2 == 0 {
			damaged = damaged[:at]
		}
		testenv.Must(t, os.WriteFile(name, damaged, 0o600))
		all := r.all()
		for j, reading := range all {
			if reading.Samples[0].Passed != uint64(j*j) || reading.Samples[1].Dropped != uint64(j*j*j) {
				t.Fatalf("damage at %d: reading %d is %+v", at, j, reading.Samples)
			}
		}
		if len(all) < 50*(at-1000)/len(good) {
			t.Errorf("damage at %d of %d: only %d readings", at, len(good), len(all))
		}
	}
	// A report says which part is missing, and nothing of what a killed writer left.
	testenv.Must(t, os.WriteFile(name, good[:len(good)-1], 0o600))
	r.open()
	r.after(tick, rule("a", 7000, 0))
	gaps := func() []string {
		all, err := reader(t, r.History).Deliveries(Request{Since: noon, Until: r.now.Time, Name: "a"})
		testenv.Must(t, err)
		return gapsOf(all[0])
	}
	if got := gaps(); len(got) != 0 {
		t.Errorf("after a killed writer: %q", got)
	}
	middle := slices.Clone(good)
	middle[len(good)/2] ^= 1
	testenv.Must(t, os.WriteFile(name, middle, 0o600))
	if got := gaps(); len(got) != 1 || !regexp.MustCompile(`s damaged, \d{3,} bytes skipped \d+$`).MatchString(got[0]) {
		t.Errorf("after damage in the middle: %q", got)
	}
	testenv.Must(t, os.WriteFile(name, good[:len(good)-1], 0o600))
	if all := r.all(); len(all) != 50 || all[49].Samples[0].Passed != 7000 || len(r.notices) > 0 {
		t.Errorf("%d readings; notices %q", len(all), r.notices)
	}
}

// TestDamagedBeginning sees that a report says of a first file without readings that it is damaged.
func TestDamagedBeginning(t *testing.T) {
	r := record(t, Options{})
	for i := range 50 {
		r.after(tick, rule("a", uint64(i), 0))
	}
	r.Close()
	name := filepath.Join(r.path, r.segments[0].name)
	good, err := os.ReadFile(name)
	testenv.Must(t, err)
	r.open()
	for i := range 3 {
		r.after(tick, rule("a", uint64(50+i), 0))
	}
	for _, test := range []struct {
		left    []byte
		skipped int
	}{
		{nil, 0}, {good[:60], 60 - len(newHeader(noon, tick))}, {good[300:], len(good) - 300}, {bytes.Repeat([]byte("junk\n"), 100), 500}, {good, -1},
	} {
		testenv.Must(t, os.WriteFile(name, test.left, 0o600))
		all, err := reader(t, r.History).Deliveries(Request{Since: noon, Until: r.now.Time, Name: "a"})
		testenv.Must(t, err)
		want := fmt.Sprintf("[12:00:00+8m30s damaged, %d bytes skipped]", test.skipped)
		if test.skipped < 0 {
			want = "[]"
		}
		if got := fmt.Sprint(gapsOf(all[0])); got != want {
			t.Errorf("with %d bytes left, the gaps are %s, not %s", len(test.left), got, want)
		}
	}
}

// TestFiles sees that a second writer, other files, and those of another version are left alone.
func TestFiles(t *testing.T) {
	r := record(t, Options{})
	r.after(0, rule("a", 1, 0))
	refused := func(path string, want string) {
		t.Helper()
		said := ""
		if Open(path, r.o, func(s string) { said += s }).Close(); !strings.Contains(said, want+"; until that works there is a gap") {
			t.Errorf("%q, want %v", said, want)
		}
	}
	killed := r.History // which still has the lock
	r.open()
	r.told(ErrLocked.Error())
	r.after(tick, rule("a", 1, 0))
	killed.Close()
	r.after(tick, rule("a", 1, 0))
	r.told("is written again")
	r.passed(1, 1)
	r.Close()
	testenv.Must(t, os.WriteFile(filepath.Join(r.path, unfinished), nil, 0o600)) // a process was killed
	r.open()
	r.after(tick, rule("a", 2, 0))
	r.passed(1, 1, 2)
	r.Close()
	name := filepath.Join(r.path, r.segments[0].name)
	b, err := os.ReadFile(name)
	testenv.Must(t, err)
	testenv.Must(t, os.WriteFile(name, bytes.Replace(b, []byte("history 3"), []byte("history 4"), 1), 0o600))
	refused(r.path, ErrFormat.Error())
	reader, err := NewReader(r.path)
	testenv.Must(t, err)
	if err := reader.Query(noon, noon, nil, nil); !errors.Is(err, ErrFormat) {
		t.Error(err)
	}
	refused(t.TempDir()+"/..", ErrOther.Error())
	other := t.TempDir()
	testenv.Must(t, os.WriteFile(filepath.Join(other, "x"+segmentEnd), nil, 0o600))
	refused(other, ErrOther.Error())
	fifo := t.TempDir()
	testenv.Must(t, unix.Mkfifo(filepath.Join(fifo, fmt.Sprintf(segmentName, 2)), 0o600))
	refused(fifo, ErrOther.Error())
	blocked, err := NewReader(fifo)
	testenv.Must(t, err)
	defer blocked.Close()
	testenv.Must(t, os.Symlink("/dev/zero", filepath.Join(fifo, fmt.Sprintf(segmentName, 3)))) // it is left out, too
	testenv.Must(t, blocked.Query(noon, noon, nil, nil))
	refused(name, "name another one")
	testenv.Must(t, os.Symlink(r.path, r.path+"-link"))
	refused(r.path+"-link", "name another one")
}

// TestHistoryIsGone sees that recording goes on if the directory or a file in it is removed, and says so.
func TestHistoryIsGone(t *testing.T) {
	r := record(t, Options{})
	r.after(0, rule("a", 1, 0))
	testenv.Must(t, os.RemoveAll(r.path))
	r.after(tick, rule("a", 2, 0))
	r.told("removed or replaced")
	r.passed(2)
	testenv.Must(t, os.Remove(filepath.Join(r.path, r.segments[0].name)))
	r.after(tick, rule("a", 3, 0))
	r.told("removed or replaced")
	testenv.Must(t, os.Rename(r.path, r.path+"-kept"))
	testenv.Must(t, os.WriteFile(r.path, []byte("notes"), 0o600))
	r.after(tick, rule("a", 4, 0))
	r.told("removed or replaced")
	r.told("not a directory; move it away, or name another one; until that works there is a gap")
	r.after(tick, rule("a", 5, 0))
	if text, err := os.ReadFile(r.path); string(text) != "notes" || len(r.notices) > 0 {
		t.Errorf("%q, %v; notices %q", text, err, r.notices)
	}
	testenv.Must(t, os.Remove(r.path))
	testenv.Must(t, os.Rename(r.path+"-kept", r.path))
	r.after(tick, rule("a", 6, 0))
	r.told("is written again")
	r.passed(3, 6)
}

// TestFullDisk sees that a full disk is a gap, and nothing worse.
func TestFullDisk(t *testing.T) {
	r := record(t, Options{})
	r.Close()
	testenv.Must(t, unix.Mount("none", r.path, "tmpfs", 0, "size=600k"))
	defer unix.Unmount(r.path, unix.MNT_DETACH)
	r.open()
	r.after(tick, rule("a", 1, 0))
	full, err := os.Create(filepath.Join(r.path, "00000000.readings")) // of a name that recording knows
	testenv.Must(t, err)
	full.Write(make([]byte, 1<<20)) // as much as there is room
	many := func(passed uint64) (all []Sample) {
		all = []Sample{rule("a", passed, 0)}
		for i := range 500 {
			all = append(all, rule(fmt.Sprint(rand.Uint64(), i), rand.Uint64(), rand.Uint64()))
		}
		return all
	}
	r.after(tick, many(2)...)
	r.told("no space left on device; until that works there is a gap")
	r.after(tick, many(3)...)
	testenv.Must(t, full.Truncate(0))
	r.after(tick, many(4)...)
	r.told("is written again")
	r.passed(1, 4)
}

// TestMemory sees that a history in memory is as one in a directory.
func TestMemory(t *testing.T) {
	h := Open("", Options{Bytes: 1_000_000}, func(s string) { t.Error(s) })
	defer h.Close()
	at := time.Now()
	for i := range 200 {
		h.Add(Reading{Time: at.Add(time.Duration(i) * tick), Mono: uint64(time.Duration(i+1) * tick), Samples: []Sample{rule("a", uint64(i), 0)}})
	}
	n := 0
	testenv.Must(t, reader(t, h).Query(at, at.Add(time.Hour), func(*Series) bool { return true }, func(*Reading) { n++ }))
	if n != 200 {
		t.Errorf("%d readings", n)
	}
}

// TestQueryOfPart sees that a query has the time it is for, from the reading before that on, and only series that match.
func TestQueryOfPart(t *testing.T) {
	r := record(t, Options{})
	for i := range 1500 {
		r.after(tick, rule("b", 1, 1), rule("a", uint64(i), 0))
	}
	from, until := noon.Add(2*time.Hour), noon.Add(150*time.Minute)
	var first, last *Reading
	testenv.Must(t, reader(t, r.History).Query(from, until, func(s *Series) bool { return s.Network == "a" }, func(r *Reading) {
		if first == nil {
			first = r
		}
		last = r
		if i := int(r.Time.Sub(noon)/tick) - 1; len(r.Samples) != 1 || r.Samples[0].Passed != uint64(i) {
			t.Errorf("%v: %+v", r.Time, r.Samples)
		}
	}))
	if first.Time.After(from) || from.Sub(first.Time) > 2*segmentTime || !last.Time.Equal(until) {
		t.Errorf("from %v to %v", first.Time, last.Time)
	}
}

// TestMemoryOfUnit sees that who may mount nothing, as the unit of serve, has a history in memory too, of which nothing is left.
func TestMemoryOfUnit(t *testing.T) {
	const run = "/run/shapectl"
	runtime.LockOSThread() // which ends with the test
	testenv.Must(t, unix.Unshare(unix.CLONE_NEWNS|unix.CLONE_FS))
	testenv.Must(t, unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""))
	testenv.Must(t, unix.Mount("none", "/run", "tmpfs", 0, ""))
	testenv.Must(t, os.Mkdir(run, 0o755))
	header, data := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	testenv.Must(t, unix.Capget(&header, &data[0]))
	data[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	testenv.Must(t, unix.Capset(&header, &data[0]))
	h := Open("", Options{}, func(s string) { t.Error(s) })
	h.Add(Reading{Time: noon, Mono: 1, Samples: []Sample{rule("a", 1, 0)}})
	if files, err := os.ReadDir(run); err != nil || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
	testenv.Must(t, h.Close())
	if files, err := os.ReadDir(run); err != nil || len(files) != 0 {
		t.Errorf("%v, %v", files, err)
	}
}

// TestCopiedFile sees that readings never count twice.
func TestCopiedFile(t *testing.T) {
	r := record(t, Options{})
	r.after(tick, rule("a", 10, 0))
	text, err := os.ReadFile(filepath.Join(r.path, "00000001.readings"))
	testenv.Must(t, err)
	testenv.Must(t, os.WriteFile(filepath.Join(r.path, "00000007.readings"), text, 0o600))
	reader, err := NewReader(r.path)
	testenv.Must(t, err)
	defer reader.Close()
	err = reader.Query(noon, noon.AddDate(1, 0, 0), func(*Series) bool { return true }, func(*Reading) { t.Error("a reading") })
	if err == nil || !strings.Contains(err.Error(), "00000007.readings has the same readings as 00000001.readings; move one of them away") {
		t.Error(err)
	}
}
