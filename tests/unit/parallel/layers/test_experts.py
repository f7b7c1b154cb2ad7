"""Grouped matrix products against one product for each expert."""

import pytest
import torch
from torch import Tensor

from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from grpo_mcore.parallel.layers.experts import GroupedLinear  # noqa: E402


@pytest.mark.parametrize("counts", [(5, 0, 15, 17), (0, 0, 1, 0), (8, 8, 8, 8), (0, 0, 0, 0)], ids=str)
def test_grouped_products_equal_one_product_each(counts: tuple[int, ...]) -> None:
    """Values and gradients, with unaligned and empty groups."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(counts), 16, generator=generator).bfloat16().requires_grad_()
    weights = [torch.randn(24, 16, generator=generator).bfloat16().requires_grad_() for _ in counts]
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    found = GroupedLinear.apply(x, ends, *weights)
    exact = torch.cat([rows.double() @ w.double().t() for rows, w in zip(x.split(counts), weights, strict=True)])
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=2**-8)

    def gradients(y: Tensor) -> list[Tensor]:
        # The sum's gradient is expanded, which the kernel would refuse.
        return [g.double() for g in torch.autograd.grad(y.sum(), [x, *weights])]

    for ours, formula in zip(gradients(found), gradients(exact), strict=True):
        torch.testing.assert_close(ours, formula, atol=1e-6, rtol=2**-7)


def test_frozen_parts_get_no_gradient() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    weights = [torch.randn(8, 8, dtype=torch.bfloat16) for _ in range(2)]
    ends = torch.tensor([1, 4], dtype=torch.int32)
    frozen = GroupedLinear.apply(x.requires_grad_(), ends, *weights).sum()
    frozen.backward()
    assert x.grad is not None
    trained = [weight.requires_grad_() for weight in weights]
    GroupedLinear.apply(x.detach(), ends, *trained).sum().backward()
    assert all(weight.grad is not None for weight in trained)
