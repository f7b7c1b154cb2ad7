"""Checkpoints, exports, the reference, and what happens when a loss is not finite, on real meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.policy_cases import LayoutCase, sequences
from tests.distributed.ranks import RankFailed, RankPool
from tests.distributed.tiny_models import make_tiny_model

CASES = "tests.distributed.policy_state_cases"
TP1, TP2, TP2_PP2 = LayoutCase("TP1"), LayoutCase("TP2", tensor=2), LayoutCase("TP2xPP2", tensor=2, pipeline=2)
DP2 = LayoutCase("DP2", data=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("qwen3", tmp_path_factory.mktemp("model"), tie_word_embeddings=True))


@pytest.mark.parametrize("saved", [TP1, TP2, DP2], ids=lambda case: case.name)
@pytest.mark.parametrize("loaded", [TP1, TP2], ids=lambda case: case.name)
def test_a_loaded_checkpoint_goes_on_as_if_nothing_had_happened(
    ranks: RankPool, model: str, tmp_path: Path, saved: LayoutCase, loaded: LayoutCase
) -> None:
    through = ranks.run(saved.world_size, f"{CASES}:train_save_train", model, saved, str(tmp_path / "ckpt"))
    resumed = ranks.run(loaded.world_size, f"{CASES}:load_train", model, loaded, str(tmp_path / "ckpt"))
    exact = saved == loaded
    for before, after in zip(through[0], resumed[0], strict=True):
        assert after == (before if exact else pytest.approx(before, rel=1e-4)), (through[0], resumed[0])


def test_a_checkpoint_of_another_model_is_refused(ranks: RankPool, model: str, tmp_path: Path) -> None:
    ranks.run(1, f"{CASES}:train_save_train", model, TP1, str(tmp_path / "ckpt"))
    other = make_tiny_model("qwen3", tmp_path / "other", tie_word_embeddings=False)
    with pytest.raises(RankFailed, match="CheckpointError.*holds another model"):
        ranks.run(1, f"{CASES}:load_train", str(other), TP1, str(tmp_path / "ckpt"))


@pytest.mark.parametrize("case", [TP1, TP2_PP2], ids=lambda case: case.name)
def test_an_export_is_what_was_loaded_bit_for_bit(
    ranks: RankPool, model: str, tmp_path: Path, case: LayoutCase
) -> None:
    from safetensors.torch import load_file

    ranks.run(case.world_size, f"{CASES}:export", model, case, str(tmp_path / "out"))
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    expected = load_file(Path(model) / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_reference_stays_while_the_policy_moves(ranks: RankPool, model: str) -> None:
    for first, reference, now in ranks.run(2, f"{CASES}:reference_after_training", model, TP2):
        assert torch.equal(first, reference)
        assert (first - now).abs().max() > 1e-4


def test_bfloat16_is_near_transformers_in_float32(ranks: RankPool, model: str) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (found,) = ranks.run(1, f"{CASES}:bfloat16_logprobs", model, TP1)
    for i, tokens in enumerate(sequences()):
        with torch.no_grad():
            scores = torch.log_softmax(network(tokens[None]).logits[0, :-1], -1)
        expected = scores.gather(1, tokens[1:, None]).squeeze(1)
        assert (found[i][1:] - expected).abs().mean() < 0.03


@pytest.mark.parametrize("case", [TP1, TP2_PP2], ids=lambda case: case.name)
def test_a_loss_that_is_not_finite_names_the_sample_on_every_rank(
    ranks: RankPool, model: str, case: LayoutCase
) -> None:
    results = ranks.run(case.world_size, f"{CASES}:train_on_a_broken_sample", model, case)
    for message, weights_unchanged in results:
        assert "not finite; the cause: samples 4." in message
        assert weights_unchanged
