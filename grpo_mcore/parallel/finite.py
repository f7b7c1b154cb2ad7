"""Find what is not finite in a policy's state: weights, the float32 copies that the optimizer updates, moments."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.parallel.memory import on_device, on_host

LARGE = 1e18
"""Absolute value of a weight from which on a forward pass overflows: its square is near the limit of float32."""


class NonFiniteState(FloatingPointError):
    """Weights or optimizer moments are NaN or infinite; the message names the first one."""


def is_finite(values: Tensor) -> bool:
    """Return whether no element of `values` [n] is NaN or infinite.

    The extremes are NaN or infinite if any element is. Computing them needs no temporaries; torch.isfinite takes seven
    bytes per element. The slices keep indices within 32 bits.
    """
    extremes = [extreme for part in values.split(1 << 30) if len(part) for extreme in torch.aminmax(part)]
    return all(math.isfinite(extreme.item()) for extreme in extremes)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no element of any tensor is NaN or infinite. One wait for each device, whatever their number."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    return all(
        torch.stack([extreme.float() for extreme in _extremes(group, device.type)]).isfinite().all().item()
        for device, group in by_device.items()
    )


def _extremes(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Return values that are all finite if all elements are. `kind`: type of the tensors' device. On the CPU the norm
    takes six times as long as least and greatest element; elsewhere it is few kernels for all tensors."""
    if kind == "cpu":
        return [extreme for tensor in tensors for extreme in torch.aminmax(tensor)]
    return list(torch._foreach_norm(tensors, math.inf))


def state_tensors(chunks: Iterable[Any], optimizer: Any, *, host: bool = True) -> Iterator[Tensor]:
    """Yield the weights of `chunks`, and the optimizer's weights and moments. `host`: those on the host, too, of an
    optimizer that runs there (optimizer_cpu_offload)."""
    for chunk in chunks:
        yield from chunk.parameters()
    for adam in (*on_device(optimizer), *(on_host(optimizer) if host else ())):
        for group in adam.param_groups:
            yield from group["params"]
        for state in adam.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def first_nonfinite(chunks: Iterable[Any], optimizer: Any) -> str | None:
    """Return the first weight or moment that is not finite, as "weight NAME" or "moment exp_avg of NAME"; None if there
    is none. Weights come first: broken moments break the weights in the next update."""
    names = {weight: name for chunk in chunks for name, weight in chunk.module.named_parameters()}
    for weight, name in names.items():
        if not all_finite([weight]):
            return f"weight {name}"
    for part in optimizer.chained_optimizers:
        for weight, (group, index) in part.model_param_group_index_map.items():
            updated = part.optimizer.param_groups[group]["params"][index]
            if not all_finite([updated]):
                return f"the optimizer's copy of weight {names[weight]}"
            for kind, value in part.optimizer.state[updated].items():
                if torch.is_tensor(value) and not all_finite([value]):
                    return f"moment {kind} of {names[weight]}"
    if not all_finite(state_tensors((), optimizer)):
        return "a part of the optimizer's state on the host"
    return None


def largest_weight(chunks: Iterable[Any]) -> tuple[float, str]:
    """Return the largest absolute value of this rank's weights, and the name of its parameter."""
    weights = [(weight, name) for chunk in chunks for name, weight in chunk.module.named_parameters()]
    return max(((weight.detach().abs().max().item(), name) for weight, name in weights), default=(0.0, ""))
