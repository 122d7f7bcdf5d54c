PREFIX ?= /usr/local
# A tarball has no .git: the program then names no version but the one in its code.
VERSION := $(if $(wildcard .git),$(shell git describe --tags --always --dirty 2>/dev/null))
# Tests in the kernel wait for it more than they work, so more packages than CPUs run at a time; that which takes
# longest is named first.
TEST = -count=1 -p 4
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
UNIT = ./internal/lastgood/... ./internal/model/... ./internal/netmsg/... ./internal/report/... ./internal/trace/... ./pkg/policy/...
CLANG = clang-14
CLANG_NEEDS = $(CLANG)=clang-14 llvm-strip-14=llvm-14 /usr/include/bpf/bpf_helpers.h=libbpf-dev /usr/include/linux/bpf.h=linux-libc-dev
BENCH_NEEDS = tc=iproute2 nft=nftables iptables-legacy=iptables
BENCH_OUT = docs
UNIT_DIR = $(DESTDIR)$(PREFIX)/lib/systemd/system
UNITS = $(patsubst systemd/%,$(UNIT_DIR)/%,$(wildcard systemd/*.service))
DOC_DIR = $(DESTDIR)$(PREFIX)/share/doc/shapectl
GENERATED = '*_bpfel*.go' '*_bpfel*.o'

export CGO_ENABLED = 0

.PHONY: all demo test test-unit race test-units test-kernels generate verify-generated lint bench install uninstall clean help

all: ## build bin/shapectl (no clang needed: what it compiles is committed)
	go build -buildvcs=false -trimpath -ldflags "-s -w $(if $(VERSION),-X main.version=$(VERSION))" -o bin/shapectl ./cmd/shapectl

demo: all ## real TCP and UDP held to a rate, as a picture (root)
	@scripts/demo.sh

test: all ## everything: Go tests with those in the kernel, then real traffic (root)
	@[ "$$(id -u)" -eq 0 ] || { echo 'make test: the kernel tests need root: run  sudo env "PATH=$$PATH" make test  or, without them,  make test-unit' >&2; exit 1; }
	go test $(TEST) ./pkg/loader ./...
	go test -C bench $(TEST) ./...
	scripts/netns-test.sh --quick
	scripts/units-test.sh

test-unit: ## the tests that need neither root nor a kernel
	go test $(UNIT)
	go test -C bench ./...

test-units: all ## the systemd units, under a systemd of their own in namespaces (root)
	@scripts/units-test.sh

test-kernels: all ## Linux 6.1, 6.12 and the newest in emulated machines, and that 5.10 is refused
	@scripts/kernels-test.sh

race: ## the Go tests with the race detector, those in the kernel too (root)
	@scripts/need.sh 'make race' gcc=gcc /usr/include/stdlib.h=libc6-dev
	CGO_ENABLED=1 go test -race -short $(TEST) ./pkg/loader ./...
	CGO_ENABLED=1 go test -C bench -race -short $(TEST) ./...

generate: ## compile bpf/*.c and make its Go bindings
	@scripts/need.sh 'make generate' $(CLANG_NEEDS)
	go generate ./...

verify-generated: generate ## is what is committed what the source gives?
	git diff --exit-code --stat -- $(GENERATED)
	@new=$$(git ls-files --others --exclude-standard -- $(GENERATED)); [ -z "$$new" ] || { echo "not committed: $$new" >&2; exit 1; }

lint: ## gofmt, vet, staticcheck, clang and shellcheck
	@scripts/need.sh 'make lint' shellcheck=shellcheck $(CLANG_NEEDS)
	@bad=$$(gofmt -l .); [ -z "$$bad" ] || { echo "gofmt -w" $$bad >&2; exit 1; }
	go vet -tags guest ./...
	go vet -C bench ./...
	go run $(STATICCHECK) -tags guest ./...
	go run -C bench $(STATICCHECK) ./...
	$(CLANG) -target bpf -mcpu=v3 -O2 -Wall -Wextra -Werror -fsyntax-only -idirafter /usr/include/$(shell uname -m)-linux-gnu bpf/abi.c bpf/shapectl.c
	shellcheck -x scripts/*.sh .ci/run

bench: ## what shapectl costs, beside other limiters: writes docs/benchmarks.md and docs/bench in half an hour (root)
	@scripts/need.sh 'make bench' $(BENCH_NEEDS)
	go build -C bench -buildvcs=false -o ../bin/bench .
	bin/bench $(BENCH_FLAGS) -o $(BENCH_OUT)

install: all ## the command, its systemd units and examples, to $(PREFIX)
	install -D -m 755 bin/shapectl $(DESTDIR)$(PREFIX)/bin/shapectl
	install -D -m 644 -t $(UNIT_DIR) systemd/*.service
	sed -i 's|/usr/local|$(PREFIX)|' $(UNITS)
	install -d $(DOC_DIR)
	cp -r README.md $(wildcard examples) $(DOC_DIR)

uninstall: ## take away what install made; limits that are in force stay
	rm -f $(DESTDIR)$(PREFIX)/bin/shapectl $(UNITS)
	rm -rf $(DOC_DIR)

clean: ## remove what was built
	rm -rf bin

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 18
