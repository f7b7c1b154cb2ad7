"""The policy against transformers in float32: every family, on every layout, packed rows of uneven lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.policy_cases import LAYOUTS, LENGTHS, MOE_LAYOUTS, LayoutCase, advantages, sequences
from tests.distributed.ranks import RankPool
from tests.distributed.tiny_models import checkpoint_gradients, make_tiny_model

DENSE = {
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
}
MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"tie_word_embeddings": False},
    "mixtral": {"tie_word_embeddings": True},
    "deepseek_v3": {"tie_word_embeddings": False},
}
HYBRID: dict[str, dict[str, Any]] = {"nemotron_h": {}, "nemotron_h_moe": {}}
FAMILIES = DENSE | MOE | HYBRID
LIKE_ANOTHER = ("qwen2", "llama", "mixtral", "nemotron_h")
FEW = ("TP1", "TP2", "TP2-SP", "PP2", "CP2", "TP2xPP2", "PP2xCP2", "ETP2", "EP2xPP2")


def layouts_of(family: str) -> tuple[LayoutCase, ...]:
    """All that the family allows; of families that differ from another one in little, one for each dimension."""
    layouts = MOE_LAYOUTS if family in MOE or family == "nemotron_h_moe" else LAYOUTS
    allowed = tuple(case for case in layouts if family not in HYBRID or case.tensor == 1)
    return tuple(case for case in allowed if case.name in FEW) if family in LIKE_ANOTHER else allowed


def reference(family: str, folder: Path) -> tuple[Path, dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """(folder, log-probs by sequence, gradients by name in the checkpoint), the latter two from transformers."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(family, folder, **FAMILIES[family])
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs, loss = {}, torch.zeros(())
    for i, (tokens, advantage) in enumerate(zip(sequences(), advantages(), strict=True)):
        scores = torch.log_softmax(network(tokens[None]).logits[0, :-1], -1)
        chosen = scores.gather(1, tokens[1:, None]).squeeze(1)
        logprobs[i] = torch.cat([torch.zeros(1), chosen.detach()])
        loss = loss - advantage * chosen.sum() / (sum(LENGTHS) - len(LENGTHS))
    loss.backward()
    return folder, logprobs, checkpoint_gradients(family, network)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {}


def differences(
    results: list[dict[str, Any]], logprobs: dict[int, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> tuple[float, tuple[float, str], dict[str, float], list[float]]:
    """Largest log-prob difference, (largest relative gradient error, its name), all errors, gradient norms over the
    reference's."""
    found: dict[int, torch.Tensor] = {}
    for result in results:
        found |= result["logprobs"]
    assert sorted(found) == sorted(logprobs)
    worst_logprob = max((found[i] - expected).abs().max().item() for i, expected in logprobs.items())
    moved = {name: torch.full_like(gradient, torch.nan) for name, gradient in gradients.items()}
    for result in results:
        for name, box, part in result["gradients"]:
            if name not in moved:  # a buffer
                assert not part.any(), f"{name} moved"
                continue
            there = moved[name][tuple(slice(*span) for span in box)]
            assert there.isnan().all(), f"two ranks own {name} {box}"
            there.copy_(part)
    errors = {}
    for name, expected in gradients.items():
        assert not moved[name].isnan().any(), f"no rank owns all of {name}"
        errors[name] = ((moved[name] - expected).norm() / expected.norm().clamp(min=1e-12)).item()
    worst = max(errors, key=errors.__getitem__)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    return worst_logprob, (errors[worst], worst), errors, [result["grad_norm"] / norm for result in results]


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family in FAMILIES for case in layouts_of(family)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_logprobs_and_gradients_equal_transformers(
    ranks: RankPool, references: dict, tmp_path_factory: pytest.TempPathFactory, family: str, case: LayoutCase
) -> None:
    if family not in references:
        references[family] = reference(family, tmp_path_factory.mktemp(family))
    folder, logprobs, gradients = references[family]
    results = ranks.run(case.world_size, "tests.distributed.policy_cases:logprobs_and_gradients", str(folder), case)
    logprob, (gradient, name), _, norms = differences(results, logprobs, gradients)
    assert logprob < 1e-4
    assert gradient < 1e-3, f"{name}: relative error {gradient:.2e}"
    assert norms == pytest.approx([1.0] * len(norms), rel=1e-4), "what clipping goes by"
