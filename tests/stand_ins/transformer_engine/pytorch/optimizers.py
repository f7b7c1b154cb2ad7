"""Adam, and the kernels of gradient clipping."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests import fused_adam
from transformer_engine.pytorch.kernels import on_cpu

Lists = Sequence[Sequence[torch.Tensor]]


class FusedAdam(fused_adam.FusedAdam):
    step = on_cpu(fused_adam.FusedAdam.step)


class FusedSGD: ...


def multi_tensor_applier(operation: Callable[..., Any], noop: torch.Tensor, lists: Lists, *args: Any) -> Any:
    lists = [[tensor for tensor, first in zip(tensors, lists[0], strict=True) if first.numel()] for tensors in lists]
    return operation(2048 * 32, noop, lists, *args) if lists[0] else None


@on_cpu
def multi_tensor_scale(chunk: int, noop: torch.Tensor, lists: Lists, scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)


@on_cpu
def multi_tensor_l2norm(chunk: int, noop: torch.Tensor, lists: Lists, by_tensor: bool = False) -> Any:
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm()[None], norms if by_tensor else norms.new_zeros(0)
