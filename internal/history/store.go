package history

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
)

// Errors of files.
var (
	ErrFormat = errors.New("another version of shapectl wrote it; move it away to begin a new one, and read it with that version")
	ErrOther  = errors.New("it is not a history of shapectl")
	ErrLocked = errors.New("another process writes it")
	ErrInUse  = errors.New("another process holds it")
)

// format is the number of the file format. A file of another one is left alone.
const format = 2

// Buckets of the database, and what their keys are.
var (
	metaBucket  = []byte("shapectl history") // "format"
	chunkBucket = []byte("chunks")           // number of the chunk: its header
	valueBucket = []byte("values")           // numbers of the chunk and the block, in pieces
	nameBucket  = []byte("names")            // hash of the value, in pieces
	useBucket   = []byte("uses")             // hash of names: in how many blocks they are used
	rowBucket   = []byte("rows")             // number of the reading in the chunk that is not full, in pieces
	formatKey   = []byte("format")
	dataBuckets = [][]byte{chunkBucket, valueBucket, nameBucket, useBucket, rowBucket}
	castagnoli  = crc32.MakeTable(crc32.Castagnoli)
	lockTimeout = 2 * time.Second // readers hold the lock for less
	readTimeout = 5 * time.Second // the writer holds it for less
	allocStep   = 256 << 10       // by which the file grows
)

// A store is a database file. It is open only while it is read or written, as an open one is locked.
type store struct {
	path     string
	memory   bool
	unsynced bool // do not wait for the disk
}

// with opens the database for f. Of a damaged one, the library panics, or touches pages that the file does not have.
func (s store) with(write bool, f func(*bolt.DB) error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	var file *os.File
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("%w: %v", errDamaged, cause)
			if file != nil {
				// Close of the database would wait for the transaction. Its mapping keeps the lock.
				unix.Flock(int(file.Fd()), unix.LOCK_UN)
				file.Close()
			}
		}
	}()
	o := &bolt.Options{Timeout: readTimeout, ReadOnly: !write, FreelistType: bolt.FreelistMapType, NoSync: s.memory || s.unsynced, NoStatistics: true}
	if write {
		o.Timeout = lockTimeout
	}
	o.OpenFile = func(path string, flags int, mode os.FileMode) (f *os.File, err error) {
		if write && !s.memory { // it is there, and it is no link: openFile saw to that
			flags = flags&^os.O_CREATE | unix.O_NOFOLLOW
		}
		file, err = os.OpenFile(path, flags, mode)
		return file, err
	}
	db, err := bolt.Open(s.path, 0o600, o)
	if errors.Is(err, bolterrors.ErrTimeout) {
		return ErrInUse
	}
	if err != nil && !errors.As(err, new(unix.Errno)) { // not the system refuses it, but the library
		return fmt.Errorf("%w: %w", errDamaged, err)
	}
	if err != nil {
		return err
	}
	db.AllocSize = allocStep
	err = errors.Join(f(db), db.Close())
	if errors.Is(err, unix.EFBIG) { // a free page is where no file has one
		err = fmt.Errorf("%w: %w", errDamaged, err)
	}
	return err
}

// lock keeps other writers away until the file is closed. Readers do not mind: they use another kind of lock.
func lock(f *os.File) error {
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return ErrLocked
	}
	return err
}

// identify reports whether a file can be a history: it is empty, or one of the database.
func identify(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return ErrOther
	}
	if info.Size() == 0 {
		return nil
	}
	for _, page := range []int64{0, int64(os.Getpagesize())} {
		var magic [4]byte
		const offset = 16 // behind the header of the page
		if _, err := f.ReadAt(magic[:], page+offset); err == nil && binary.NativeEndian.Uint32(magic[:]) == 0xED0CDAED {
			return nil
		}
	}
	return ErrOther
}

// checkFormat returns an error for a database of another program or another version. It may be empty.
func checkFormat(tx *bolt.Tx) (empty bool, err error) {
	meta := tx.Bucket(metaBucket)
	if meta == nil {
		if name, _ := tx.Cursor().First(); name != nil {
			return false, ErrOther
		}
		return true, nil
	}
	if !bytes.Equal(meta.Get(formatKey), []byte{format}) {
		return false, ErrFormat
	}
	for _, name := range dataBuckets {
		if tx.Bucket(name) == nil {
			return false, errDamaged
		}
	}
	return false, nil
}

// create makes the buckets.
func create(tx *bolt.Tx) error {
	for _, name := range dataBuckets {
		if _, err := tx.CreateBucketIfNotExists(name); err != nil {
			return err
		}
	}
	meta, err := tx.CreateBucketIfNotExists(metaBucket)
	if err != nil {
		return err
	}
	return meta.Put(formatKey, []byte{format})
}

