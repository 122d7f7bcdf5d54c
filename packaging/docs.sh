#!/usr/bin/env bash
# docs.sh DIRECTORY: installs README, docs, examples and licences there, without the raw benchmark results. Links to files
# that are not installed, such as source code, become links to the repository. A link to a missing file is an error.
set -euo pipefail

repository=https://github.com/shapectl/shapectl/blob/main
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
to=$(cd "$1" && pwd)

cd "$root"
find README.md CHANGELOG.md SECURITY.md LICENSE LICENSES docs examples kubernetes/daemonset.yaml -type f \
	! -path 'docs/man/*' ! -path 'docs/bench/*' -print0 |
	while IFS= read -r -d '' file; do
		install -D -m 644 "$file" "$to/$file"
	done

cd "$to"
find . -name '*.md' -printf '%P\n' | sort | while IFS= read -r page; do
	[[ $page == */* ]] && folder=${page%/*} || folder=.
	# Targets in ](...), src="..." and href="..." that are paths; the fragment stays as it is.
	links=$(grep -oP '(\]\(|(src|href)=")\K[\w.~%/-]+(?=[)"#\s])' "$page" | sort -u || true)
	for link in $links; do
		target=$(realpath -ms --relative-to=. "$folder/$link")
		[[ -e $target ]] && continue
		if [[ ! -e $root/$target ]]; then
			echo "docs.sh: $page links to $link, which does not exist" >&2
			exit 1
		fi
		sed -i -E "s,(\]\(|=\")${link//./\\.}([)\"#[:space:]]),\1$repository/$target\2,g" "$page"
	done
done
