#!/usr/bin/env bash
# Check and measure the policy on a machine with one GPU and torch for CUDA: no vLLM, Ray or TransformerEngine, no network.
#
#   scripts/gpu_proof.sh --fetch [3.12]   with network: put the wheels that such a machine lacks into .wheels (6 MB), for
#                                         its version of Python
#   scripts/gpu_proof.sh [OPTION ...]     there: run tests/gpu, then benchmarks/gpu/proof.py, which prints one table;
#                                         options are proof.py's (--parts, --out; --device cpu --tiny tries it here)
#
# Copy the checkout with .wheels. Everything takes under ten minutes on an H100. Exit code 0: whatever is compared agrees.
#
#   PYTHON=/path/to/python    interpreter that has torch, instead of python3
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
CARRIED=(megatron-core pydantic pydantic-core annotated-types typing-inspection msgspec omegaconf)

if [ "${1:-}" = --fetch ]; then
    version=${2:-3.12}
    platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
    rm -rf .wheels
    for name in "${CARRIED[@]}"; do
        pinned=$(grep -i "^$name==" requirements/cpu.lock) || { echo "$name is not in requirements/cpu.lock" >&2; exit 1; }
        "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
            "${platforms[@]}" -d .wheels "${pinned%%[ ;]*}"
    done
    du -sh .wheels
    exit 0
fi

if ! "$PYTHON" -c "import megatron.core, pydantic, msgspec, omegaconf" 2> /dev/null; then
    [ -d .wheels ] || { echo "no .wheels here: run scripts/gpu_proof.sh --fetch where there is a network" >&2; exit 1; }
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" .wheels/*.whl
    export PYTHONPATH=$site
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
status=0
# Its own configuration: the project's asks for plugins and versions that the machine may lack.
"$PYTHON" -W ignore -m pytest -q -s -c /dev/null --rootdir . -p no:cacheprovider -W ignore tests/gpu || status=$?
"$PYTHON" -W ignore -m benchmarks.gpu.proof "$@" || status=$?
exit "$status"
