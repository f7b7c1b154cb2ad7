#!/usr/bin/env bash
# Check and measure on a machine with one GPU and torch for CUDA; without a network, and without vLLM, Ray and
# TransformerEngine, whose lines then say so. With them: PYTHON=.venv-gpu/bin/python (scripts/setup_gpu.sh).
#
#   scripts/gpu_proof.sh --fetch [3.12]   with network: put the wheels that such a machine lacks into .wheels (8 MB), for
#                                         its version of Python
#   scripts/gpu_proof.sh [OPTION ...]     there: run benchmarks/gpu/proof.py, which prints one table, then tests/gpu;
#                                         options are proof.py's (--parts, --out; --device cpu --tiny tries it here)
#
# Copy the checkout with .wheels. Everything takes under ten minutes on an H100. Exit code 0: whatever is compared agrees.
#
#   PYTHON=/path/to/python    interpreter that has torch, instead of python3
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
# Packages by the name that Python imports, in the versions of the lock.
declare -A CARRIED=(
    [megatron.core]=megatron-core [pydantic]=pydantic [pydantic_core]=pydantic-core [annotated_types]=annotated-types
    [typing_inspection]=typing-inspection [msgspec]=msgspec [omegaconf]=omegaconf [pytest]=pytest [pluggy]=pluggy
    [iniconfig]=iniconfig [hypothesis]=hypothesis [sortedcontainers]=sortedcontainers
    [packaging]=packaging [pygments]=pygments
)

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

# Only what is missing: a wheel must not hide the environment's own version.
missing=()
for module in "${!CARRIED[@]}"; do
    "$PYTHON" -c "from importlib.util import find_spec; exit(not find_spec('${module%%.*}'))" || missing+=("${CARRIED[$module]}")
done
if [ ${#missing[@]} -gt 0 ]; then
    [ -d .wheels ] || { echo "no .wheels for ${missing[*]}: run scripts/gpu_proof.sh --fetch where there is a network" >&2; exit 1; }
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --find-links .wheels --target "$site" "${missing[@]}"
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
status=0
"$PYTHON" -W ignore -m benchmarks.gpu.proof "$@" || status=$?
# Its own configuration: the project's asks for plugins and versions that the machine may lack.
"$PYTHON" -W ignore -m pytest -q -s -c /dev/null --rootdir . -p no:cacheprovider -W ignore tests/gpu || status=$?
exit "$status"
