#!/usr/bin/env bash
# Install packages of a lock file, without dependency resolution; their hashes must be the locked ones.
#
#   scripts/install_locked.sh PYTHON LOCK NAME [PIP OPTION ...]    NAME: a package, or all
#
# The lock has the files of Python 3.11. Other versions of Python have other files of the same packages: there, only the
# versions are checked.
set -euo pipefail
python=$1 lock=$2 name=$3
shift 3
lines=$(if [ "$name" = all ]; then cat "$lock"; else grep "^$name==" "$lock"; fi)
check=(--require-hashes)
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    lines=$(sed 's/ --hash=.*//' <<<"$lines")
    check=()
fi
exec "$python" -m pip install --no-deps --no-compile "${check[@]}" "$@" -r /dev/stdin <<<"$lines"
