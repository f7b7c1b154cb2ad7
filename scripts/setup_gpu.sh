#!/usr/bin/env bash
# Make .venv-gpu: the packages of requirements/gpu.lock, TransformerEngine, the kernels of Mamba2 and Gated DeltaNet, and the
# project itself, editable; then import every one of them. Python 3.12, x86_64, CUDA 13. Needs no GPU.
#
#   scripts/setup_gpu.sh [STEP ...]    steps, in this order; none: all of them
#     venv                a virtual environment, if there is none
#     lock                the locked packages, with their hashes: 3.4 GB to download, 9 GB on disk
#     headers             whether the compilers find the headers and libraries that the next two steps need: seconds
#     transformer_engine  is compiled, against the installed torch, cuDNN and NCCL: 10 to 30 minutes
#     kernels             are compiled too (pyproject.toml's extra `kernels`)
#     prefetch            FlashInfer's compiled kernels, from its own index: without them engines compile at their first start
#     project             grpo_mcore from this folder
#     imports             each extension is imported, not only looked for
#   and, only when it is named:
#     cudnn               a newer cuDNN than torch names, with which attention sinks (gpt-oss) can be trained; after all others
#
#   VENV=.venv-gpu        where the environment is
#   PYTHON=python3.12     interpreter that makes it
#   NVTE_CUDA_ARCHS=90    all is compiled for these architectures; 90 is H100 and H200, "90;100" adds B200
#   MAX_JOBS=8            compilers at a time; each takes up to 8 GB of memory
#   ONLY=                 names of .cu files: the others are left empty, to check the set-up on two cores
#   EDITABLE=1            0: copy the project into the environment, as the image does
set -euo pipefail
cd "$(dirname "$0")/.."

LOCK=requirements/gpu.lock
TRANSFORMER_ENGINE=2.20.2
CUDNN='nvidia-cudnn-cu13==9.26.1.1 --hash=sha256:c709224270fbfb5c51248422b468dc258461a723a8d5a21f50111614b36b8c53'
VENV=${VENV:-.venv-gpu}
export NVTE_CUDA_ARCHS=${NVTE_CUDA_ARCHS:-90} MAX_JOBS=${MAX_JOBS:-8}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

say() { echo "[setup] $*"; }
fail() { echo "[setup] FAILED: $*" >&2; exit 1; }
pip_install() { "$VENV/bin/python" -m pip install "$@"; }

make_venv() {
    [ -x "$VENV/bin/python" ] && return
    local python=${PYTHON:-python3.12}
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
        fail "the lock is for Python 3.12 and $python is not that; name one: PYTHON=/path/to/python3.12 $0"
    "$python" -m venv "$VENV" || fail "no virtual environment. Debian and Ubuntu: apt-get install python3.12-venv"
}

install_lock() { pip_install --no-deps --require-hashes -r "$LOCK"; }

# Let the compilers take what torch is linked with: the CUDA toolkit, cuDNN and NCCL that pip has installed. A system's are of
# other versions, and then two of each would be loaded. pip's have neither a common include folder nor lib*.so without a
# version, which the linker looks for.
use_pips_cuda() {
    local site links library
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    [ -x "$site/cu13/bin/nvcc" ] || fail "$site/cu13 has no nvcc; run the step lock first"
    links=$VENV/cuda-links
    mkdir -p "$links"
    for library in "$site"/{cu13,cudnn,nccl}/lib/lib*.so.*; do
        ln -sf "$(realpath "$library")" "$links/$(basename "${library%%.so.*}").so"
    done
    export CUDA_HOME=$site/cu13 CUDNN_HOME=$site/cudnn CUDNN_PATH=$site/cudnn NCCL_HOME=$site/nccl
    export NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1
    export PATH=$CUDA_HOME/bin:$(realpath "$VENV/bin"):$PATH
    export CPATH=$site/cudnn/include:$site/nccl/include:$CUDA_HOME/include:$CUDA_HOME/include/cccl${CPATH:+:$CPATH}
    export LIBRARY_PATH=$(realpath "$links")${LIBRARY_PATH:+:$LIBRARY_PATH}
    # The setup.py of both packages of kernels names up to nine architectures and asks for no other.
    cat >"$VENV/nvcc" <<'EOF'
#!/usr/bin/env bash
# nvcc, which compiles for NVTE_CUDA_ARCHS in place of the architectures that it is told, and an empty file in place of each
# source that ONLY does not name.
words=() told='' source='' folder=${0%/*}
while [ $# -gt 0 ]; do
    case $1 in
    -gencode) told=1 && shift ;;
    *.cu)
        source=${1##*/}
        if [[ " ${ONLY:-$source} " == *" $source "* ]]; then words+=("$1"); else words+=("$folder/none.cu") source=''; fi
        ;;
    *) words+=("$1") ;;
    esac
    shift
