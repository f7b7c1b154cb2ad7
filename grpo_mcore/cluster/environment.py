"""Environment variables of workers: an allow-list, so that the driver's secrets stay with the driver."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import MappingProxyType

from grpo_mcore.base.orphan_reaper import MARKER, SOCKETS
from grpo_mcore.base.processes import HUB_VARIABLES

ALLOWED = (
    # what any program needs
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_*", "XDG_CACHE_HOME"),
    # where libraries are found
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED", "PYTHONHASHSEED"),
    # models and data on disk; HF_TOKEN is a secret
    *HUB_VARIABLES,
    # the machine: threads, accelerators, network
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_*"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NCCL_*", "GLOO_*", "UCX_*"),
    # settings of libraries on GPUs: kernels, allocator, logs
    *("NVTE_*", "TORCH_*", "PYTORCH_*", "VLLM_*", "FLASHINFER_*", "TRITON_*", "TORCHINDUCTOR_*"),
    *("FI_*", "OFI_*", "EFA_*", "MELLANOX_*", "CUDNN_*", "CUBLAS_*"),
    # Ray's own, and those that an OrphanReaper sets
    *("RAY_*", MARKER, SOCKETS),
)
"""Names and patterns of allowed variables. A recipe (`cluster.env_vars`) and the code that spawns a worker may add
others."""

SECRETS = ("*TOKEN", "*_API_KEY", "*_KEY_ID", "*SECRET*", "*PASSWORD*", "*CREDENTIAL*")
"""Patterns of secrets, which no pattern of ALLOWED lets through, such as VLLM_API_KEY. Only a name in the recipe lets a
secret through, and Ray's own token, which its processes need to talk."""


RAYS_OWN = "r"
"""Name of the folder that Ray gets inside a private one: Ray lets everybody read and write its own."""


def is_allowed(name: str, extra: Sequence[str] = ()) -> bool:
    """Return whether a worker may see the variable `name`. `extra`: more names and patterns."""
    if any(fnmatchcase(name, pattern) for pattern in extra):
        return True
    secret = any(fnmatchcase(name, pattern) for pattern in SECRETS) and not name.startswith("RAY_")
    return not secret and any(fnmatchcase(name, pattern) for pattern in ALLOWED)


def chosen(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables of `environ` that match `names` (names and patterns)."""
    return {key: value for key, value in environ.items() if any(fnmatchcase(key, name) for name in names)}


@contextmanager
def only_allowed(extra: Sequence[str] = (), added: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Hide all but the allowed variables from this process, and set those of `added`, inside the block.

    For ray.init, whose processes inherit all variables and which takes no environment. Others that are set inside stay.
    """
    hidden = {key: os.environ.pop(key) for key in list(os.environ) if key in added or not is_allowed(key, extra)}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
        os.environ.update(hidden)


@contextmanager
def private_files() -> Iterator[int]:
    """Let this process and those that it starts create files that only their owner can read, inside the block. Yield
    the umask outside of it."""
    before = os.umask(0o077)
    try:
        yield before
    finally:
        os.umask(before)
