#!/usr/bin/env bash
# version.sh DESCRIBED: the version of the packages, from what `git describe --tags --always --dirty` says.
# dpkg and rpm sort these alike, as `~` comes before anything else, and before nothing:
#
#   a1b2c3d            0~572.ga1b2c3d           no release yet: the number of commits
#   v0.1.0-rc.1        0.1.0~rc.1               before 0.1.0
#   v0.1.0             0.1.0
#   v0.1.0-5-ga1b2c3d  0.1.0+5.ga1b2c3d         after 0.1.0
#   v0.1.0-dirty       0.1.0+0.dirty            after the commit
set -euo pipefail

version=$1 after=''
if [[ $version == *-dirty ]]; then
	version=${version%-dirty} after=dirty
fi
if [[ ! $version =~ ^v[0-9] ]]; then
	version="0~$(git rev-list --count "$version").g$version"
elif [[ $version =~ ^(.*)-([0-9]+)-(g[0-9a-f]+)$ ]]; then
	version=${BASH_REMATCH[1]}+${BASH_REMATCH[2]}.${BASH_REMATCH[3]}
fi
version=${version#v}
version=${version/-/\~}
if [[ $after ]]; then
	[[ $version == *+* || $version == 0~* ]] || version+=+0
	after=.$after
fi
if [[ ! $version =~ ^[0-9][0-9A-Za-z.~+]*$ ]]; then
	echo "version.sh: cannot make a package version of '$1': expected a tag such as v0.1.0 or v0.1.0-rc.1" >&2
	exit 1
fi
echo "$version$after"
