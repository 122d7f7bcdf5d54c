package history

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

// A recording is a history under test, its clock and its rules.
type recording struct {
	*History
	t       *testing.T
	path    string
	limits  Limits
	notices []string
	now     Reading
}

func record(t *testing.T, limits Limits) *recording {
	r := &recording{t: t, path: filepath.Join(t.TempDir(), "history"), limits: limits}
	if r.limits.Boot == "" {
		r.limits.Boot = "boot-1"
	}
	r.now = Reading{Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), Mono: 1e12, Policy: "one"}
	r.open()
	t.Cleanup(func() { r.Close() })
	return r
}

func (r *recording) open() {
	r.t.Helper()
	h, err := Open(r.path, r.limits, func(s string) { r.notices = append(r.notices, s) })
	if err != nil {
		r.t.Fatal(err)
	}
	h.store.unsynced = true // no test loses power
	r.History = h
}

// kill ends the process as kill -9 does: only the locks go.
func (r *recording) kill() { r.file.Close() }

// after reads the counters of these rules some time later.
func (r *recording) after(d time.Duration, samples ...Sample) {
	r.now.Time, r.now.Mono = r.now.Time.Add(d), r.now.Mono+uint64(d)
	r.now.Samples = slices.Clone(samples)
	r.Add(r.now)
}

func rule(name string, passed, dropped uint64) Sample {
	return Sample{Series: Series{Key: Key{"eth0", "egress", name, ""}, Rate: 8e6, Capacity: 300000}, Counters: Counters{Passed: passed, Dropped: dropped}}
}

