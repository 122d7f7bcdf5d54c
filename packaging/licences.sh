#!/usr/bin/env bash
# licences.sh [FOLDER]: the licences and notices of Go and of all modules in the programs of a folder, cmd if none is named, as one text.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# show NAME FOLDER: the texts of one module.
show() {
	local files
	files=$(cd "$2" && find . -maxdepth 2 \( -ipath './licen[sc]e*' -o -ipath './copying*' -o -ipath './notice*' -o -ipath './patents*' \) -type f | LC_ALL=C sort)
	if [[ ! $files ]]; then
		echo "licences.sh: $1 has no licence" >&2
		exit 1
	fi
	while IFS= read -r file; do
		printf '==== %s: %s\n\n' "$1" "${file#./}"
		cat "$2/$file"
		echo
	done <<<"$files"
}

echo "The programs include uPlot and these Go modules. Their licences follow."
echo
show "Go $(go env GOVERSION)" "$(go env GOROOT)"
go list -C "${1:-cmd}" -deps -f '{{with .Module}}{{if not (or .Main .Replace)}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' ./... |
	LC_ALL=C sort -u | while read -r path version folder; do
	show "$path $version" "$folder"
done
printf '==== uPlot: LICENSE\n\n'
cat internal/serve/page/uPlot.LICENSE.txt
