#!/usr/bin/env bash
# release.sh DIRECTORY: all that a release consists of, from a clean checkout of its tag: the packages of build.sh, a
# container image, an SBOM for each architecture, the provenance, the notes, and SHA256SUMS over all of them. SIGN_KEY is
# the file of an SSH key that signs SHA256SUMS. The same tag, Go release and key give the same bytes.
set -euo pipefail
export LC_ALL=C TZ=UTC
umask 022

crane=github.com/google/go-containerregistry/cmd/crane@v0.22.1
sbom=github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0
repository=https://github.com/shapectl/shapectl
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
	echo "make release: $1" >&2
	exit 1
}

tag=$(git tag --points-at HEAD) || exit
[[ $tag ]] || refuse "this commit has no tag: run  git tag -s v0.1.0  with the version of the release"
[[ $tag =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-rc\.[0-9]+)?$ ]] || refuse "the commit needs one tag, a version such as v0.1.0 or v0.1.0-rc.1, and has: ${tag//$'\n'/, }"
[[ ! $(git status --porcelain) ]] || refuse "files differ from $tag: commit, move or remove what  git status  lists"
[[ ${SIGN_KEY-} ]] || refuse 'no key to sign with: set SIGN_KEY to the file of an SSH key (ssh-keygen -t ed25519)'
public=$(ssh-keygen -y -P '' -f "$SIGN_KEY" 2>&1) || refuse "cannot use the key $SIGN_KEY: $public"
grep -v '^#' packaging/signers | grep -qF "$(cut -d' ' -f1,2 <<<"$public")" ||
	refuse "packaging/signers does not name the key, so nobody could check the release: add the line  shapectl $public"
version=$(packaging/version.sh "$tag")
plain=${tag#v} plain=${plain%-rc.*} # a candidate has the notes of its release
notes=$(awk -v head="## $plain" '/^## / { on = index($0 " ", head " ") == 1; next } on' CHANGELOG.md)
[[ $notes ]] || refuse "CHANGELOG.md has no section '## $plain'"

commit=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
mkdir -p "$1"
out=$(cd "$1" && pwd)
exec 9<"$out"
flock -n 9 || refuse "another release is made in $out: wait for it"
packaging/build.sh "$tag" "$out"
name=shapectl-$version

work=$(mktemp -d)
trap 'kill "${registry-}" 2>/dev/null || true; rm -rf "$work"' EXIT
GOBIN=$work go install "$crane"
GOBIN=$work go install "$sbom"

# The image is put together in a registry that lives as long as this script.
log=$work/log
"$work/crane" registry serve --address 127.0.0.1:0 2>"$work/registry" &
registry=$!
until port=$(grep -oPs 'port \K\d+' "$work/registry"); do
	kill -0 "$registry" 2>/dev/null || refuse "the registry for the image: $(<"$work/registry")"
	sleep 0.1
done
image=127.0.0.1:$port/shapectl
manifests=()

# quietly COMMAND...: shows what a command says only if it fails.
quietly() {
	"$@" >"$log" 2>&1 || refuse "$* failed: $(<"$log")"
}

for arch in amd64 arm64; do
	tar -C "$work" -xzf "$out/$name-linux-$arch.tar.gz"
	GOARCH=$arch go build -C kubernetes -buildvcs=false -ldflags '-s -w' -o "$work/$name-linux-$arch/bin/shapectl-kubernetes" .
	GOARCH=$arch packaging/licences.sh kubernetes >"$work/$name-linux-$arch/share/doc/shapectl/LICENSES/kubernetes.txt"
	tar -C "$work/$name-linux-$arch" --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
		--transform='s,^,usr/local/,' -cf "$work/$arch.tar" bin/shapectl{,-kubernetes} share/doc/shapectl/LICENSE share/doc/shapectl/LICENSES
	quietly "$work/crane" append --oci-empty-base -f "$work/$arch.tar" -t "$image:$arch"
	quietly "$work/crane" mutate "$image:$arch" -t "$image:$arch" --entrypoint /usr/local/bin/shapectl --set-platform "linux/$arch" \
		-l "org.opencontainers.image.source=$repository" -l "org.opencontainers.image.version=$version" \
		-l "org.opencontainers.image.revision=$commit"
	manifests+=(-m "$image:$arch")
	GOARCH=$arch quietly "$work/cyclonedx-gomod" app -json -noserial -notimestamp -std -main cmd/shapectl \
		-output "$out/$name-linux-$arch.cdx.json"
	GOARCH=$arch quietly "$work/cyclonedx-gomod" app -json -noserial -notimestamp -std -output "$work/sbom" kubernetes
	# It calls shapectl's own module "..", with a hash of all files here, built ones too.
	jq '(.components[] | select(.name == "..")) |= (.name = "github.com/shapectl/shapectl" | del(.hashes)) |
		walk(if type == "string" then sub("pkg:golang/[.][.][?]"; "pkg:golang/github.com/shapectl/shapectl?") else . end)' \
		"$work/sbom" >"$out/$name-kubernetes-linux-$arch.cdx.json"
done
quietly "$work/crane" index append "${manifests[@]}" -t "$image:$version"
quietly "$work/crane" pull --format=oci "$image:$version" "$work/image"
index=$(jq --arg version "$version" '.manifests[0].annotations = {"org.opencontainers.image.ref.name": $version}' "$work/image/index.json")
echo "$index" >"$work/image/index.json"
tar -C "$work/image" --mode=u=rwX,go=rX --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
	-cf "$out/$name-image.tar" .

printf '%s\n' "$notes" | sed "/./,\$!d; s,](docs/,]($repository/blob/$tag/docs/,g" >"$out/$name-notes.md"

cd "$out"
# https://slsa.dev/spec/v1.0/provenance, in https://in-toto.io/Statement/v1
sha256sum "$name"-* shapectl_* | jq -R 'split("  ") | {name: .[1], digest: {sha256: .[0]}}' |
	jq -s --arg source "git+$repository@refs/tags/$tag" --arg commit "$commit" \
		--arg go "$(go env GOVERSION)" --arg builder "${BUILDER_ID:-$repository/blob/$tag/packaging/release.sh}" '{
	_type: "https://in-toto.io/Statement/v1",
	subject: .,
	predicateType: "https://slsa.dev/provenance/v1",
	predicate: {
		buildDefinition: {
			buildType: "https://github.com/shapectl/shapectl/blob/main/packaging/release.sh",
			externalParameters: {source: $source, target: "release"},
			resolvedDependencies: [
				{uri: $source, digest: {gitCommit: $commit}},
				{uri: ("https://go.dev/dl/" + $go), name: $go}
			]
		},
		runDetails: {builder: {id: $builder}}
	}
}' >"$name.intoto.json"
sha256sum "$name"[-.]* shapectl_* >SHA256SUMS
ssh-keygen -q -Y sign -n shapectl -f "$SIGN_KEY" SHA256SUMS
# As SECURITY.md has users do it: a release that they cannot verify must not be.
if ! { ssh-keygen -q -Y verify -f "$OLDPWD/packaging/signers" -I shapectl -n shapectl -s SHA256SUMS.sig <SHA256SUMS &&
	sha256sum -c --quiet --ignore-missing SHA256SUMS; }; then
	rm SHA256SUMS.sig
	refuse 'users could not verify this release: correct the line of the key in packaging/signers'
fi
