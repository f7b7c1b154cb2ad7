# Two images from one file:
#   docker build --target gpu -t grpo-mcore:0.3.0 .         H100 and newer, CUDA 13 (driver R580 or newer)
#   docker build --target cpu -t grpo-mcore:0.3.0-cpu .     the same code with CPU engines, for tests and plans
# One environment for policy, engines and driver: vLLM's binary determines torch, and torch the rest. Secrets do not belong
# here: tokens come at run time, from the shell (Slurm) or from secrets by reference (Kubernetes).
# Packages come from requirements/*.lock, with their hashes; TransformerEngine and the kernels of Mamba2 and Gated DeltaNet,
# which are compiled here, by their versions. scripts/setup_gpu.sh does it, as on a machine without containers.

ARG BASE_IMAGE=nvcr.io/nvidia/cuda-dl-base:26.05-cuda13.2-devel-ubuntu24.04
ARG CPU_BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# ---- GPU -------------------------------------------------------------------------------------------------------------
# A devel image, because FlashInfer and Triton compile at run time. The set-up compiles with pip's CUDA, cuDNN and NCCL.
FROM ${BASE_IMAGE} AS gpu
# Ubuntu 24.04 has 3.12; pyproject.toml allows 3.11 to 3.13.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv build-essential git \
        libibverbs1 ibverbs-providers librdmacm1 bubblewrap \
    && rm -rf /var/lib/apt/lists/*
ENV VENV=/opt/venv VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /opt/grpo-mcore

# Each step of scripts/setup_gpu.sh is a layer. The large one first: it changes seldom.
COPY scripts/setup_gpu.sh scripts/setup_gpu.sh
COPY requirements/gpu.lock requirements/gpu.lock
RUN scripts/setup_gpu.sh venv lock headers

# 90 is H100 and H200; "90;100" adds B200. TRANSFORMER_ENGINE=0, KERNELS=0: leave them out; torch's kernels are used then.
ARG NVTE_CUDA_ARCHS=90
ARG MAX_JOBS=8
ARG TRANSFORMER_ENGINE=1
RUN [ "${TRANSFORMER_ENGINE}" = 0 ] || scripts/setup_gpu.sh transformer_engine
ARG KERNELS=1
COPY pyproject.toml README.md LICENSE ./
RUN [ "${KERNELS}" = 0 ] || scripts/setup_gpu.sh kernels

# FlashInfer's compiled kernels, after which no engine compiles them. 0: leave them out, where its index does not answer.
ARG PREFETCH=1
RUN [ "${PREFETCH}" = 0 ] || scripts/setup_gpu.sh prefetch

COPY grpo_mcore grpo_mcore
COPY recipes recipes
RUN EDITABLE=0 scripts/setup_gpu.sh project \
    && if [ "${TRANSFORMER_ENGINE}${KERNELS}" = 11 ]; then scripts/setup_gpu.sh imports; fi

ENV RAY_USAGE_STATS_ENABLED=0 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1 \
    VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="grpo-mcore" \
      org.opencontainers.image.description="GRPO with Megatron-Core policies, vLLM engines and Ray, for GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
# The Kubernetes manifests run as user 1000. Ubuntu's image already has a user with that id.
RUN (userdel --remove ubuntu 2>/dev/null || true) && useradd --uid 1000 --create-home grpo
USER 1000
WORKDIR /home/grpo
CMD ["grpo-mcore", "--help"]

# ---- CPU -------------------------------------------------------------------------------------------------------------
FROM ${CPU_BASE_IMAGE} AS cpu
# vLLM compiles small kernels for the processor at run time. bubblewrap is the sandbox of env.code.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential bubblewrap \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
# The exact versions that the tests use, without dependency resolution.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/cpu.lock /opt/grpo-mcore/requirements/cpu.lock
RUN grep '^torch==' /opt/grpo-mcore/requirements/cpu.lock >/tmp/torch.lock \
    && pip install --no-deps --require-hashes --index-url "${TORCH_CPU_INDEX}" -r /tmp/torch.lock \
    && pip install --no-deps --require-hashes -r /opt/grpo-mcore/requirements/cpu.lock && rm /tmp/torch.lock
COPY pyproject.toml README.md LICENSE /opt/grpo-mcore/
COPY grpo_mcore /opt/grpo-mcore/grpo_mcore
COPY recipes /opt/grpo-mcore/recipes
RUN pip install --no-deps --no-build-isolation /opt/grpo-mcore \
    && python -c "import megatron.core, ray, torch, vllm, grpo_mcore.tools.launch"
ENV RAY_USAGE_STATS_ENABLED=0 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="grpo-mcore-cpu" \
      org.opencontainers.image.description="GRPO with Megatron-Core policies, vLLM engines and Ray, on CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 1000 --create-home grpo
USER 1000
WORKDIR /home/grpo
CMD ["grpo-mcore", "--help"]