// sealed adds a checksum, which unsealed checks.
func sealed(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func unsealed(b []byte) ([]byte, error) {
	n := len(b) - crc32.Size
	if n < 0 || crc32.Checksum(b[:n], castagnoli) != binary.LittleEndian.Uint32(b[n:]) {
		return nil, errDamaged
	}
	return b[:n:n], nil
}

func chunkKey(number uint64) []byte { return binary.BigEndian.AppendUint64(nil, number) }

func valueKey(number uint64, block int) []byte {
	return binary.BigEndian.AppendUint16(chunkKey(number), uint16(block))
}

// pieceBytes is the length of the pieces that a value is put as, so that two fill a page. A longer value shares its pages with
// its neighbour, and each is written again with the other; and it needs free pages side by side.
const pieceBytes = 2000

// longestKey is the length of the longest key of a value: a hash.
const longestKey = len(hash{})

func pieceKey(key []byte, piece int) []byte {
	return binary.BigEndian.AppendUint16(key[:len(key):len(key)], uint16(piece))
}

// put puts a value, with a checksum.
func put(b *bolt.Bucket, key, value []byte) error {
	b.FillPercent = 1 // nothing comes in between later
	piece := 0
	for part := range slices.Chunk(sealed(value), pieceBytes) {
		if err := b.Put(pieceKey(key, piece), part); err != nil {
			return err
		}
		piece++
	}
	return nil
}

// next is the value from where a cursor is, and its key; the key is nil at the end. The cursor is then at the next value.
func next(c *bolt.Cursor, k, v []byte) (key, value, nextKey, nextPart []byte, err error) {
	if k == nil {
		return nil, nil, nil, nil, nil
	}
	n := len(k) - len(pieceKey(nil, 0))
	if n < 0 || n > longestKey {
		return nil, nil, nil, nil, errDamaged
	}
	key = slices.Clone(k[:n])
	for ; len(k) > n && bytes.Equal(k[:n], key); k, v = c.Next() {
		if len(v) > pieceBytes { // it may be as long as all memory
			return nil, nil, nil, nil, errDamaged
		}
		value = append(value, v...)
	}
	value, err = unsealed(value)
	return key, value, k, v, err
}

// get is the value of a key.
func get(b *bolt.Bucket, key []byte) ([]byte, error) {
	c := b.Cursor()
	k, v := c.Seek(pieceKey(key, 0))
	found, value, _, _, err := next(c, k, v)
	if err == nil && !bytes.Equal(found, key) {
		err = errDamaged
	}
	return value, err
}

// each calls f for all values, until an error.
func each(b *bolt.Bucket, f func(key, value []byte) error) error {
	c := b.Cursor()
	k, v := c.First()
	for k != nil {
		var key, value []byte
		var err error
		if key, value, k, v, err = next(c, k, v); err == nil {
			err = f(key, value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// remove deletes all pieces whose keys begin with these bytes.
func remove(b *bolt.Bucket, prefix []byte) error {
	c := b.Cursor()
	for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, _ = c.Seek(prefix) {
		if err := c.Delete(); err != nil {
			return err
		}
	}
	return nil
}

// putChunk writes a chunk, and returns its number.
func putChunk(tx *bolt.Tx, e encoded) (uint64, error) {
	chunks, values, names, uses := tx.Bucket(chunkBucket), tx.Bucket(valueBucket), tx.Bucket(nameBucket), tx.Bucket(useBucket)
	number, err := chunks.NextSequence()
	if err != nil {
		return 0, err
	}
	err = chunks.Put(chunkKey(number), sealed(e.header))
	for i := range e.names {
		key := hashOf(e.names[i])
		n, _ := binary.Uvarint(uses.Get(key[:]))
		if n == 0 {
			err = errors.Join(err, put(names, key[:], e.names[i]))
		}
		err = errors.Join(err, uses.Put(key[:], binary.AppendUvarint(nil, n+1)), put(values, valueKey(number, i), e.values[i]))
	}
	return number, err
}

// deleteChunk deletes a chunk, and the names that no other one uses.
func deleteChunk(tx *bolt.Tx, number uint64) error {
	chunks, values, names, uses := tx.Bucket(chunkBucket), tx.Bucket(valueBucket), tx.Bucket(nameBucket), tx.Bucket(useBucket)
	var blocks []hash
	if b, err := unsealed(chunks.Get(chunkKey(number))); err == nil {
		if h, err := readHeader(b); err == nil {
			blocks = h.blocks
		}
	}
	err := chunks.Delete(chunkKey(number))
	for _, key := range blocks {
		if n, _ := binary.Uvarint(uses.Get(key[:])); n > 1 {
			err = errors.Join(err, uses.Put(key[:], binary.AppendUvarint(nil, n-1)))
		} else {
			err = errors.Join(err, uses.Delete(key[:]), remove(names, key[:]))
		}
	}
	return errors.Join(err, remove(values, chunkKey(number)))
}

// putRows writes rows from an index on. Those before stay, unless it is 0.
func putRows(tx *bolt.Tx, first int, rows [][]byte) error {
	if first == 0 {
		if err := tx.DeleteBucket(rowBucket); err != nil {
			return err
		}
		if _, err := tx.CreateBucket(rowBucket); err != nil {
			return err
		}
	}
	b := tx.Bucket(rowBucket)
	for i, row := range rows {
		if err := put(b, binary.BigEndian.AppendUint32(nil, uint32(first+i)), row); err != nil {
			return err
		}
	}
	return nil
}

// readRows is the chunk of the rows; nil if there are none. A damaged row ends it.
func readRows(tx *bolt.Tx) *chunk {
	var c *chunk
	var before *Reading
	each(tx.Bucket(rowBucket), func(_, b []byte) error {
		b, err := decompress(b)
		if err != nil {
			return err
		}
		if c == nil {
			c, err = readHead(b)
			return err
		}
		if before, err = readRow(b, before); err == nil {
			c.add(before)
		}
		return err
	}) // an error is damage, which ends it
	if c == nil || len(c.times) == 0 {
		return nil
	}
	c.bounded = true // what comes after it is not known
	return c
}

// openFile opens the file of a history for writing, and locks it.
func openFile(path string) (*os.File, error) {
	if err := os.Mkdir(filepath.Dir(path), 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("open %s: %w", path, errors.New("it is a symbolic link; name the file itself"))
	}
	if err != nil {
		return nil, err
	}
	if err = lock(f); err == nil {
		err = identify(f)
	}
	if err != nil {
		f.Close()
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return f, nil
}
