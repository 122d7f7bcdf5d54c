module github.com/shapectl/shapectl

go 1.26.0

require github.com/cilium/ebpf v0.22.0

require (
	github.com/gopacket/gopacket v1.7.7
	github.com/safchain/ethtool v0.7.0
	github.com/spf13/cobra v1.10.2
	github.com/spf13/pflag v1.0.10
	github.com/vishvananda/netlink v1.3.1
	github.com/vishvananda/netns v0.0.5
	go.yaml.in/yaml/v4 v4.0.0
	golang.org/x/image v0.47.0
	golang.org/x/sys v0.49.0
	golang.org/x/term v0.47.0
)

require (
	github.com/inconshreveable/mousetrap v1.1.0 // indirect
	github.com/klauspost/compress v1.20.3 // indirect
	go.etcd.io/bbolt v1.5.0 // indirect
	golang.org/x/net v0.55.0 // indirect
)

tool github.com/cilium/ebpf/cmd/bpf2go
