"""What stands for every kernel."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

_computing = False


def compute() -> None:
    """Let kernels compute on the CPU, from now on in this process."""
    global _computing
    _computing = True


def kernel(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("a kernel of TransformerEngine was called on a CPU")


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel of a function that computes its result in plain torch."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _computing else kernel)(*args, **kwargs)

    return call


def _gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total


COLLECTIVES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "gather": (_gather, "scatter"),
    "scatter": (lambda x, group: _reduce(x, group).chunk(group.size())[group.rank()], "gather"),
    "reduce": (_reduce, "same"),
    "same": (lambda x, group: x, "reduce"),
}
"""Collectives by name, each with that of its backward pass. `scatter` sums the ranks' rows and keeps one part."""


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, name: str) -> torch.Tensor:
        ctx.group, ctx.backward_name = group, COLLECTIVES[name][1]
        return COLLECTIVES[name][0](x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return COLLECTIVES[ctx.backward_name][0](gradients[0], ctx.group), None, None


def communicate(x: torch.Tensor, group: Any, name: str) -> torch.Tensor:
    """Return the result of a collective of COLLECTIVES over rows [T, ...]; a single rank keeps its rows."""
    return x if group is None or group.size() == 1 else _Collective.apply(x, group, name)


def row_positions(cu_seqlens: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    """Return, for each sequence of a packed row, the positions in it of the tokens of a context-parallel rank. Each
    sequence is cut into 2 x size chunks; a rank has the one with its number and the one with that number from the end
    (thd_get_partitioned_indices)."""
    parts = []
    for length in cu_seqlens.diff().tolist():
        assert length % (2 * size) == 0 or size == 1, "context parallelism needs lengths that 2 x size divides"
        chunks = torch.arange(length).split(max(length // (2 * size), 1) if size > 1 else max(length, 1))
        parts.append(torch.cat([chunks[rank], chunks[-1 - rank]]) if size > 1 and length else torch.arange(length))
    return parts
