PREFIX ?= /usr/local
# A source tarball has no .git: the program then has the version in its code.
VERSION := $(if $(wildcard .git),$(shell git describe --tags --always --dirty 2>/dev/null))
# Kernel tests mostly wait, so more packages than CPUs run at a time. `make lint` vets.
TEST = -count=1 -vet=off -p 4 -timeout 90m
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOVULNCHECK = golang.org/x/vuln/cmd/govulncheck@v1.9.0
UNIT = ./internal/lastgood/... ./internal/model/... ./internal/netmsg/... ./internal/report/... ./internal/top/... ./internal/trace/... ./pkg/policy/...
CLANG = clang-14
CLANG_NEEDS = $(CLANG)=clang-14 llvm-strip-14=llvm-14 /usr/include/bpf/bpf_helpers.h=libbpf-dev /usr/include/linux/bpf.h=linux-libc-dev
STORE_NEEDS = redis-server=redis-server
DPDK_NEEDS = gcc=gcc /usr/include/stdlib.h=libc6-dev pkg-config=pkg-config /usr/include/dpdk/rte_meter.h=libdpdk-dev
TRAFFIC_NEEDS = iperf3=iperf3 ip=iproute2 ss=iproute2
FILTER_NEEDS = nft=nftables iptables-legacy=iptables
BROWSER_NEEDS = chromium=chromium nsenter=util-linux
BENCH_NEEDS = tc=iproute2 $(FILTER_NEEDS)
BENCH_OUT = docs
# For packages, BIN may be for another architecture; NATIVE writes its completions.
BIN = bin/shapectl
NATIVE = bin/shapectl
OUT = dist
UNIT_DIR = $(DESTDIR)$(PREFIX)/lib/systemd/system
UNITS = $(patsubst systemd/%,$(UNIT_DIR)/%,$(wildcard systemd/*.service))
CNI = $(DESTDIR)$(PREFIX)/libexec/cni/shapectl-cni
SHARE = $(DESTDIR)$(PREFIX)/share
MAN = $(wildcard docs/man/*.1)
BASH_COMPLETION = $(SHARE)/bash-completion/completions/shapectl
ZSH_COMPLETION = $(SHARE)/zsh/site-functions/_shapectl
FISH_COMPLETION = $(SHARE)/fish/vendor_completions.d/shapectl.fish
GENERATED = '*_bpfel*.go' '*_bpfel*.o'
SCRIPTS = scripts/*.sh .ci/run packaging/*.sh packaging/preinst packaging/postinst packaging/prerm packaging/postrm

# The same for all, so that each package is compiled once. Server and client speak HTTP/1 only; HTTP/2 is 0.5 MB of code.
TAGS = -tags=nethttpomithttp2
export CGO_ENABLED = 0
export GOFLAGS := -trimpath $(TAGS) $(filter-out -trimpath $(TAGS),$(GOFLAGS))

.PHONY: all demo test test-unit test-go test-bench test-kubernetes test-netns test-units race test-cni test-kernels test-packages generate verify-generated lint lint-fast vulnerabilities bench install uninstall packages release clean help

all: ## build bin/shapectl and bin/shapectl-cni (no clang needed: the compiled eBPF programs are committed)
	go build -buildvcs=false -ldflags "-s -w $(if $(VERSION),-X main.version=$(VERSION))" -o $(dir $(BIN)) ./cmd/...

demo: ## real TCP and UDP under a limit, as a picture (root)
	@scripts/need.sh 'make demo' $(TRAFFIC_NEEDS)
	@$(MAKE) -s all
	@scripts/demo.sh

test: ## everything: Go tests with those in the kernel, then real traffic (root)
	@[ "$$(id -u)" -eq 0 ] || { echo 'make test: the kernel tests need root: run  sudo env "PATH=$$PATH" make test  or, without them,  make test-unit' >&2; exit 1; }
	@scripts/need.sh 'make test' $(STORE_NEEDS) $(DPDK_NEEDS) $(TRAFFIC_NEEDS) $(FILTER_NEEDS) $(BROWSER_NEEDS) zsh=zsh fish=fish prometheus=prometheus promtool=prometheus systemd-analyze=systemd /lib/systemd/systemd=systemd unshare=util-linux
	@$(MAKE) --no-print-directory -j test-go test-bench test-netns test-units

# Parts of `make test`, which run side by side: each line of theirs says what it is about. Traffic that is measured gets the CPU first.
test-go: all
	go test $(TEST) ./cmd/shapectl ./pkg/loader ./...

test-bench: all
	go test -C bench $(TEST) ./...

test-kubernetes: ## shapectl-kubernetes: apart, as the libraries of Kubernetes take minutes to compile (root)
	go test -C kubernetes $(TEST) ./...

test-netns: all
	nice -n -10 scripts/netns-test.sh --brief

test-unit: ## the tests that need neither root nor a kernel
	go test $(UNIT)
	go test -C bench ./...

test-units: all ## the systemd units, under a systemd of their own in namespaces (root)
	@scripts/units-test.sh

test-kernels: all ## Linux 6.1, 6.12 and the newest in emulated machines, and that 5.10 is refused
	@scripts/kernels-test.sh

test-cni: all ## the integration tests of the reference CNI plugins, with shapectl-cni in place of bandwidth (root)
	@scripts/need.sh 'make test-cni' ip=iproute2
	@scripts/cni-suite.sh

test-packages: ## the packages: built twice, installed, upgraded under traffic, removed (root)
	@scripts/packages-test.sh

# The internal packages that start goroutines or lock; program and testenv only do something once. Loading programs takes
# long under the detector, so of pkg/loader and pkg/maps only what runs side by side is tested.
RACE = $(filter-out ./internal/program/ ./internal/testenv/%,$(addprefix ./,$(sort $(dir $(shell grep -rlE '^\s+go |go func|"sync"' --include=*.go --exclude=*_test.go internal)))))
RACE_KERNEL = 'InParts|Late|Netns|Stay|Writers|Several|ReadEndsHurry'
RACE_COMMANDS = 'Agent|Events|Loops|Metrics|Recorder|Replay|RTT|Scripts/(hosts|serve)|Serve|Talkers|Top|Watch'

race: ## the Go tests of all that runs side by side, with the race detector, those in the kernel too (root)
	@scripts/need.sh 'make race' $(STORE_NEEDS) $(FILTER_NEEDS) $(BROWSER_NEEDS) gcc=gcc /usr/include/stdlib.h=libc6-dev
	CGO_ENABLED=1 go test -race $(TEST) $(RACE)
	CGO_ENABLED=1 go test -race $(TEST) -run $(RACE_KERNEL) ./pkg/loader ./pkg/maps
	CGO_ENABLED=1 go test -race $(TEST) -run $(RACE_COMMANDS) ./cmd/shapectl
	CGO_ENABLED=1 go test -C bench -race $(TEST) ./...

generate: ## compile bpf/*.c and its Go bindings, and bench/reference.c
	@scripts/need.sh 'make generate' $(CLANG_NEEDS)
	go generate ./...
	go generate -C bench ./...

verify-generated: generate ## check that the committed generated files match their source
	git diff --exit-code --stat -- $(GENERATED)
	@new=$$(git ls-files --others --exclude-standard -- $(GENERATED)); [ -z "$$new" ] || { echo "not committed: $$new" >&2; exit 1; }

lint-fast: ## the linters that need no download: gofmt, vet and shellcheck
	@scripts/need.sh 'make lint-fast' shellcheck=shellcheck
	@bad=$$(gofmt -l .); [ -z "$$bad" ] || { echo "gofmt -w" $$bad >&2; exit 1; }
	go vet -tags guest ./...
	go vet -C bench ./...
	shellcheck -x $(SCRIPTS)

lint: lint-fast ## lint-fast, staticcheck and clang
	@scripts/need.sh 'make lint' $(CLANG_NEEDS)
	go run $(STATICCHECK) -tags guest ./...
	go run -C bench $(STATICCHECK) ./...
	go vet -C kubernetes ./...
	go run -C kubernetes $(STATICCHECK) ./...
	$(CLANG) -target bpf -mcpu=v3 -O2 -Wall -Wextra -Werror -fsyntax-only -idirafter /usr/include/$(shell uname -m)-linux-gnu bpf/abi.c bpf/observe.c bpf/shapectl.c bench/reference.c

vulnerabilities: ## known vulnerabilities in the Go release and the modules, as far as the program calls them
	go run $(GOVULNCHECK) ./...
	go run -C bench $(GOVULNCHECK) ./...
	go run -C kubernetes $(GOVULNCHECK) ./...

bench: ## what shapectl costs, beside other limiters: writes docs/benchmarks.md and docs/bench in 45 minutes (root)
	@scripts/need.sh 'make bench' $(BENCH_NEEDS)
	go build -C bench -buildvcs=false -o ../bin/bench .
	bin/bench $(BENCH_FLAGS) -o $(BENCH_OUT)

install: all ## the commands, units, completions, man pages and docs, to $(PREFIX)
	install -D -m 755 $(BIN) $(DESTDIR)$(PREFIX)/bin/shapectl
	install -D -m 755 $(BIN)-cni $(CNI)
	install -D -m 644 -t $(UNIT_DIR) systemd/*.service
	sed -i 's|/usr/local|$(PREFIX)|' $(UNITS)
	$(NATIVE) completion bash | install -D -m 644 /dev/stdin $(BASH_COMPLETION)
	$(NATIVE) completion zsh | install -D -m 644 /dev/stdin $(ZSH_COMPLETION)
	$(NATIVE) completion fish | install -D -m 644 /dev/stdin $(FISH_COMPLETION)
	$(if $(MAN),install -D -m 644 -t $(SHARE)/man/man1 $(MAN))
	packaging/docs.sh $(SHARE)/doc/shapectl

uninstall: ## remove what install made; limits in force stay
	rm -f $(DESTDIR)$(PREFIX)/bin/shapectl $(CNI) $(UNITS) $(BASH_COMPLETION) $(ZSH_COMPLETION) $(FISH_COMPLETION)
	rm -f $(patsubst docs/man/%,$(SHARE)/man/man1/%,$(MAN))
	rm -rf $(SHARE)/doc/shapectl

packages: all ## .deb, .rpm, .apk and a tarball, for amd64 and arm64, to $(OUT)
	packaging/build.sh '$(VERSION)' '$(OUT)'

release: all ## a release from the tag that is checked out, signed with the SSH key SIGN_KEY, to $(OUT)
	@scripts/need.sh 'make release' jq=jq ssh-keygen=openssh-client
	packaging/release.sh '$(OUT)'

clean: ## remove what was built
	rm -rf bin dist

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 18
