#!/usr/bin/env bash
# Make .venv-launch, exactly requirements/launch.lock: NeMo-Run for the machine that submits jobs. NeMo-Run and vLLM
# cannot share an environment. Run by `make launch-env`; does nothing if it is up to date.
#
#   PYTHON=/path/to/python    interpreter, instead of python3.11 or python3
#   LAUNCH_ENV=FOLDER         folder, instead of .venv-launch
set -euo pipefail
cd "$(dirname "$0")/.."

LOCK=requirements/launch.lock
ENV=${LAUNCH_ENV:-.venv-launch}
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

digest() { { pwd && cat "$LOCK" scripts/setup_launch.sh scripts/install_locked.sh; } | sha256sum; }
[ "$(cat "$ENV/.ready" 2>/dev/null)" = "$(digest)" ] && exit 0

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || {
    echo "[launch-env] Python 3.11 to 3.13 is needed, $PYTHON is not that; name one: PYTHON=/path make launch-env" >&2
    exit 1
}
echo "[launch-env] $ENV: $(grep -c == "$LOCK") packages, 0.5 GB on disk"
rm -rf "$ENV"
"$PYTHON" -m venv "$ENV"
scripts/install_locked.sh "$ENV/bin/python" "$LOCK" all --quiet || {
    echo "[launch-env] FAILED; is there a package index? The message of pip is above" >&2
    exit 1
}
# Add this checkout for the code that reads recipes and writes jobs; its programs belong to the environment that trains.
pwd >"$("$ENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/grpo_mcore.pth"
"$ENV/bin/python" -c 'import nemo_run, grpo_mcore.tools.launch.nemo_run'
digest >"$ENV/.ready"
echo "[launch-env] ready: $ENV/bin/python launchers/nemo_run/grpo.py --help"
