module github.com/shapectl/shapectl

go 1.26.0

require github.com/cilium/ebpf v0.22.0

require golang.org/x/sys v0.49.0

tool github.com/cilium/ebpf/cmd/bpf2go
