package policyfile

import (
	"bytes"
	"testing"
)

// TestMerge merges the rules of one file into another.
func TestMerge(t *testing.T) {
	devices := []Device{{Name: "eth0", L2Bytes: 14}, {Name: "tap0", L2Bytes: 14}, {Name: "tap1", L2Bytes: 14}, {Name: "wg0", L2Bytes: 0}}
	for _, test := range []struct{ name, like, live, want string }{
		{"lines", `# Limits of the gateway; see the wiki.
defaults:
  each: host      # everybody for himself

plans:
  gold: {rate: 100mbit, capacity: 100ms}   # sold until 2024

devices:
  # the uplink
  eth0:
    egress:
      # customer Smith
      10.0.0.0/24: 10mbit  # paid

      # gold customers
      10.0.1.7: gold
      10.0.1.8: gold   # changes
      10.0.1.9: {plan: gold, each: all}  # holds

      # customer Jones, who goes
      10.0.2.0/24: 1mbit

      # customer Brown
      10.0.3.0/24:
        rate: 20mbit       # since May
        burst: 50ms        # short queue
        excess: ecn        # no more
      "10.0.4.0/24": {rate: unlimited}
      # nothing more

    ingress:
      0.0.0.0/0: {rate: 1gbit, shadow: {rate: 500mbit, capacity: 64kb}, overhead: ethernet}
  wg0:
    egress: {}  # none yet
`, `
plans: {gold: {rate: 100mbit, capacity: 100ms}}
devices:
  eth0:
    egress:
      10.0.0.0/24: {rate: 15mbit, each: host}
      10.0.1.8: {rate: 70mbit, each: host}
      10.0.1.9: gold
      10.0.3.0/24: {rate: 40mbit, capacity: 50ms, each: host, fail: closed}
      10.0.4.0/24: unlimited
      10.0.5.0/24: {rate: 1mbit, each: host}
      10.0.6.0/24: 1mbit
    ingress:
      match: dst
      0.0.0.0/0: {rate: 1gbit, each: host, shadow: {rate: 400mbit, capacity: 64kb}, overhead: ethernet}
  wg0:
    egress:
      ::/0: unlimited
`, `# Limits of the gateway; see the wiki.
defaults:
  each: host      # everybody for himself

plans:
  gold: {rate: 100mbit, capacity: 100ms}   # sold until 2024

devices:
  # the uplink
  eth0:
    egress:
      # customer Smith
      10.0.0.0/24: 15mbit  # paid

      # gold customers
      10.0.1.8: 70mbit   # changes
      10.0.1.9: {plan: gold, each: all}  # holds

      # customer Brown
      10.0.3.0/24:
        rate: 40mbit       # since May
        burst: 50ms        # short queue
        fail: closed
      "10.0.4.0/24": {rate: unlimited}
      10.0.5.0/24: 1mbit
      10.0.6.0/24: {rate: 1mbit, each: all}
      # nothing more

    ingress:
      match: dst
      0.0.0.0/0: {rate: 1gbit, shadow: {rate: 400mbit, capacity: 64kb}, overhead: ethernet}
  wg0:
    egress:  # none yet
      ::/0: unlimited
`},

		{"comments inside", `
devices:
  eth0:
    egress:
      10.0.0.0/24:
        # agreed
        rate: 1mbit
        shadow:
          # asked for
          cir: 500kbit  # by Smith
          each: host  # no more
        # below
      10.0.1.0/24: 1mbit  # stays
    # of something else
      10.0.2.0/24: 1mbit
      # of the first of two
      10.0.3.0/24: 1mbit
      10.0.4.0/24: 1mbit

      # of both
      10.0.5.0/24: 1mbit
      10.0.6.0/24: 1mbit

      # of the last
      10.0.7.0/24: 1mbit
`, `
devices:
  eth0:
    egress:
      10.0.0.0/24: {rate: 1mbit, shadow: {rate: 600kbit, capacity: 100ms}}
      10.0.1.0/24: 1mbit
      10.0.4.0/24: 1mbit
      10.0.7.0/24: 1mbit
`, `
devices:
  eth0:
    egress:
      10.0.0.0/24:
        # agreed
        rate: 1mbit
        shadow:
          # asked for
          cir: 600kbit  # by Smith
          capacity: 7500b
        # below
      10.0.1.0/24: 1mbit  # stays
    # of something else
      # of the first of two
      10.0.4.0/24: 1mbit

      # of the last
      10.0.7.0/24: 1mbit
`},

		{"braces", `{"devices": {"eth0": {"egress": {"10.0.0.0/24": "1mbit", "10.0.1.0/24": {"rate": "2mbit", "each": "host"},
    "10.0.2.0/24": "3mbit"}},
  "wg0": {"egress": {"10.0.0.0/24": "1mbit"}, "ingress": {"10.0.0.0/24": "1mbit"}}}}
`, `devices: {eth0: {egress: {10.0.1.0/24: {rate: 3mbit, each: host}, 10.0.2.0/24: 3mbit, 10.0.3.0/24: 1mbit}}, wg0: {egress: {10.0.0.0/24: 1mbit}}}
`, `{"devices": {"eth0": {"egress": {"10.0.1.0/24": {"rate": 3mbit, "each": "host"},
    "10.0.2.0/24": "3mbit",
    10.0.3.0/24: 1mbit}},
  "wg0": {"egress": {"10.0.0.0/24": "1mbit"}}}}
`},

		{"patterns", `
devices:
    tap*:
        egress: {0.0.0.0/0: 10mbit}
    # not there
    tap9: {egress: {0.0.0.0/0: 1mbit}}
    wg0: {egress: {0.0.0.0/0: 1mbit}}   # goes
    # not there, either
    eth7: {}
`, `
devices:
  tap0: {egress: {0.0.0.0/0: 10mbit}}
  tap1: {egress: {0.0.0.0/0: 20mbit}, ingress: {match: dst, 0.0.0.0/0: 5mbit}}
`, `
devices:
    tap*:
        egress: {0.0.0.0/0: 10mbit}
    # not there
    tap9: {egress: {0.0.0.0/0: 1mbit}}
    # not there, either
    eth7: {}
    tap1:
        egress:
            0.0.0.0/0: 20mbit
        ingress:
            match: dst
            0.0.0.0/0: 5mbit
`},

		{"a device without the rules of its pattern", `
devices:
  tap*: {egress: {0.0.0.0/0: 10mbit}}
  tap0:
    egress:
      # all
      0.0.0.0/0: 1mbit  # of it
`, `
devices: {}
`, `
devices:
  tap*: {egress: {0.0.0.0/0: 10mbit}}
  tap0: {}
  tap1: {}
`},

		{"all rules removed", `
devices:  # here
  eth0:
    egress:
      0.0.0.0/0: 1mbit
    # below
  wg0: {egress: {0.0.0.0/0: 1mbit}}
# end
`, "devices: {}", `
devices: {}  # here
# end
`},

		{"all rules new", "devices: {} # none", `
devices: {eth0: {ingress: {10.0.0.0/24: {rate: 1mbit, each: host, excess: ecn}}}}
`, `devices: # none
  eth0:
    ingress:
      10.0.0.0/24: {rate: 1mbit, each: host, excess: ecn}`},

		{"line endings", "\uFEFFdevices:\r\n  eth0:\r\n    egress:\r\n      10.0.0.0/24: 1mbit\r\n      10.0.1.0/24: 1mbit", `
devices: {eth0: {egress: {10.0.1.0/24: 1mbit, 10.0.2.0/24: 1mbit}}}
`, "\uFEFFdevices:\r\n  eth0:\r\n    egress:\r\n      10.0.1.0/24: 1mbit\r\n      10.0.2.0/24: 1mbit"},

		{"queues", `
defaults: {excess: delay, queue: 40ms}
plans: {p: {queue: 10ms}}
devices:
  eth0:
    egress:
      10.0.0.0/24: 10mbit                                  # is dropped now
      10.0.1.0/24: {rate: 10mbit, queue: 20ms, ecn-above: 1ms}   # is dropped now
      10.0.2.0/24: {rate: 10mbit, queue: 20ms, ecn-above: 1ms}   # is leaky now
      10.0.3.0/24: {rate: 10mbit, excess: drop}            # waits now
      10.0.4.0/24: {rate: 10mbit, algorithm: leaky, capacity: 30ms}
      10.0.5.0/24: {rate: 10mbit, algorithm: leaky, capacity: 30ms}   # may burst now
      10.0.6.0/24: {rate: 10mbit, plan: p}                 # waits longer now
      10.0.7.0/24: {rate: 10mbit, queue: 20ms}             # is not limited now
      10.0.8.0/24: {rate: 10mbit, order: sparse-first}     # is dropped now
      10.0.9.0/24: {rate: 10mbit, order: sparse-first}     # first come, first served now
`, `
devices:
  eth0:
    egress:
      10.0.0.0/24: 10mbit
      10.0.1.0/24: 10mbit
      10.0.2.0/24: {rate: 10mbit, algorithm: leaky, excess: delay, capacity: 50000, ecn-above: 1ms}
      10.0.3.0/24: {rate: 10mbit, excess: delay, queue: 40ms, ecn-above: never}
      10.0.4.0/24: {rate: 10mbit, algorithm: leaky, excess: delay, capacity: 30ms}
      10.0.5.0/24: {rate: 10mbit, excess: delay, queue: 40ms, capacity: 30ms}
      10.0.6.0/24: {rate: 10mbit, excess: delay, queue: 20ms}
      10.0.7.0/24: unlimited
      10.0.8.0/24: 10mbit
      10.0.9.0/24: {rate: 10mbit, excess: delay, queue: 40ms}
`, `
defaults: {excess: delay, queue: 40ms}
plans: {p: {queue: 10ms}}
devices:
  eth0:
    egress:
      10.0.0.0/24: {rate: 10mbit, excess: drop}                                  # is dropped now
      10.0.1.0/24: {rate: 10mbit, excess: drop}   # is dropped now
      10.0.2.0/24: {rate: 10mbit, ecn-above: 1ms, capacity: 50000b, algorithm: leaky}   # is leaky now
      10.0.3.0/24: {rate: 10mbit, ecn-above: never}            # waits now
      10.0.4.0/24: {rate: 10mbit, algorithm: leaky, capacity: 30ms}
      10.0.5.0/24: {rate: 10mbit, capacity: 30ms}   # may burst now
      10.0.6.0/24: {rate: 10mbit, queue: 25000b}                 # waits longer now
      10.0.7.0/24: {rate: unlimited}             # is not limited now
      10.0.8.0/24: {rate: 10mbit, excess: drop}     # is dropped now
      10.0.9.0/24: {rate: 10mbit}     # first come, first served now
`},

		{"order with each flow", `
defaults: {excess: delay, order: sparse-first}
devices:
  eth0:
    egress:
      10.0.0.0/24: 10mbit                              # each flow now
      10.0.1.0/24: {rate: 10mbit, order: sparse-first} # each flow now
      10.0.2.0/24: {rate: 10mbit, each: flow}          # each host now
      10.0.3.0/24: {rate: 10mbit, each: flow}          # faster now
`, `
devices:
  eth0:
    egress:
      10.0.0.0/24: {rate: 10mbit, each: flow, excess: delay}
      10.0.1.0/24: {rate: 10mbit, each: flow, excess: delay}
      10.0.2.0/24: {rate: 10mbit, each: host, excess: delay, order: sparse-first}
      10.0.3.0/24: {rate: 20mbit, each: flow, excess: delay}
`, `
defaults: {excess: delay, order: sparse-first}
devices:
  eth0:
    egress:
      10.0.0.0/24: {rate: 10mbit, each: flow}                              # each flow now
      10.0.1.0/24: {rate: 10mbit, each: flow} # each flow now
      10.0.2.0/24: {rate: 10mbit, each: host}          # each host now
      10.0.3.0/24: {rate: 20mbit, each: flow}          # faster now
`},

		{"other values than the defaults", `
defaults: {overhead: docsis, mpu: 80, algorithm: leaky, penalty: 10s, shadow: 1mbit}
devices: {eth0: {egress: {10.0.0.0/24: 2mbit, 10.0.1.0/24: {rate: 2mbit, shadow: 3mbit}}}}
`, `
devices: {eth0: {egress: {10.0.0.0/24: 2mbit, 10.0.1.0/24: {rate: 2mbit, shadow: {rate: 4mbit, penalty: fill}, algorithm: leaky, overhead: 4}}}}
`, `
defaults: {overhead: docsis, mpu: 80, algorithm: leaky, penalty: 10s, shadow: 1mbit}
devices: {eth0: {egress: {10.0.0.0/24: {rate: 2mbit, algorithm: gcra, penalty: none, overhead: 0, mpu: 0, shadow: none}, 10.0.1.0/24: {rate: 2mbit, shadow: {rate: 4mbit, penalty: fill}, penalty: none, overhead: 4, mpu: 0}}}}
`},
		{"any", `
devices:
  eth0:
    egress:
      any: {rate: 10mbit, each: host}  # changes
    ingress:
      any: 10mbit   # stays
      10.0.0.1: 1mbit
  tap0:
    egress:
      any: {rate: 10mbit, each: host}  # one family changes
  tap1:
    egress: {"any": 10mbit, 10.0.0.1: 1mbit}
    ingress:
      any: {rate: 10mbit, each: /32}  # each host in IPv4
`, `
devices:
  eth0:
    egress: {any: {rate: 20mbit, each: host}}
    ingress: {any: 10mbit}
  tap0:
    egress: {0.0.0.0/0: {rate: 10mbit, each: host}, ::/0: {rate: 20mbit, each: host}}
  tap1:
    egress: {::/0: 10mbit, 10.0.0.1: 1mbit}
    ingress: {any: {rate: 10mbit, each: host}}
`, `
devices:
  eth0:
    egress:
      any: {rate: 20mbit, each: host}  # changes
    ingress:
      any: 10mbit   # stays
  tap0:
    egress:
      0.0.0.0/0: {rate: 10mbit, each: host}
      ::/0: {rate: 20mbit, each: host}
  tap1:
    egress: {10.0.0.1: 1mbit, ::/0: 10mbit}
    ingress:
      0.0.0.0/0: {rate: 10mbit, each: host}
      ::/0: {rate: 10mbit, each: host}
`},

		{"names and plans", `
plans:
  gold-down: {rate: 100mbit, excess: ecn, name: Gold}
  gold-up: {rate: 50mbit, excess: ecn, name: Gold, note: sold until 2024}
  calls: {rate: 2mbit, queue: 10ms}
devices:
  eth0:
    egress:
      10.0.0.1: gold-down                             # gets a name
      10.0.0.2: {plan: gold-down, name: bob}          # is renamed
      10.0.0.3: {plan: gold-down, name: "carl",  note: x}   # loses both
      10.0.0.4: {plan: gold-down, name: dora}         # follows another plan
      10.0.0.5: {plan: gold-down, name: eve}          # follows none
      10.0.0.6: {rate: 1mbit, name: fred}             # follows one
      10.0.0.7: gold-up                               # has no note
      10.0.0.8: {plan: gold-down, capacity: 64kb}     # is exempt
      10.0.0.9: {plan: gold-down, rate: 300mbit}      # stays
    ingress:
      defaults: {excess: delay}
      10.0.0.1: calls
      10.0.0.2: {plan: calls, rate: 3mbit}            # drops now
      10.0.0.3: {plan: calls, name: x}                # gets another rate
`, `
plans:
  gold-down: {rate: 100mbit, excess: ecn, name: Gold}
  gold-up: {rate: 50mbit, excess: ecn, name: Gold, note: sold until 2024}
  calls: {rate: 2mbit, excess: delay, queue: 10ms}
  new: {rate: 7mbit, excess: ecn, name: "#1"}
devices:
  eth0:
    egress:
      10.0.0.1: {plan: gold-down, name: "al #1"}
      10.0.0.2: {plan: gold-down, name: bea}
      10.0.0.3: gold-down
      10.0.0.4: {plan: new, name: dora}
      10.0.0.5: {rate: 100mbit, excess: ecn, name: eve}
      10.0.0.6: {plan: new, name: fred}
      10.0.0.7: {plan: gold-up, note: ""}
      10.0.0.8: {plan: gold-down, rate: unlimited}
      10.0.0.9: {plan: gold-down, rate: 300mbit}
      10.0.0.10: {plan: gold-up, name: new}
    ingress:
      10.0.0.1: calls
      10.0.0.2: {plan: calls, rate: 3mbit, excess: drop}
      10.0.0.3: {plan: calls, rate: 4mbit, name: x}
`, `
plans:
  gold-down: {rate: 100mbit, excess: ecn, name: Gold}
  gold-up: {rate: 50mbit, excess: ecn, name: Gold, note: sold until 2024}
  calls: {rate: 2mbit, queue: 10ms}
  plan-1: {rate: 7mbit, excess: ecn, name: "#1"}
devices:
  eth0:
    egress:
      10.0.0.1: {plan: gold-down, name: "al #1"}                             # gets a name
      10.0.0.2: {plan: gold-down, name: bea}          # is renamed
      10.0.0.3: {plan: gold-down}   # loses both
      10.0.0.4: {plan: plan-1, name: dora}         # follows another plan
      10.0.0.5: {name: eve, rate: 100mbit, excess: ecn}          # follows none
      10.0.0.6: {name: fred, plan: plan-1}             # follows one
      10.0.0.7: {plan: gold-up, note: ""}                               # has no note
      10.0.0.8: {plan: gold-down, rate: unlimited}     # is exempt
      10.0.0.9: {plan: gold-down, rate: 300mbit}      # stays
      10.0.0.10: {plan: gold-up, name: new}
    ingress:
      defaults: {excess: delay}
      10.0.0.1: calls
      10.0.0.2: {plan: calls, rate: 3mbit, excess: drop}            # drops now
      10.0.0.3: {plan: calls, name: x, rate: 4mbit}                # gets another rate
`},

		{"names of devices", `
devices:
  eth0:
    name: alice        # who moved in
    egress:
      10.0.0.1: 1mbit  # stays
      10.0.0.2: 1mbit  # loses its name
      10.0.0.3: {rate: 1mbit, name: bob}  # gets the name
  tap0: {note: lent, egress: {any: 2mbit}}
`, `
devices:
  eth0:
    egress:
      10.0.0.1: {rate: 1mbit, name: alice}
      10.0.0.2: 1mbit
      10.0.0.3: {rate: 1mbit, name: alice}
      10.0.0.4: {rate: 1mbit, name: alice}
    ingress: {10.0.0.1: {rate: 3mbit, name: alice, note: new}}
  tap0: {egress: {any: {rate: 3mbit, note: lent}}, ingress: {any: 3mbit}}
`, `
devices:
  eth0:
    name: alice        # who moved in
    egress:
      10.0.0.1: 1mbit  # stays
      10.0.0.2: {rate: 1mbit, name: ""}  # loses its name
      10.0.0.3: {rate: 1mbit}  # gets the name
      10.0.0.4: 1mbit
    ingress:
      10.0.0.1: {rate: 3mbit, note: new}
  tap0: {note: lent, egress: {any: 3mbit}, ingress: {0.0.0.0/0: {rate: 3mbit, note: ""}, ::/0: {rate: 3mbit, note: ""}}}
`},

		{"pools", `
defaults: {within: all}
# Who shares what.
pools:
  all: 1gbit               # defaults name it
  # the tower
  ap-1: {rate: 100mbit, within: all}  # grows
  ap-2:
    rate: 100mbit          # stays
    share: member          # by hosts now
  "ap: 4": 10mbit          # a pattern names it

  # nobody has it
  ap-3: {rate: 100mbit, within: all}
plans:
  calls: {rate: 2mbit, guarantee: 1mbit}
devices:
  eth0:
    egress:
      10.0.0.1: {within: ap-1}        # moves
      10.0.0.2: {rate: 1mbit, within: ap-1, guarantee: 500kbit}  # has only its pool
      10.0.0.3: {plan: calls, each: all}                   # leaves its pool
      10.0.0.4: {rate: 1mbit, within: ap-3}
  lo*: {egress: {any: {within: "ap: 4"}}}
`, `
pools: {ap-1: {rate: 200mbit}, ap-2: {rate: 100mbit, share: host}, "a #": {rate: 1mbit, within: ap-1}}
plans: {calls: {rate: 2mbit}}
devices:
  eth0:
    egress:
      10.0.0.1: {within: ap-2}
      10.0.0.2: {within: ap-1, guarantee: 600kbit}
      10.0.0.3: calls
      10.0.0.4: 1mbit
      10.0.0.5: {within: "a #", name: new}
`, `
defaults: {within: all}
# Who shares what.
pools:
  all: 1gbit               # defaults name it
  # the tower
  ap-1: {rate: 200mbit}  # grows
  ap-2:
    rate: 100mbit          # stays
    share: host          # by hosts now
  "ap: 4": 10mbit          # a pattern names it
  "a #": {rate: 1mbit, within: ap-1}
plans:
  calls: {rate: 2mbit, guarantee: 1mbit}
devices:
  eth0:
    egress:
      10.0.0.1: {within: ap-2}        # moves
      10.0.0.2: {within: ap-1, guarantee: 600kbit}  # has only its pool
      10.0.0.3: {plan: calls, each: all, within: none}                   # leaves its pool
      10.0.0.4: {rate: 1mbit, within: none}
      10.0.0.5: {within: "a #", name: new}
  lo*: {egress: {any: {within: "ap: 4"}}}
`},

		{"colours", `
colours: # of the carrier
  AF12: yellow
  CS1: red # scavengers
devices:
  eth0:
    egress:
      10.0.0.1: {rate: 1mbit, algorithm: srtcm, colour-aware: true} # stays
      10.0.0.2: {rate: 1mbit, algorithm: srtcm, colour-aware: true}
      10.0.0.3: {rate: 1mbit, algorithm: srtcm, colour-aware: true, colours: {CS1: yellow}}
      10.0.0.4: {rate: 1mbit, algorithm: trtcm, pir: 2mbit, shadow: {rate: 1mbit, pir: 3mbit}} # shadow
      10.0.0.5: {rate: 1mbit, excess: ecn}
      10.0.0.6: {rate: 1mbit, algorithm: srtcm, ebs: 64kb, red: ecn}
`, `
devices:
  eth0:
    egress:
      10.0.0.1: {rate: 1mbit, algorithm: srtcm, colour-aware: true, colours: "CS1=red,AF12=yellow"}
      10.0.0.2: {rate: 1mbit, algorithm: srtcm, colour-aware: true}
      10.0.0.3: {rate: 1mbit, algorithm: srtcm, colour-aware: true, colours: {CS1: red, AF12: yellow}}
      10.0.0.4: {rate: 1mbit, algorithm: trtcm, pir: 2mbit, shadow: {rate: 1mbit, pir: 4mbit}}
      10.0.0.5: {rate: 1mbit, algorithm: srtcm, colour-aware: true, colours: {CS1: red, AF12: yellow}}
      10.0.0.6: 1mbit
`, `
colours: # of the carrier
  AF12: yellow
  CS1: red # scavengers
devices:
  eth0:
    egress:
      10.0.0.1: {rate: 1mbit, algorithm: srtcm, colour-aware: true} # stays
      10.0.0.2: {rate: 1mbit, algorithm: srtcm, colour-aware: true, colours: {AF12: yellow, AF13: red, AF22: yellow, AF23: red, AF32: yellow, AF33: red, AF42: yellow, AF43: red}}
      10.0.0.3: {rate: 1mbit, algorithm: srtcm, colour-aware: true}
      10.0.0.4: {rate: 1mbit, algorithm: trtcm, pir: 2mbit, shadow: {rate: 1mbit, pir: 4mbit}} # shadow
      10.0.0.5: {rate: 1mbit, algorithm: srtcm, colour-aware: true}
      10.0.0.6: {rate: 1mbit}
`},

		{"a host beside coloured defaults", `
defaults: {algorithm: trtcm, pir: 20mbit, excess: ecn}
devices:
  eth0:
    egress:
      10.0.0.1: 1mbit
      3c:22:fb:12:34:56: {rate: 5mbit, name: tablet}
      3c:22:fb:12:34:57: 6mbit
`, `
devices:
  eth0:
    egress:
      10.0.0.1: {rate: 2mbit, algorithm: trtcm, pir: 20mbit}
      3c:22:fb:12:34:56: {rate: 7mbit, excess: ecn, name: tablet}
      3c:22:fb:12:34:57: {rate: 6mbit, excess: ecn}
`, `
defaults: {algorithm: trtcm, pir: 20mbit, excess: ecn}
devices:
  eth0:
    egress:
      10.0.0.1: 2mbit
      3c:22:fb:12:34:56: {rate: 7mbit, name: tablet}
      3c:22:fb:12:34:57: 6mbit
`},

		{"new pools", "devices:\n  eth0: {}\n", "pools: {a: 1mbit, b: {rate: 1mbit, within: a}}\nplans: {gold: 2mbit}\ndevices: {eth0: {egress: {any: {within: b}, 10.0.0.1: gold}}}\n",
			"devices:\n  eth0:\n    egress:\n      0.0.0.0/0: {within: b}\n      10.0.0.1: gold\n      ::/0: {within: b}\nplans:\n  gold: 2mbit\npools:\n  a: 1mbit\n  b: {rate: 1mbit, within: a}\n"},

		{"new pools in braces", "{devices: {eth0: {}}}\n", "pools: {a: 1mbit}\ndevices: {eth0: {egress: {::/0: {within: a}}}}\n",
			"{devices: {eth0: {egress: {::/0: {within: a}}}}, pools: {a: 1mbit}}\n"},

		{"no pools", "pools: {a: 1mbit}\ndevices: {}\n", "devices: {}\n", "pools: {}\ndevices: {}\n"},

		{"new plan", "# Limits.\ndevices:\n  eth0:\n    egress:\n      10.0.0.1: 1mbit\n# end\n", `
plans: {gold: 1mbit}
devices:
  eth0: {egress: {10.0.0.1: gold, 10.0.0.2: {plan: gold, name: bob}}}
`, "# Limits.\ndevices:\n  eth0:\n    egress:\n      10.0.0.1: gold\n      10.0.0.2: {plan: gold, name: bob}\nplans:\n  gold: 1mbit\n# end\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			live := mustTables(t, mustParse(t, test.live), devices...)
			var out bytes.Buffer
			if err := Merge(&out, mustParse(t, test.like), devices, live); err != nil {
				t.Fatal(err)
			}
			if out.String() != test.want {
				t.Errorf("got\n%s\nwant\n%s", out.String(), test.want)
			}
			again, _, err := mustParse(t, out.String()).Tables(devices)
			live = withKept(mustParse(t, test.like), out.Bytes(), live)
			if err != nil || written(t, again) != written(t, live) {
				t.Errorf("%v; it says\n%s", err, written(t, again))
			}
		})
	}
}
