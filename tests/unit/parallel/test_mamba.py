"""The chunked scan against the recurrence that it computes."""

from __future__ import annotations

import pytest
import torch

from grpo_mcore.parallel import cpu_platform

cpu_platform.install()

from grpo_mcore.parallel.mamba import scan  # noqa: E402


@pytest.mark.parametrize("length", [1, 7, 8, 30])
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_the_scan_equals_the_recurrence(length: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x, b, c = (torch.randn(length, 3, n, generator=generator) for n in (4, 5, 5))
    dt, decay = torch.rand(length, 3, generator=generator), -torch.rand(3, generator=generator) * 3
    state, expected = torch.zeros(3, 4, 5, dtype=torch.float64), []
    for t in range(length):
        kept = torch.exp(dt[t].double() * decay)[:, None, None]
        state = kept * state + torch.einsum("hp,hn->hpn", dt[t, :, None].double() * x[t], b[t].double())
        expected.append(torch.einsum("hpn,hn->hp", state, c[t].double()))
    found = scan(x, dt, decay, b, c, chunk)
    torch.testing.assert_close(found.double(), torch.stack(expected), atol=1e-5, rtol=1e-5)