done
for arch in ${told:+${NVTE_CUDA_ARCHS//;/ }}; do words+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
"$CUDA_HOME/bin/nvcc" "${words[@]}" || exit
[ -z "$source" ] || echo "[setup] compiled $source in $SECONDS s" >>"$folder/compiled.txt"
EOF
    # With ONLY the C++ sources are all compiled, which takes half as long without optimization.
    printf '#!/bin/sh\nexec g++ "$@" -O0\n' >"$VENV/g++"
    touch "$VENV/none.cu" && chmod +x "$VENV/nvcc" "$VENV/g++"
    [ -z "${ONLY-}" ] || export CXX=$(realpath "$VENV/g++")
    # None of the three asks its project's releases for a binary, which has no hash.
    export PYTORCH_NVCC=$(realpath "$VENV/nvcc") NVTE_PYTORCH_FORCE_BUILD=TRUE
    export CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE
}

check_headers() {
    use_pips_cuda
    local folder include
    folder=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$folder'" EXIT
    cat >"$folder/check.cpp" <<'EOF'
#include <Python.h>
#include <cublasLt.h>
#include <cuda/std/cstdint>
#include <cuda_runtime.h>
#include <cudnn.h>
#include <nccl.h>
int main() {
    int version = 0;
    return ncclGetVersion(&version) + cudaRuntimeGetVersion(&version) + (cudnnGetVersion() == 0);
}
EOF
    # cub refuses a compiler whose CUDA is not that of the runtime's headers.
    printf '%s\n' '#include <cub/cub.cuh>' '#include <cuda_bf16.h>' \
        '__global__ void twice(__nv_bfloat16* x) { x[0] = x[0] + x[0]; }' >"$folder/check.cu"
    include=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    g++ -std=c++17 -I"$include" "$folder/check.cpp" -o "$folder/check" -lcudart -lcudnn -lnccl ||
        fail "the C++ compiler does not find what TransformerEngine needs (above). Debian and Ubuntu: apt-get install \
build-essential python3.12-dev"
    nvcc -std=c++17 -arch=sm_90 -c "$folder/check.cu" -o "$folder/check.o" ||
        fail "nvcc of $CUDA_HOME does not compile for sm_90 (above); it needs a g++ that it supports"
}

# Its dependencies come in the versions of the lock, where that has them. Nothing comes from pip's cache, here and in the next
# step: what was compiled once may be for another torch or other architectures.
install_transformer_engine() {
    use_pips_cuda
    sed 's/ --hash=.*//' "$LOCK" >"$VENV/constraints.txt"
    pip_install --no-cache-dir --no-build-isolation -c "$VENV/constraints.txt" \
        "transformer-engine[pytorch,core_cu13]==$TRANSFORMER_ENGINE"
}

kernel_packages() {
    "$VENV/bin/python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["kernels"])'
}

install_kernels() {
    use_pips_cuda
    # shellcheck disable=SC2046
    pip_install --no-cache-dir --no-deps --no-build-isolation $(kernel_packages)
    cat "$VENV/compiled.txt"
}

# With torch's, TransformerEngine refuses the backward pass of sinks in packed rows.
install_cudnn() {
    echo "$CUDNN" >"$VENV/cudnn.txt"
    pip_install --no-deps --require-hashes -r "$VENV/cudnn.txt"
}

install_project() {
    local editable=(-e)
    [ "${EDITABLE:-1}" = 1 ] || editable=()
    pip_install --no-deps --no-build-isolation "${editable[@]}" .
    "$VENV/bin/python" -m pip check
}

prefetch_kernels() {
    "$VENV/bin/flashinfer" download-kernels || fail "FlashInfer's index does not answer. Go on with '$0 project imports': \
engines then compile at their first start, with the nvcc that pip has installed"
}

# In a process each: one that fails must not hide the others, and some cannot be imported together. With ONLY functions are
# missing, and looked up when they are called.
check_imports() {
    local module first why failed=() lazy=${ONLY:+import os, sys; sys.setdlopenflags(os.RTLD_LAZY); }
    for module in torch vllm megatron.core ray transformers flashinfer transformer_engine.pytorch causal_conv1d mamba_ssm \
        fla grpo_mcore.tools.launch; do
        case $module in  # as the policy's workers, else TransformerEngine does not find the libraries that torch brings
        megatron.core | transformer_engine.pytorch) first='import grpo_mcore.parallel.platform as p; p.load_torchs_cudnn(); ' ;;
        *) first='' ;;
        esac
        if why=$("$VENV/bin/python" -W ignore -c "$lazy${first}import $module" 2>&1); then
            say "  $module"
        else
            say "  $module: $(tail -n 1 <<<"$why")"
            failed+=("$module")
        fi
    done
    [ ${#failed[@]} = 0 ] || fail "not importable: ${failed[*]}"
}

run_step() {
    say "$1"
    case $1 in
    venv) make_venv ;;
    lock) install_lock ;;
    headers) check_headers ;;
    transformer_engine) install_transformer_engine ;;
    kernels) install_kernels ;;
    project) install_project ;;
    prefetch) prefetch_kernels ;;
    imports) check_imports ;;
    cudnn) install_cudnn ;;
    *) fail "there is no step $1; $0 begins with a list" ;;
    esac
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "this is $(uname -sm); the lock is for Linux on x86_64"
[ $# -gt 0 ] || set -- venv lock headers transformer_engine kernels prefetch project imports
for step in "$@"; do run_step "$step"; done
say "done after $SECONDS s: source $VENV/bin/activate"
