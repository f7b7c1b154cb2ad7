"""Sequences of a packed row do not influence each other: bit for bit in dense models, and no gradient crosses a
boundary in any."""

from pathlib import Path

import pytest
import torch

from grpo_mcore.tools.demo.tiny_models import FAMILIES as TINY
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.boundary_cases import CHANGED

FAMILIES = ("qwen3", "qwen3_moe", "nemotron_h", "qwen3_5_text", "gemma3_text", "gpt_oss")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("context", [1, 2])
def test_another_sequence_changes_nothing(ranks: RankPool, models: dict[str, Path], family: str, context: int) -> None:
    case = LayoutCase(f"CP{context}", context=context)
    target = "tests.distributed.boundary_cases:score_and_differentiate"
    before, after = (ranks.run(case.world_size, target, str(models[family]), case, change) for change in (False, True))
    # An expert multiplies the tokens of all sequences at once: their number changes the order of summation, and with it
    # the last bit.
    tolerance = 1e-6 if family in ("qwen3_moe", "gpt_oss") else 0.0
    for one, other in zip(before, after, strict=True):
        for i, (was, now) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            if i == CHANGED:
                assert (was - now).abs().max() > 0.1
            else:
                torch.testing.assert_close(was, now, atol=tolerance, rtol=0)
        assert sum(gradient.abs().sum() for gradient in before[0]["gradients"]) > 1.0
        for was, now in zip(one["gradients"], other["gradients"], strict=True):
            torch.testing.assert_close(was, now, atol=10 * tolerance, rtol=0)


@pytest.mark.parametrize("family", TINY)
def test_no_gradient_crosses_a_boundary(ranks: RankPool, tmp_path: Path, family: str) -> None:
    model = make_tiny_model(family, tmp_path / "model")
    (found,) = ranks.run(1, "tests.distributed.boundary_cases:gradients_of_embeddings", str(model))
    for i, gradient in enumerate(found):
        assert (gradient.abs().max() == 0) if i == CHANGED else (gradient.abs().max() > 1e-3)
