package line

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Host is a host of the line with limits of its own, whatever addresses it has.
type Host struct {
	Name     string
	MAC      policy.MAC
	Device   string // the inside device
	Down, Up policy.Rate
}

// ParseHost parses NAME=MAC,RATE or NAME=MAC,DOWN,UP. One rate is that of both directions.
func ParseHost(s string) (h Host, err error) {
	const example = "write it like tablet=3c:22:fb:12:34:56,5mbit"
	name, rest, found := strings.Cut(s, "=")
	if !found || name == "" {
		return h, fmt.Errorf("host %.64q has no name and address; %s", s, example)
	}
	if err := policy.FindOption("name").Value(new(policy.Limit)).Set(name); err != nil {
		return h, err
	}
	h.Name = name
	mac, rates, _ := strings.Cut(rest, ",")
	if h.MAC, err = policy.ParseMAC(mac); err != nil {
		return h, fmt.Errorf("host %.64q: %w", name, err)
	}
	down, up, both := strings.Cut(rates, ",")
	if h.Down, err = hostRate(down); err != nil {
		return h, fmt.Errorf("host %.64q: %w; %s", name, err, example)
	}
	h.Up = h.Down
	if both {
		if h.Up, err = hostRate(up); err != nil {
			return h, fmt.Errorf("host %.64q: %w", name, err)
		}
	}
	return h, nil
}

// CheckName reports a name that is too long for the pool of a host on its device.
func (h Host) CheckName() error {
	pool := policy.Owner{Device: h.Device, Direction: policy.Ingress, Host: h.Name}.String()
	if long := len(pool) - policy.MaxName; long > 0 {
		return fmt.Errorf("host %s: the name is too long for a pool on %s by %d bytes; shorten it", plain.Line(h.Name), plain.Line(h.Device), long)
	}
	return nil
}

func hostRate(s string) (policy.Rate, error) {
	if s == "" {
		return 0, errors.New("the rate is missing")
	}
	r, err := policy.ParseRate(s)
	if err == nil && r == policy.Unlimited {
		err = errors.New("rate unlimited would limit nothing")
	}
	return r, err
}

// hosts writes the limits of hosts, which are on inside devices.
func (l Line) hosts(w *writer) error {
	for i, h := range l.Hosts {
		same := func(o Host) bool { return o.Device == h.Device }
		if slices.ContainsFunc(l.Hosts[:i], same) {
			continue
		}
		device, err := policyfile.DeviceKey(h.Device)
		if err != nil {
			return err
		}
		if i == 0 {
			w.line(1, "# Hosts with limits of their own, by their hardware addresses.")
		}
		w.line(1, "%s:", device)
		w.line(2, "egress:     # to the hosts")
		for _, h := range l.Hosts[i:] {
			if same(h) {
				l.host(w, h, h.Down)
			}
		}
		w.line(2, "ingress:    # from the hosts")
		for _, h := range l.Hosts[i:] {
			if same(h) {
				l.host(w, h, h.Up)
			}
		}
	}
	return nil
}

func (l Line) host(w *writer, h Host, rate policy.Rate) {
	w.line(3, "%q: {rate: %v, name: %q, line: %q}", h.MAC.String(), rate, h.Name, l.Device)
}
