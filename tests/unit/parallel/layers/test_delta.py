"""The delta rule of policy and CPU engine against its recurrence in float64, over a packed row."""

import torch
from torch import Tensor

from grpo_mcore.generation.cpu_kernels import gated_delta_net
from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from grpo_mcore.parallel.layers.delta import delta_rule, unit  # noqa: E402
from grpo_mcore.parallel.layers.packed_row import chunks_of  # noqa: E402
from tests.unit.parallel.layers.delta_cases import HEADS, KEYS, LENGTHS, D, E, recurrence  # noqa: E402


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, *size, generator=generator) for size in ((KEYS, D), (KEYS, D), (HEADS, E)))
    return [
        unit(q) * D**-0.5,
        unit(k),
        v,
        -torch.rand(total, HEADS, generator=generator),
        torch.rand(total, HEADS, generator=generator),
    ]


def test_chunks_of_a_packed_row_equal_the_recurrence_forward_and_backward() -> None:
    ours = [x.requires_grad_() for x in inputs()]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    out = delta_rule(*ours, chunks_of(LENGTHS, 4, ours[0].device), 4)
    expected = torch.cat([recurrence(*(x[a:b] for x in theirs)) for a, b in zip(ends, ends[1:], strict=False)])
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(out.shape)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_an_engine_continues_a_sequence_from_its_state() -> None:
    """With a convolution that passes its last input on: prompts of all sequences, then one token of each."""
    torch.manual_seed(0)
    total, channels = sum(LENGTHS), 2 * KEYS * D + HEADS * E
    x, decay, strength = torch.randn(total, channels), torch.rand(total, HEADS), torch.rand(total, HEADS)
    weight = torch.zeros(channels, 4)
    weight[:, -1] = 1.0
    q, k, v = torch.nn.functional.silu(x).split([KEYS * D, KEYS * D, HEADS * E], -1)
    parts = unit(q.unflatten(-1, (KEYS, D))) * D**-0.5, unit(k.unflatten(-1, (KEYS, D))), v.unflatten(-1, (HEADS, E))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    spans = list(zip(ends.tolist(), ends.tolist()[1:], strict=False))
    expected = torch.cat([recurrence(*(y[a:b] for y in (*parts, decay.log(), strength))) for a, b in spans])
    window, state = torch.zeros(len(LENGTHS), channels, 3), torch.zeros(len(LENGTHS), HEADS, E, D)
    for rows in ([row for a, b in spans for row in range(a, b - 1)], [b - 1 for _, b in spans]):
        counts = [sum(a <= row < b for row in rows) for a, b in spans]
        starts = torch.tensor([0, *counts]).cumsum(0)
        found = gated_delta_net(x[rows], decay[rows], strength[rows], weight, window, state, starts)
        torch.testing.assert_close(found.double(), expected[rows], atol=1e-5, rtol=1e-4)
