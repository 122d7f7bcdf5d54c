// Package cluster divides one rate among many hosts. Each host has an Agent, which asks the store for leases; the store
// decides over each request in one atomic step. The agent does no I/O and reads no clock, so that tests run it in virtual
// time. Redis is the store; store.lua is what it does with a request.
package cluster

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"time"
)

const (
	// Version is that of the records in the store which this build reads and writes.
	Version = 1
	// Length is how long a lease lasts from when it was asked for.
	Length = 2 * time.Second
	// Interval is how often a lease is renewed while nothing changes.
	Interval = time.Second
	// look is how often an agent looks at its pools: their demand may have changed.
	look = 200 * time.Millisecond
	// Timeout is how long an answer may take. A later one is of no use.
	Timeout = 400 * time.Millisecond
	// soon is when to ask again after there was no answer. After several it is longer, 2^maxFails times at most: a store that
	// has too much to do gets less.
	soon     = 200 * time.Millisecond
	maxFails = 2

	// drift is by how much monotonic clocks of two hosts may differ in speed, as 1/drift. Linux changes the speed of a
	// clock by at most 1/2000.
	drift = 100
	// Rise is how long after the last answer a host that has less than its safe share begins to use it. By then the store
	// counts on it, and the leases that others got before have ended.
	Rise = 3 * Length
	// silence is how old what a host counts on may be. With one lease length it is shorter than Rise. It must be longer than
	// two intervals, as an answer is acknowledged by the next request.
	silence = 3500 * time.Millisecond
	// early is by how much the others begin to make room before a member's lease has ended.
	early = Length / 4
)

// A Request is what a member tells the store, and asks for. Rates are in bits per second. All numbers are whole and at most
// 2^53, so they are exact as floating-point numbers, which are all that Lua has.
type Request struct {
	Speaks   float64 // the Version of the agent
	Turn     float64 // the number of this process, which the store gave it; 0 in the first request
	Seq      float64 // raised with each request of this process
	Epoch    float64 // of the store, as this process last knew it; 0 if it does not
	Answered float64 // the Seq of the last request that was answered; 0 if there was none
	Lapsed   float64 // see store.lua, as the next three
	Early    float64
	Silent   float64
	Horizon  float64
	Has      float64 // the rate in force
	Safe     float64 // the rate after the lease
	Granted  float64 // 1 if the store has granted that
	Known    float64 // the sum of the safe shares of all members when it was granted
	Rate     float64 // of the cluster, by the policy of this host; 0 if the member leaves
	Weight   float64
	Floor    float64 // 0 for the default
	Share    float64 // a fixed lease; 0 for one by demand
	Wants    float64 // the safe share that the policy asks for; 0 for an equal part
	Demand   float64
	Keeps    float64 // the least that TCP, which needs some round-trip times to follow, must be left now
	Use      float64
	New      float64 // a random number, for the Turn of a new process, and the Epoch of an empty store
	Quota    float64 // bytes; 0 for none
	Day      float64 // on which the period began by the clock of this host, in days since 1970
	Instance float64 // of the quota on this host: another one has lost what was used
	Used     float64 // bytes in this period, by this instance
	Limit    float64 // bytes up to which this host uses the quota; 0 before the first grant
	Spent    float64 // bytes that all hosts together may have used, as this process last knew it for the Day
}

// A Status says what became of a request.
type Status float64

const (
	OK       Status = iota
	Old             // a later request of the process came before this one
	Replaced        // another process acts for this member
	Newer           // records are of a version that this build does not know
	Quiet           // the store was emptied or may have lost writes: no leases until those from before have ended
	Broken          // the key of the cluster holds something else
	Live            // a member that is live cannot be forgotten
)

// An Answer is what the store says to a Request.
type Answer struct {
	Status  Status
	Turn    float64
	Epoch   float64
	Order   float64 // the number of the request
	Lease   float64 // bits per second from now on
	Safe    float64 // bits per second after the lease
	Again   float64 // us: when to ask again
	Known   float64 // the sum of all safe shares
	Members float64
	Rate    float64 // the smallest that a member's policy has
	Goal    float64 // the lease that the member will have when others have less
	Limit   float64 // as that of the Request, from now on
	Spent   float64 // bytes that all hosts together may use by their limits
	Day     float64 // of the period
}

// encode appends the numbers of a Request or Answer in their order.
func encode(v any) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, v)
	if err != nil {
		panic(err) // all fields are numbers
	}
	return b
}

// decode reads the numbers. Those that an older build did not write are 0.
func decode(b string, v any) error {
	if len(b)%8 != 0 || len(b) == 0 {
		return fmt.Errorf("a record of %d bytes, which are no numbers", len(b))
	}
	padded := make([]byte, max(len(b), binary.Size(v)))
	copy(padded, b)
	return binary.Read(bytes.NewReader(padded), binary.LittleEndian, v)
}

// memberSeparator cannot be in the name of a host or pool.
const memberSeparator = "\t"

// Member is the name of a host's pool in the store.
func Member(host, pool string) string { return host + memberSeparator + pool }

// splitMember is the inverse of Member.
func splitMember(member string) (host, pool string) {
	host, pool, _ = strings.Cut(member, memberSeparator)
	return host, pool
}