// text is all intervals, a line each.
func (r *recording) text() string {
	r.t.Helper()
	var b strings.Builder
	for _, it := range r.all() {
		fmt.Fprintf(&b, "%s %s %v %d/%d", it.Begin.UTC().Format(time.TimeOnly), it.Series.Network, it.Length, it.Passed, it.Dropped)
		if it.Gap != NoGap {
			fmt.Fprintf(&b, " %s", it.Gap)
		}
		if !it.Known {
			b.WriteString(" unknown")
		}
		if it.ClockStep != 0 {
			fmt.Fprintf(&b, " step %v", it.ClockStep)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func (r *recording) all() (all []Interval) {
	r.t.Helper()
	reader, err := NewReader(r.path)
	if err != nil {
		r.t.Fatal(err)
	}
	err = reader.Query(Query{time.Unix(0, 0), r.now.Time.Add(time.Hour), func(*Series) bool { return true }}, func(it Interval) { all = append(all, it) })
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

func (r *recording) want(text string) {
	r.t.Helper()
	if got := r.text(); got != text {
		r.t.Errorf("the history is\n%swant\n%s", got, text)
	}
}

const tick = 10 * time.Second

// What was read is there at once, also after a kill, and what was counted while nobody read is known.
func TestKill(t *testing.T) {
	r := record(t, Limits{})
	r.after(0, rule("a", 100, 0))
	r.after(tick, rule("a", 150, 7))
	r.after(time.Second, rule("a", 151, 7)) // too early
	r.after(9*time.Second, rule("a", 200, 7))
	want := "12:00:00 a 10s 50/7\n12:00:10 a 10s 50/0\n"
	r.want(want)
	r.kill()
	r.open()
	r.want(want)
	if last := r.Resumed(); len(last) != 1 || last[0] != rule("a", 200, 7) || r.Resumed() != nil {
		t.Errorf("the last reading is %+v", last)
	}
	r.after(time.Minute, rule("a", 900, 7))
	r.after(tick, rule("a", 901, 7))
	want += "12:00:20 a 1m0s 700/0 no readings\n12:01:20 a 10s 1/0\n"
	r.want(want)
	r.kill()
	r.limits.Boot = "boot-2" // the counters have nothing to do with the former ones
	r.open()
	if r.Resumed() != nil {
		t.Error("counters go on after a reboot")
	}
	r.now.Mono = 5e9
	r.after(time.Minute, rule("a", 1000, 7))
	r.want(want + "12:01:30 a 1m0s 0/0 counters restarted unknown\n")
	if len(r.notices) > 0 {
		t.Error(r.notices)
	}
}

// A rule that is set anew, one that goes and comes, one with other parameters, a stall, and a clock that is set.
func TestInterruptions(t *testing.T) {
	r := record(t, Limits{})
	r.after(0, rule("a", 100, 0), rule("b", 5, 5))
	r.after(tick, rule("a", 110, 0), rule("b", 6, 5))
	r.after(tick, rule("a", 20, 0)) // set anew; b is gone
	r.after(tick, rule("a", 21, 0), rule("b", 7, 5))
	faster := rule("a", 30, 0)
	faster.Rate *= 2
	r.after(tick, faster, rule("b", 7, 6))
	r.now.Time = r.now.Time.Add(-time.Hour)
	faster.Passed++
	r.after(tick, faster, rule("b", 7, 6))
	faster.Passed++
	r.after(30*time.Second, faster)
	got := strings.Split(strings.TrimSuffix(r.text(), "\n"), "\n")
	slices.Sort(got)
	want := []string{
		"11:00:50 a 30s 1/0 no readings",
		"12:00:00 a 10s 10/0", "12:00:00 b 10s 1/0", "12:00:10 a 10s 0/0 counters restarted unknown",
		"12:00:10 b 20s 0/0 no such rule unknown", "12:00:20 a 10s 1/0", "12:00:30 a 10s 9/0", "12:00:30 b 10s 0/1",
		"11:00:40 a 10s 1/0 step -1h0m0s", "11:00:40 b 10s 0/0 step -1h0m0s",
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the history is\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, it := range r.all() {
		if it.Series.Network == "a" && it.Begin.UTC().Format(time.TimeOnly) == "12:00:30" && it.Series.Rate != 16e6 {
			t.Errorf("the new rate is not that of the interval at whose end it was read: %d", it.Series.Rate)
		}
	}
}

// While the wall clock is wrong by years, readings are of another time: no rule was missing. An interval in which the clock
// is set is as long as it was, and ends at the new time.
func TestWrongClock(t *testing.T) {
	for _, years := range []int{50, -50} {
		r := record(t, Limits{})
		counted := uint64(0)
		readings := func(n int) {
			for range n {
				counted += 10
				r.after(tick, rule("a", counted, 0))
			}
		}
		from := r.now.Time
		readings(chunkReadings)
		r.now.Time = r.now.Time.AddDate(years, 0, 0)
		readings(4 * chunkReadings)
		r.now.Time = r.now.Time.AddDate(-years, 0, 0)
		readings(chunkReadings)
		reader, err := NewReader(r.path)
		must(t, err)
		n, steps := 0, 0
		must(t, reader.Query(Query{from, from.Add(2 * time.Hour), func(*Series) bool { return true }}, func(it Interval) {
			n++
			if it.ClockStep != 0 {
				steps++
			}
			if it.Gap != NoGap || it.End.Sub(it.Begin) != tick || it.Passed != 10 {
				t.Errorf("%d years: %v to %v: %q, %d passed", years, it.Begin, it.End, it.Gap, it.Passed)
			}
		}))
		if n != 2*chunkReadings-1 || steps != 1 {
			t.Errorf("%d years: %d intervals, %d with a step", years, n, steps)
		}
	}
}

// Values of a few bytes are no exception to the error of rounded ones.
func TestSpread(t *testing.T) {
	values := append(slices.Repeat([]uint64{34}, 57), 36) // each was 1 less
	off := spread(values, -58)
	sum := uint64(0)
	for _, v := range values {
		sum += v
		if v < 33 || v > 36 {
			t.Errorf("a value of 33 or 35 is %d", v)
		}
	}
	if sum != 57*33+35 || off > 0.03 {
		t.Errorf("the sum is %d, with an error of %g", sum, off)
	}
}

// Values are exact over many chunks and restarts, and sums of rounded ones are exact for whole chunks.
func TestSums(t *testing.T) {
	for _, bytes := range []int64{DefaultBytes, 3_000_000} {
		r := record(t, Limits{Bytes: bytes})
		l := newLoad(150, randomUse)
		l.reading.Samples[149].Series = Series{Key: Key{Pool: "<all> \x1b"}, Rate: 1e9}
		const n = 4*chunkReadings + 1
		first := Reading{}
		for i := range n {
			reading := l.next()
			if i == 0 {
				first = reading
			}
			r.now.Time = reading.Time
			r.Add(reading)
			if i == 100 {
				r.kill()
				r.open()
			}
		}
		sums, largest := map[Key]Counters{}, 0.0
		for _, it := range r.all() {
			c := sums[it.Series.Key]
			c.add(it.Counters)
			sums[it.Series.Key] = c
			largest = max(largest, it.PassedError)
		}
		if rounded := largest > 0; rounded != (bytes < DefaultBytes) || largest > 0.05 {
			t.Errorf("%d bytes: values have an error of %g", bytes, largest)
		}
		for i, s := range l.reading.Samples {
			want, _ := s.Counters.Since(first.Samples[i].Counters)
			if sums[s.Key] != want {
				t.Fatalf("%d bytes: %v has %v, want %v", bytes, s.Key, sums[s.Key], want)
			}
		}
		r.Close()
	}
}

// Rounded values are within their error.
func TestRounding(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for range 20000 {
		v, k := random.Uint64()>>random.IntN(64), 2+random.IntN(14)
		got := rounded(v, k)
		if d := decode(code(got, k), k); d != got {
			t.Fatalf("code of %d at %d is that of %d", got, k, d)
		}
		if diff := max(got, v) - min(got, v); float64(diff) > relativeError(k)*float64(v) && v < 1<<63 || (got == 0) != (v == 0) {
			t.Fatalf("%d is rounded to %d at %d", v, got, k)
		}
	}
}

// However many names come and go, the file stays within its limit, and the newest are there.
func TestChurn(t *testing.T) {
	r := record(t, Limits{Bytes: 2_000_000})
	churn := func(i int) {
		var samples []Sample
		for j := range 100 {
			samples = append(samples, rule(fmt.Sprintf("%x", sha256.Sum256([]byte{byte(i / 6), byte(i / 6 >> 8), byte(j)})), uint64(i), 0))
		}
		r.after(tick, samples...)
	}
	for i := range 40 * chunkReadings {
		churn(i)
		if info, err := os.Stat(r.path); err != nil || info.Size() > r.limits.Bytes {
			t.Fatalf("after %d readings: %v, %d bytes", i, err, info.Size())
		}
	}
	names := map[Key]bool{}
	for _, it := range r.all() {
		names[it.Series.Key] = true
	}
	t.Log(len(names), "names in", r.length(), r.notices)
	if len(r.notices) != 1 || !strings.Contains(r.notices[0], "the oldest goes first") || r.length() < time.Hour {
		t.Errorf("notices %q, %v kept", r.notices, r.length())
	}
	evicted := 0
	for i := range 40 { // what a killed process had begun may have no room
		for j := range 12 {
			churn(40*chunkReadings + 12*i + j)
		}
		r.kill()
		chunks := len(r.kept)
		r.open()
		if len(r.kept) <= chunks {
			evicted++
		}
	}
	if text := strings.Join(r.notices, "\n"); evicted == 0 || strings.Contains(text, "damaged") || r.length() < time.Hour {
		t.Errorf("%d of 40 times the oldest went; notices %q, %v kept", evicted, text, r.length())
	}
}

// What is older than wanted goes. Recorded time counts, whatever the clock of the wall says.
func TestKeep(t *testing.T) {
	r := record(t, Limits{Keep: 30 * time.Minute})
	for i := range 6*chunkReadings + 1 {
		r.after(tick, rule("a", uint64(i), 0))
		if i == 3*chunkReadings {
			r.now.Time = r.now.Time.AddDate(30, 0, 0)
		}
	}
	if r.length() != 30*time.Minute {
		t.Errorf("%v are kept", r.length())
	}
}

// A second writer, another format, other files and damage.
func TestFiles(t *testing.T) {
	r := record(t, Limits{})
	r.after(0, rule("a", 1, 0))
	r.after(tick, rule("a", 2, 0))
	failsWith := func(path string, want error) {
		t.Helper()
		if _, err := Open(path, r.limits, func(s string) { t.Error(s) }); !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
	failsWith(r.path, ErrLocked)
	r.kill()

	other := filepath.Join(t.TempDir(), "other")
	must(t, os.WriteFile(other, bytes.Repeat([]byte("important "), 10000), 0o600))
	failsWith(other, ErrOther)
	if b, err := os.ReadFile(other); err != nil || !bytes.HasPrefix(b, []byte("important")) {
		t.Error("another file was touched", err)
	}
	for name, change := range map[error]func(tx *bolt.Tx) error{
		ErrFormat: func(tx *bolt.Tx) error { return tx.Bucket(metaBucket).Put(formatKey, []byte{format + 1}) },
		ErrOther:  func(tx *bolt.Tx) error { return tx.DeleteBucket(metaBucket) },
	} {
		path := filepath.Join(t.TempDir(), "changed")
		b, err := os.ReadFile(r.path)
		must(t, err)
		must(t, os.WriteFile(path, b, 0o600))
		must(t, store{path: path}.with(true, func(db *bolt.DB) error { return db.Update(change) }))
		failsWith(path, name)
		reader, err := NewReader(path)
		must(t, err)
		if err := reader.Query(Query{}, nil); !errors.Is(err, name) {
			t.Errorf("%v, want %v", err, name)
		}
	}
	if err := os.Symlink(other, other+"-link"); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(other+"-link", r.limits, nil); err == nil {
		t.Error("a link was followed")
	}
}

// Whatever byte is wrong and wherever the file ends: it is not read as something else, and a new history begins.
func TestDamage(t *testing.T) {
	r := record(t, Limits{})
	for i := range 3 * chunkReadings {
		r.after(tick, rule("a", uint64(i*i), 0), rule("b", uint64(i), uint64(i*i*i)))
	}
	good := r.text()
	r.kill()
	file, err := os.ReadFile(r.path)
	must(t, err)
	random := rand.New(rand.NewPCG(5, 6))
	set, cut := 0, 0
	for i := range 200 {
		damaged := slices.Clone(file)
		if i%2 == 0 {
			damaged = damaged[:random.IntN(len(damaged))]
			cut++
		} else {
			for range 1 + random.IntN(64) {
				damaged[random.IntN(len(damaged))] ^= byte(1 + random.IntN(255))
			}
		}
		path := filepath.Join(t.TempDir(), "damaged")
		must(t, os.WriteFile(path, damaged, 0o600))
		reader, err := NewReader(path)
		if err == nil {
			var b strings.Builder
			err = reader.Query(Query{time.Unix(0, 0), r.now.Time, func(*Series) bool { return true }}, func(it Interval) {
				fmt.Fprintf(&b, "%s %s %v %d/%d\n", it.Begin.UTC().Format(time.TimeOnly), it.Series.Network, it.Length, it.Passed, it.Dropped)
			})
			if err == nil && !sameBeginning(b.String(), good) {
				t.Fatalf("damage %d was read as\n%s", i, b.String())
			}
		}
		h, err := Open(path, r.limits, func(string) { set++ })
		if err != nil && !errors.Is(err, ErrOther) && !errors.Is(err, ErrFormat) {
			t.Fatal(err)
		}
		if err == nil {
			h.Add(Reading{Time: r.now.Time, Mono: 1, Samples: []Sample{rule("a", 1, 1)}})
			h.Close()
		}
	}
	t.Log(set, "set aside of 200;", cut, "were cut")
	if set == 0 {
		t.Error("no file was set aside")
	}
}

// What no history has is damage, also if it looks sound: a damaged length may be that of all memory.
func TestLongValue(t *testing.T) {
	r := record(t, Limits{})
	r.after(0, rule("a", 1, 0))
	r.kill()
	must(t, store{path: r.path}.with(true, func(db *bolt.DB) error {
		return db.Update(func(tx *bolt.Tx) error {
			return tx.Bucket(valueBucket).Put(pieceKey(valueKey(1, 0), 0), sealed(make([]byte, 2*pieceBytes)))
		})
	}))
	r.open()
	if len(r.notices) != 1 || !strings.Contains(r.notices[0], "damaged") {
		t.Errorf("notices %q", r.notices)
	}
}

// A later version may keep more, in buckets of its own and at the end of a row, without another format.
func TestMoreLater(t *testing.T) {
	r := record(t, Limits{})
	r.after(0, rule("a", 1, 0))
	r.after(tick, rule("a", 2, 0))
	r.kill()
	must(t, store{path: r.path}.with(true, func(db *bolt.DB) error {
		return db.Update(func(tx *bolt.Tx) error {
			rows := tx.Bucket(rowBucket)
			key := binary.BigEndian.AppendUint32(nil, 2)
			row, err := get(rows, key)
			must(t, err)
			row, err = decompress(row)
			must(t, err)
			must(t, put(rows, key, compress(append(row, "more"...))))
			later, err := tx.CreateBucket([]byte("later"))
			must(t, err)
			return later.Put([]byte("key"), []byte("value"))
		})
	}))
	want := "12:00:00 a 10s 1/0\n"
	r.want(want)
	r.open()
	r.after(tick, rule("a", 5, 0))
	r.want(want + "12:00:10 a 10s 3/0\n")
	if len(r.notices) > 0 {
		t.Error(r.notices)
	}
}

// A file that is damaged while it is recorded is set aside, too.
func TestDamageWhileRecording(t *testing.T) {
	r := record(t, Limits{})
	for i := range 2*chunkReadings - 5 {
		r.after(tick, rule("a", uint64(i), 0))
	}
	f, err := os.OpenFile(r.path, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.Write(make([]byte, 64<<10))
	must(t, errors.Join(err, f.Close()))
	r.after(tick, rule("a", 500, 0))
	r.after(tick, rule("a", 600, 0))
	r.after(tick, rule("a", 700, 0))
	r.want("12:19:30 a 10s 100/0\n")
	if len(r.notices) != 1 || !strings.Contains(r.notices[0], "a new one begins") {
		t.Errorf("notices %q", r.notices)
	}
}

// A file that is removed while it is recorded is made again. One that is replaced is left alone, and so is what a link names.
func TestFileIsGone(t *testing.T) {
	r := record(t, Limits{})
	r.after(0, rule("a", 1, 0))
	must(t, os.Remove(r.path))
	r.after(tick, rule("a", 2, 0))
	r.after(tick, rule("a", 3, 0))
	r.want("12:00:10 a 10s 1/0\n")
	if len(r.notices) != 1 || !strings.Contains(r.notices[0], "was removed") {
		t.Errorf("notices %q", r.notices)
	}
	other, kept := filepath.Join(t.TempDir(), "other"), r.path+"-kept"
	must(t, os.WriteFile(other, nil, 0o600))
	must(t, os.Rename(r.path, kept))
	must(t, os.Symlink(other, r.path))
	r.after(tick, rule("a", 4, 0))
	if info, err := os.Stat(other); err != nil || info.Size() > 0 || len(r.notices) != 2 || !strings.Contains(r.notices[1], "symbolic link") {
		t.Errorf("notices %q; %v", r.notices, err)
	}
	must(t, os.Remove(r.path))
	must(t, os.WriteFile(r.path, []byte("important"), 0o600))
	r.after(tick, rule("a", 5, 0))
	if b, err := os.ReadFile(r.path); err != nil || string(b) != "important" {
		t.Errorf("%q, %v", b, err)
	}
	must(t, os.Rename(kept, r.path))
	r.after(tick, rule("a", 6, 0))
	r.want("12:00:10 a 10s 1/0\n12:00:20 a 10s 1/0\n12:00:30 a 10s 1/0\n12:00:40 a 10s 1/0\n")
	must(t, os.Truncate(r.path, 0))
	r.after(tick, rule("a", 7, 0))
	if last := r.notices[len(r.notices)-1]; !strings.Contains(last, "damaged; it is kept as") {
		t.Error(last)
	}
}

// sameBeginning reports whether all lines of a text are in another one: a damaged row ends the rows.
func sameBeginning(text, all string) bool {
	for line := range strings.Lines(text) {
		if !strings.Contains(all, line) {
			return false
		}
	}
	return true
}

// While the disk is full, readings wait in memory. Nothing is lost once there is room.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=600k", "none", dir).CombinedOutput(); err != nil {
		t.Skipf("needs a mount namespace and root: %s", out)
	}
	defer exec.Command("umount", "-l", dir).Run()
	r := &recording{t: t, path: filepath.Join(dir, "history"), limits: Limits{Boot: "b"}}
	r.now = Reading{Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), Mono: 1e12}
	r.open()
	r.after(0, rule("a", 0, 0))
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 600<<10), 0o600); err == nil {
		t.Fatal("the disk is not full")
	}
	random := rand.New(rand.NewPCG(1, 1))
	last := uint64(0)
	for range 90 {
		last += random.Uint64N(1e9)
		var samples []Sample
		for i := range 50 {
			samples = append(samples, rule(fmt.Sprint(i), last+random.Uint64N(1000), 0))
		}
		r.after(tick, append(samples, rule("a", last, 0))...)
	}
	must(t, os.Remove(filler))
	last++
	r.after(tick, rule("a", last, 0))
	sum := uint64(0)
	for _, it := range r.all() {
		if it.Series.Network == "a" {
			sum += it.Passed
		}
	}
	if sum != last {
		t.Errorf("%d bytes are there of %d", sum, last)
	}
	if len(r.notices) != 2 || !strings.Contains(r.notices[0], "no space left on device") || !strings.Contains(r.notices[1], "written again") {
		t.Errorf("notices %q", r.notices)
	}
	r.Close()
}

// In memory it is the same, and nothing is left.
func TestMemory(t *testing.T) {
	h, err := Open("", Limits{}, func(s string) { t.Error(s) })
	must(t, err)
	at := time.Now()
	for i := range 200 {
		h.Add(Reading{Time: at.Add(time.Duration(i) * tick), Mono: uint64(time.Duration(i+1) * tick), Samples: []Sample{rule("a", uint64(i), 0)}})
	}
	n := 0
	must(t, h.Query(Query{at, at.Add(time.Hour), func(*Series) bool { return true }}, func(Interval) { n++ }))
	if n != 199 {
		t.Errorf("%d intervals", n)
	}
	must(t, h.Close())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
