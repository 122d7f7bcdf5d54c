#!/usr/bin/env bash
# build.sh DESCRIBED DIRECTORY [ARCH...]: writes a .deb, an .rpm, an .apk and a static tarball there, for amd64 and arm64 if no
# architecture is named. DESCRIBED is what `git describe` says. The same commit and Go release give the same bytes,
# wherever and whenever they build.
set -euo pipefail
export LC_ALL=C TZ=UTC GOAMD64=v1 GOARM64=v8.0 GOEXPERIMENT=
umask 022

nfpm=github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
described=$1
archs=("${@:3}")
[[ $# -gt 2 ]] || archs=(amd64 arm64)
VERSION=$(packaging/version.sh "$described")
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export VERSION SOURCE_DATE_EPOCH
mkdir -p "$2"
out=$(cd "$2" && pwd)
rm -f "$out"/shapectl[-_]* "$out"/SHA256SUMS*

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
GOBIN=$work go install "$nfpm"

# install_tree ARCH PREFIX DESTDIR
install_tree() {
	make -s install GOARCH="$1" BIN="$work/$1/shapectl" VERSION="$described" PREFIX="$2" DESTDIR="$3"
	GOARCH=$1 packaging/licences.sh >"$3$2/share/doc/shapectl/LICENSES/third-party.txt"
}

# settle DIRECTORY: gives all files the time of the commit, and modes that no umask has changed.
settle() {
	chmod -R u=rwX,go=rX "$1"
	find "$1" -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
}

for ARCH in "${archs[@]}"; do
	export ARCH
	tarball=shapectl-$VERSION-linux-$ARCH
	install_tree "$ARCH" /usr/local "$work/$ARCH"
	mv "$work/$ARCH/usr/local" "$work/$tarball"
	settle "$work/$tarball"
	tar -C "$work" --sort=name --format=gnu --owner=0 --group=0 --numeric-owner -c "$tarball" | gzip -9n >"$out/$tarball.tar.gz"

	cp packaging/{nfpm.yaml,preinst,postinst,prerm,postrm} "$work/$ARCH"
	mkdir "$work/$ARCH/apk"
	for script in 'preinst upgrade' 'postinst configure old' 'prerm remove'; do
		sed "1a set -- ${script#* }" "packaging/${script%% *}" >"$work/$ARCH/apk/${script%% *}"
	done
	root=$work/$ARCH/package
	install_tree "$ARCH" /usr "$root"
	install -d "$root/etc/shapectl"
	find "$root/usr/share/man" -type f -exec gzip -9n {} + 2>/dev/null || true
	settle "$work/$ARCH" # also the scripts: an .apk has their times
	(cd "$work/$ARCH" && "$work/nfpm" package --packager rpm --target "$out" >/dev/null)
	# apk takes only versions of its own form: 0.1.0_rc1, 0.1.0_p5 for the fifth commit after 0.1.0.
	(cd "$work/$ARCH" && VERSION=$(sed -E 's/~rc\.([0-9]+)/_rc\1/; s/^0~([0-9]+).*/0_git\1/; s/\+([0-9]+).*/_p\1/' <<<"$VERSION") \
		"$work/nfpm" package --packager apk --target "$out" >/dev/null)

	# Debian's zsh looks elsewhere, and Debian's policy wants a changelog and a copyright file by these names.
	mkdir -p "$root/usr/share/zsh/vendor-completions"
	mv "$root/usr/share/zsh/site-functions/_shapectl" "$root/usr/share/zsh/vendor-completions/"
	rmdir "$root/usr/share/zsh/site-functions"
	cp packaging/copyright "$root/usr/share/doc/shapectl/copyright"
	gzip -9n <CHANGELOG.md >"$root/usr/share/doc/shapectl/changelog.gz"
	settle "$root"
	(cd "$work/$ARCH" && "$work/nfpm" package --packager deb --target "$out" >/dev/null)
done
cd "$out"
sha256sum shapectl[-_]*.{deb,rpm,apk,tar.gz} >SHA256SUMS
du -h shapectl[-_]*.{deb,rpm,apk,tar.gz}
