"""The policy against transformers in float32: every family, on every layout, packed rows of uneven lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.policy_cases import LAYOUTS, LENGTHS, LayoutCase, advantages, sequences
from tests.distributed.ranks import RankPool
from tests.distributed.tiny_models import make_tiny_model

FAMILIES = {
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, dict]:
    """(folder, log-probs by sequence, gradients by Hugging Face name), the latter two from transformers."""
    from transformers import AutoModelForCausalLM

    family, overrides = FAMILIES[request.param]
    folder = make_tiny_model(family, tmp_path_factory.mktemp(request.param), **overrides)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs, loss = {}, torch.zeros(())
    for i, (tokens, advantage) in enumerate(zip(sequences(), advantages(), strict=True)):
        scores = torch.log_softmax(network(tokens[None]).logits[0, :-1], -1)
        chosen = scores.gather(1, tokens[1:, None]).squeeze(1)
        logprobs[i] = torch.cat([torch.zeros(1), chosen.detach()])
        loss = loss - advantage * chosen.sum() / (sum(LENGTHS) - len(LENGTHS))
    loss.backward()
    return folder, logprobs, {name: p.grad for name, p in network.named_parameters()}


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_logprobs_and_gradients_equal_transformers(ranks: RankPool, model: tuple, case: LayoutCase) -> None:
    folder, logprobs, gradients = model
    results = ranks.run(case.world_size, "tests.distributed.policy_cases:logprobs_and_gradients", str(folder), case)

    found: dict[int, torch.Tensor] = {}
    for result in results:
        found |= result["logprobs"]
    assert sorted(found) == sorted(logprobs)
    for i, expected in logprobs.items():
        torch.testing.assert_close(found[i], expected, atol=1e-4, rtol=0)

    moved = {name: torch.full_like(gradient, torch.nan) for name, gradient in gradients.items()}
    for result in results:
        for name, box, part in result["gradients"]:
            moved[name][tuple(slice(*span) for span in box)] = part
    for name, expected in gradients.items():
        assert not moved[name].isnan().any(), f"no rank owns all of {name}"
        error = (moved[name] - expected).norm() / expected.norm()
        assert error < 1e-3, f"{name}: relative error {error:.2e}"
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for result in results:
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-4), "what clipping goes by"
