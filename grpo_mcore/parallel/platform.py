"""CPU or GPU: decided once, where a rank starts, and passed on as a value, so that tests can take either branch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from grpo_mcore.base.imports import why_not_imported
from grpo_mcore.base.processes import available_cores
from grpo_mcore.families import DeltaShape, MambaShape
from grpo_mcore.recipe import PolicyConfig

PlatformChoice = Literal["auto", "cpu", "gpu"]
"""Values of cluster.platform."""


class PlatformError(RuntimeError):
    """The recipe asks for GPUs and there are none."""


@dataclass(frozen=True)
class Platform:
    """Where a rank runs. Nothing else in this room asks the machine."""

    device: Literal["cpu", "gpu"]
    transformer_engine: bool = False
    """The model is built from TransformerEngine's layers, and its fused kernels can be used."""
    own_attention: bool = False
    """Attention is `PackedAttention` also where TransformerEngine's could be used: shared prefixes need it."""
    grouped_products: bool = False
    """torch's `grouped_mm` computes a rank's experts. The CPU has it too, without a gain over one expert at a time."""
    mamba_kernels: bool = False
    """`mamba_ssm` and `causal_conv1d` compute Mamba2 mixers, in half precision."""
    delta_kernels: bool = False
    """`fla` (flash-linear-attention) and `causal_conv1d` compute Gated DeltaNet mixers, in half precision."""
    cudnn: int | None = None
    """Version of cuDNN, 90200 for 9.2.0. None: unknown."""
    traced: bool = False
    """Nothing is computed: tensors have shapes only, and collectives return at once (tools/plan/trace.py)."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "gpu"

    @property
    def fused_attention(self) -> bool:
        """Attention and rotary embedding are TransformerEngine's."""
        return self.transformer_engine and not self.own_attention

    @property
    def pins_memory(self) -> bool:
        """Host memory is locked, so that the GPU copies at full speed."""
        return self.on_gpu and not self.traced

    @property
    def backend(self) -> str:
        """Backend of torch.distributed."""
        return "fake" if self.traced else "nccl" if self.on_gpu else "gloo"

    def torch_device(self, local_rank: int) -> torch.device:
        """Return the device of the rank with this index among those that share its visible accelerators."""
        return torch.device("cuda", local_rank) if self.on_gpu and not self.traced else torch.device("cpu")

    def environment(self, tensor: int) -> dict[str, str]:
        """Return variables of a rank's process, to be set before CUDA starts. `tensor`: the tensor-parallel size."""
        if not self.on_gpu or tensor == 1:
            return {}
        # One queue to the GPU: kernels start in the order of their launch, so that a tensor-parallel collective gets
        # its multiprocessors before the matrix product that it should overlap with.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    @classmethod
    def detect(cls, choice: PlatformChoice = "auto") -> Platform:
        """Return this process's platform. `choice`: cluster.platform. Raises PlatformError if it is gpu and there is
        none, and for a broken TransformerEngine."""
        if choice == "cpu" or not torch.cuda.is_available():
            if choice == "gpu":
                raise PlatformError(
                    "cluster.platform is gpu, but torch sees no GPU here; set it to cpu or auto, or check the driver"
                )
            return cls("cpu")
        transformer_engine = _installed("transformer_engine")
        if transformer_engine:  # Megatron-Core imports it in any case
            load_torchs_cudnn()
            require("transformer_engine.pytorch")
        return cls(
            "gpu",
            transformer_engine=transformer_engine,
            grouped_products=hasattr(torch, "_grouped_mm"),
            mamba_kernels=_installed(*MambaShape.gpu_packages),
            delta_kernels=_installed(*DeltaShape.gpu_packages),
            cudnn=torch.backends.cudnn.version(),
        )


def load_torchs_cudnn() -> None:
    """Load the cuDNN that torch brought, as TransformerEngine does where it finds no other. It prefers the system's; an
    older one there lacks kernels, and torch refuses to work beside it."""
    for library in sorted((Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib").glob("libcudnn*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def require(module: str) -> None:
    """Import an optional package that was found here. Raises PlatformError if it is broken."""
    if (problem := why_not_imported(module)) is not None:
        package = module.partition(".")[0]
        raise PlatformError(
            f"{package} is installed here but cannot be imported ({problem}); install it again with "
            f"scripts/setup_gpu.sh, or remove it (pip uninstall {package.replace('_', '-')}): torch's kernels do then"
        )


def check_optimizer(policy: PolicyConfig, platform: Platform) -> None:
    """Raise PlatformError if the recipe's optimizer needs TransformerEngine and this rank has none."""
    config = policy.megatron_cfg.optimizer
    if config.use_precision_aware_optimizer and not config.optimizer_cpu_offload and not platform.transformer_engine:
        remedy = "it is not installed here; install it" if platform.on_gpu else "there is no GPU here; run this on one"
        raise PlatformError(
            "policy.megatron_cfg.optimizer.use_precision_aware_optimizer: true needs TransformerEngine's FusedAdam, "
            f"but {remedy}, or set the key to false, with which the update makes float32 copies of bfloat16 gradients"
        )


def _installed(*packages: str) -> bool:
    return all(find_spec(package) is not None for package in packages)


def cpu_threads(processes: int) -> int:
    """Return the number of threads for each of `processes` processes that share this machine's cores."""
    return max(1, int(available_cores()) // max(1, processes))
