package events

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"strings"

	"github.com/shapectl/shapectl/internal/report"
)

// JournalSocket is where journald takes entries in its own protocol (https://systemd.io/JOURNAL_NATIVE_PROTOCOL).
const JournalSocket = "/run/systemd/journal/socket"

// A Journal is a connection to journald.
type Journal struct {
	path string
	conn *net.UnixConn
}

// OpenJournal connects to the socket of journald.
func OpenJournal(path string) (*Journal, error) {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("open the journal: %w", err)
	}
	return &Journal{path, conn}, nil
}

// Close closes the connection.
func (j *Journal) Close() error { return j.conn.Close() }

// Write writes an event as an entry.
func (j *Journal) Write(e report.Event) error {
	entry := journalField(nil, "MESSAGE", e.Sentence)
	entry = journalField(entry, "PRIORITY", priority(e.Kind))
	entry = journalField(entry, "SYSLOG_IDENTIFIER", "shapectl")
	for _, f := range fields(e) {
		entry = journalField(entry, f.name, f.value)
	}
	_, err := j.conn.Write(entry)
	if err == nil {
		return nil
	}
	again, failed := OpenJournal(j.path) // journald may have been restarted
	if failed != nil {
		return failed
	}
	j.conn.Close()
	*j = *again
	if _, err = j.conn.Write(entry); err != nil {
		return fmt.Errorf("write to the journal: %w", err)
	}
	return nil
}

// priority is that of syslog: 4 is a warning, 5 a notice.
func priority(kind string) string {
	switch kind {
	case report.ChangeBegun, report.ChangeConfirmed, report.DeviceAppeared, report.DeviceGone, report.RulesChanged, report.RulesRestored, report.LeaseBegun:
		return "5"
	}
	return "4"
}

func journalField(entry []byte, name, value string) []byte {
	entry = append(entry, name...)
	if !strings.Contains(value, "\n") {
		entry = append(append(entry, '='), value...)
		return append(entry, '\n')
	}
	entry = append(entry, '\n')
	entry = binary.LittleEndian.AppendUint64(entry, uint64(len(value)))
	return append(append(entry, value...), '\n')
}

// A field is one key of an event, as a variable of the environment and a field of the journal.
type field struct{ name, value string }

// fields are the keys of an event that have a value, with the prefix SHAPECTL_.
func fields(e report.Event) (all []field) {
	var text bytes.Buffer
	if err := e.JSONLine(&text); err != nil {
		return nil
	}
	return fieldsOf(text.Bytes())
}
