"""Environment variables of workers: an allow-list, so that the driver's secrets stay with the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

MARKER = "GRPO_MCORE_RUN"
"""Set in every process of a Ray that a run has started, and inherited by what they start: by it the last
ones are found and ended when the run is over."""

SOCKETS = "VLLM_RPC_BASE_PATH"
"""The folder in which vLLM's ranks meet at sockets, whose files they leave behind."""

ALLOWED = (
    # what any program needs
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_*", "XDG_CACHE_HOME"),
    # where libraries are found
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED", "PYTHONHASHSEED"),
    # models and data on disk; HF_TOKEN is a secret
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    # the machine: threads, accelerators, network
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_*"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NCCL_*", "GLOO_*", "UCX_*"),
    # Ray's own, the mark of the run, and the folder that goes with it
    *("RAY_*", MARKER, SOCKETS),
)
"""Names and patterns. Others are named in the recipe (`cluster.env_vars`) or given with the worker."""


def of_the_run(mark: str, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What is set for a Ray that a run starts and marks with `mark`; `folder` is removed after it."""
    return {MARKER: mark, SOCKETS: environ.get(SOCKETS, str(folder))}


def is_allowed(name: str, extra: Sequence[str] = ()) -> bool:
    """Whether a worker may see the variable `name`. `extra`: more names and patterns."""
    return any(fnmatchcase(name, pattern) for pattern in (*ALLOWED, *extra))


def chosen(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables of `environ` that `names` (names and patterns) asks for."""
    return {key: value for key, value in environ.items() if any(fnmatchcase(key, name) for name in names)}


@contextmanager
def only_allowed(extra: Sequence[str] = ()) -> Iterator[None]:
    """Inside, this process has only the allowed variables. For ray.init, whose processes inherit them all and
    which takes no environment of its own. What is set inside stays."""
    hidden = {key: os.environ.pop(key) for key in list(os.environ) if not is_allowed(key, extra)}
    try:
        yield
    finally:
        os.environ.update(hidden)
