#!/usr/bin/env bash
# capture.sh: writes anew what nft makes of the rulesets here, an object in each line.
set -euo pipefail
cd "$(dirname "$0")"
name=shapectl-capture-$$
ip netns add "$name"
trap 'ip netns del "$name"' EXIT
ip -n "$name" link add eth1 type veth peer name eth0
for ruleset in *.nft; do
	ip netns exec "$name" nft flush ruleset
	ip netns exec "$name" nft -f "$ruleset"
	ip netns exec "$name" nft -j list ruleset | sed 's/}, {"\(table\|chain\|rule\|set\|map\|limit\|metainfo\)": {"/},\n{"\1": {"/g' >"${ruleset%.nft}.json"
done
