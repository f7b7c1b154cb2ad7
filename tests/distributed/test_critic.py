"""A step with a critic on every layout against one rank: values, advantages, gradients of both models, checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.objective import combine_metrics
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool

STEP = "tests.distributed.critic_cases:step"
ADAPTERS = "TP2 with adapters"
LAYOUTS = [
    ("qwen3", LayoutCase("TP2", tensor=2)),
    ("qwen3", LayoutCase(ADAPTERS, tensor=2)),
    ("qwen3", LayoutCase("TP2-SPxDP2", tensor=2, data=2, sequence_parallel=True)),
    ("qwen3", LayoutCase("PP2", pipeline=2)),
    ("qwen3", LayoutCase("CP2", context=2)),
    ("qwen3_moe", LayoutCase("EP2", data=2, expert=2)),
]


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return folders and the step of one rank by family, and that with adapters."""
    found: dict[str, Any] = {}
    for family in {family for family, _ in LAYOUTS}:
        folder = tmp_path_factory.mktemp(family)
        policy = make_tiny_model(family, folder / "policy", seed=1, tie_word_embeddings=True)
        critic = make_tiny_model(family, folder / "critic", seed=2, value=True)
        case = LayoutCase("TP1")
        (result,) = ranks.run(1, STEP, str(policy), str(critic), case, str(folder / "saved"))
        found[family] = policy, critic, result
    policy, critic, _ = found["qwen3"]
    (result,) = ranks.run(
        1, STEP, str(policy), str(critic), LayoutCase("TP1"), str(policy.parent / "saved-adapters"), True
    )
    return found | {ADAPTERS: (policy, critic, result)}


def whole(results: list[dict[str, Any]], model: int) -> dict[str, torch.Tensor]:
    """Return the change of every tensor, put together from the ranks' slices."""
    pieces = [piece for result in results for piece in result["moved"][model]]
    sizes: dict[str, list[int]] = {}
    for name, box, _ in pieces:
        sizes[name] = [max(stop, size) for (_, stop), size in zip(box, sizes.get(name, [0] * len(box)), strict=True)]
    tensors = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for name, box, part in pieces:
        slot = tensors[name][tuple(slice(*span) for span in box)]
        assert slot.isnan().all(), f"two ranks own {name} {box}"
        slot.copy_(part)
    return tensors


@pytest.mark.parametrize(("family", "case"), LAYOUTS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_step_with_a_critic_is_that_of_one_rank(
    ranks: RankPool, alone: dict[str, Any], tmp_path: Path, family: str, case: LayoutCase
) -> None:
    policy, critic, expected = alone.get(case.name, alone[family])
    with_adapters = case.name == ADAPTERS
    results = ranks.run(case.world_size, STEP, str(policy), str(critic), case, str(tmp_path / "saved"), with_adapters)
    for result in results:
        for name, values in expected["stats"].items():
            assert torch.allclose(result["stats"][name], values, rtol=1e-4, atol=1e-5), name
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert result["same"], "what was loaded is not what was saved"
    for model in (0, 1):
        found, alike = whole(results, model), whole([expected], model)
        assert found.keys() == alike.keys()
        largest = max(gradient.norm().item() for gradient in alike.values())
        for name, gradient in alike.items():
            error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-3 * largest)
            assert error < 1e-4, f"{name}: {error}"
    for model in ("critic", "policy"):
        combined = combine_metrics([result["metrics"][model] for result in results if result["metrics"]])
        for name, value in expected["metrics"][model].items():
            found, wanted = (sorted(of) if isinstance(of, list) else of for of in (combined[name], value))
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), name
    assert {"metadata.json", ".metadata"} <= set(results[0]["files"])


def test_one_rank_alone_learns_a_value_from_a_head_that_is_not_0(alone: dict[str, Any]) -> None:
    _, _, result = alone["qwen3"]
    assert result["same"]
    assert result["metrics"]["critic"]["values_max"] > result["metrics"]["critic"]["values_min"]
    moved = whole([result], 1)
    assert moved["score.weight"].norm() > 0 and moved["model.layers.0.mlp.down_proj.weight"].norm() > 0


def test_a_critic_with_adapters_trains_these_and_its_head_alone(alone: dict[str, Any]) -> None:
    _, _, result = alone[ADAPTERS]
    moved = whole([result], 1)
    assert moved["score.weight"].norm() > 0 and moved["model.layers.0.mlp.down_proj.weight"].norm() > 0
    assert not moved["model.embed_tokens.weight"].any() and not moved["model.norm.weight"].any()
    full = whole([alone["qwen3"][2]], 1)
    assert torch.allclose(moved["score.weight"], full["score.weight"], rtol=1e-4, atol=1e-6)
