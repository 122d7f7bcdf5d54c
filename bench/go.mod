module github.com/shapectl/shapectl/bench

go 1.26.0

replace github.com/shapectl/shapectl => ..

require (
	github.com/cilium/ebpf v0.22.0
	github.com/shapectl/shapectl v0.0.0-00010101000000-000000000000
	github.com/vishvananda/netlink v1.3.1
	github.com/vishvananda/netns v0.0.5
	golang.org/x/sys v0.49.0
)

require (
	github.com/safchain/ethtool v0.7.0 // indirect
	go.yaml.in/yaml/v4 v4.0.0 // indirect
)
