"""Results do not depend on the layout of samples: micro-batches, ranks, packing, order, padding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

import pytest

from grpo_mcore.objective import ClippedPGLossConfig

from .cases import CONFIGS
from .harness import Result, assert_same, expected, run
from .samples import Layout, Sample, draw, packed, padded

COUNT = 64
NAMES = ("grpo", "dr. grpo, everything", "gspo, product, tis by age", "seq-mask-tis by age", "cispo")
WHOLE = list(range(COUNT))
Ranks = list[list[list[int]]]


def cut(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def uneven(numbers: list[int], rng: Random) -> list[list[int]]:
    """Return parts of any size, like bins of different lengths."""
    edges = sorted(rng.sample(range(1, len(numbers)), min(6, len(numbers) - 1)))
    return [numbers[a:b] for a, b in zip([0, *edges], [*edges, len(numbers)], strict=True)]


def layouts(name: str) -> Iterator[tuple[str, Layout, Ranks]]:
    """Test each size of micro-batches with one of the settings, and the other layouts with all of them."""
    rng = Random(3)
    order = rng.sample(WHOLE, COUNT)
    yield "packed", packed, [[WHOLE]]
    yield "packed in another order", packed, [[order]]
    yield "packed, with padding", partial(packed, padding=11), [[WHOLE]]
    yield "padded further", partial(padded, extra=13), [[WHOLE]]
    for size in range(1 + NAMES.index(name), COUNT, len(NAMES)):
        yield f"micro-batches of {size}, padded", padded, [cut(WHOLE, size)]
    for size in (1, 2, 3, 7, 16, 33):
        yield f"micro-batches of {size}, packed", partial(packed, padding=size % 3), [cut(order, size)]
    for world in (2, 4):
        shares = [order[rank::world] for rank in range(world)]
        yield f"{world} ranks, one row each", packed, [[share] for share in shares]
        yield f"{world} ranks, micro-batches of 5", padded, [cut(share, 5) for share in shares]
        yield f"{world} ranks, uneven bins", partial(packed, padding=4), [uneven(share, rng) for share in shares]
    lopsided = [order[:1], order[1:4], order[4:60], order[60:]]
    yield "4 ranks, uneven shares", packed, [uneven(share, rng) for share in lopsided]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Return 64 samples of 1 to 24 tokens, some masked, one without a trained token."""
    drawn = draw(seed=7, count=COUNT, longest=24)
    drawn[20].columns["token_mask"].zero_()
    assert any(not s.sample_mask for s in drawn) and min(len(s.curr) for s in drawn) == 1
    return drawn


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "grpo")]
)
def test_the_layout_has_no_influence(name: str, samples: list[Sample]) -> None:
    cfg = ClippedPGLossConfig(**CONFIGS[name])
    whole = run(cfg, samples, padded)
    assert_same(whole, expected(cfg, samples))
    assert {"sequence_mult_prob_error_p95", "probs_ratio_max", "gen_kl_error/age_2"} <= set(whole.metrics)
    for what, layout, ranks in layouts(name):
        again: Result = run(cfg, samples, layout, ranks)
        assert sorted(i for parts in ranks for part in parts for i in part) == WHOLE, what
        assert_same(again, whole, gradient=1e-6)
