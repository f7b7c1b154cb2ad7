"""With policy.deterministic the bits of log-probs, norms and weights do not depend on micro-batches, nor on whether one
data-parallel rank trains or two."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool

TRAIN = "tests.distributed.deterministic_cases:train"
ONE, TWO = LayoutCase("TP1"), LayoutCase("DP2", data=2)


def merged(results: list[dict[str, Any]]) -> list[dict[int, torch.Tensor]]:
    """Return the log-probs of all samples, by step."""
    steps = zip(*(result["logprobs"] for result in results), strict=True)
    return [{i: row for part in parts for i, row in part.items()} for parts in steps]


def same_bits(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3", marks=pytest.mark.every_state)])
def test_one_rank_and_two_give_the_same_bits(ranks: RankPool, tmp_path: Path, family: str) -> None:
    model = str(make_tiny_model(family, tmp_path))
    fixed, packed = {"deterministic": True}, {"deterministic": False, "capacity": 64}
    one, two, usual = (
        ranks.run(case.world_size, TRAIN, model, case, how) for case, how in ((ONE, fixed), (TWO, fixed), (ONE, packed))
    )
    assert two[0]["norms"] == one[0]["norms"]
    assert all(map(same_bits, merged(two), merged(one)))
    assert all(same_bits(result["weights"], one[0]["weights"]) for result in two)
    # It is the usual training, up to rounding, whose bits depend on the bins.
    assert usual[0]["norms"] == pytest.approx(one[0]["norms"], rel=1e-4)
    for name, weight in one[0]["weights"].items():
        torch.testing.assert_close(usual[0]["weights"][name], weight, rtol=1e-3, atol=1e-5)
    assert min(one[0]["norms"]) > 0.05  # clipped
    assert not same_bits(usual[0]["weights"], one[0]["weights"])
