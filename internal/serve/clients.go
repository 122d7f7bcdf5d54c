package serve

import (
	"container/list"
	"sync"
)

// maxHeld is how much memory the bodies and answers of clients take, over TCP and over the socket each.
const maxHeld = 4 * MaxAnswer

// Clients are the connections of all clients. There is always room for another: where there are too many, the one goes
// that has been without an answer under way for longest. So clients that send or take bytes slowly, to keep others
// away, only keep themselves away.
type clients struct {
	mu    sync.Mutex
	idle  [2]*list.List // connections over TCP and over the socket that may go, the oldest first
	count [2]int        // also of those that may not
	held  [2]int        // bytes of bodies and answers
}

func newClients() *clients { return &clients{idle: [2]*list.List{list.New(), list.New()}} }

func (c *conn) kind() int {
	if c.unix {
		return 1
	}
	return 0
}

// add adds a connection, and closes the oldest idle one if there are too many.
func (c *clients) add(k *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count[k.kind()]++
	k.place = c.idle[k.kind()].PushBack(k)
	if c.count[k.kind()] > maxConnections {
		if oldest := c.idle[k.kind()].Front().Value.(*conn); oldest != k {
			c.drop(oldest)
		}
	}
}

// drop closes a connection without waiting.
func (c *clients) drop(k *conn) {
	c.forget(k)
	go k.Conn.Close()
}

// remove removes a connection that was closed.
func (c *clients) remove(k *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(k)
}

func (c *clients) forget(k *conn) {
	if k.gone {
		return
	}
	k.gone = true
	c.count[k.kind()]--
	c.held[k.kind()] -= k.held
	if k.place != nil {
		c.idle[k.kind()].Remove(k.place)
		k.place = nil
	}
}

// busy keeps a connection until the function that it returns is called: its request is under way.
func (c *clients) busy(k *conn) (over func()) {
	if k == nil {
		return func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if k.place != nil {
		c.idle[k.kind()].Remove(k.place)
		k.place = nil
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !k.gone {
			k.place = c.idle[k.kind()].PushBack(k)
		}
	}
}

// holds counts the bytes that a client sends or takes, until the function that it returns is called. If that is too much
// for all, the clients go that have been at it for longest.
func (c *clients) holds(k *conn, bytes int) (over func()) {
	if k == nil || bytes == 0 {
		return func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if k.gone {
		return func() {}
	}
	idle, held := c.idle[k.kind()], &c.held[k.kind()]
	k.held += bytes
	*held += bytes
	if k.place != nil {
		idle.MoveToBack(k.place)
	}
	for e := idle.Front(); e != nil && *held > maxHeld; {
		other := e.Value.(*conn)
		e = e.Next()
		if other != k && other.held > 0 {
			c.drop(other)
		}
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !k.gone {
			k.held -= bytes
			*held -= bytes
		}
	}
}
