"""Preference losses against formulas in plain Python, in padded and packed rows, whole and in micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_mcore.batching.packed_batch import pack_rows
from grpo_mcore.objective import PreferenceLossFn, RewardLossFn, combine_metrics
from grpo_mcore.recipe import DPOConfig

LENGTHS, PROMPT = (9, 6, 5, 12, 7, 7), 3
PAIRS = len(LENGTHS) // 2
SETTINGS: list[dict[str, Any]] = [
    {},
    {"reference_policy_kl_penalty": 0.7, "preference_average_log_probs": True},
    {"preference_loss": "ipo", "reference_policy_kl_penalty": 0.2},
    {"preference_loss": "simpo", "reference_policy_kl_penalty": 2.0, "simpo_margin": 0.6},
    {"preference_loss_weight": 0.5, "sft_loss_weight": 2.0},
    {"sft_loss_weight": 0.1, "sft_average_log_probs": True},
]


def answers() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the log-probs of each sequence's tokens, float32, and the reference's sums, float64."""
    generator = torch.Generator().manual_seed(3)
    logprobs = [-5 * torch.rand(length, generator=generator) for length in LENGTHS]
    return logprobs, -10 * torch.rand(len(LENGTHS), generator=generator, dtype=torch.float64)


def by_formula(cfg: dict[str, Any]) -> dict[str, float]:
    """Return loss and metrics as the papers write them, in Python's floats."""
    logprobs, reference = answers()
    beta, kind = cfg.get("reference_policy_kl_penalty", 0.05), cfg.get("preference_loss", "dpo")
    average = cfg.get("preference_average_log_probs", False) or kind == "simpo"
    found = dict.fromkeys(("loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean"), 0.0)
    for pair in range(PAIRS):
        rewards, sft = [], 0.0
        for side in (1, 0):
            sample = 2 * pair + side
            values = [float(value) for value in logprobs[sample][PROMPT:]]
            total = math.fsum(values)
            sft = -total / (len(values) if cfg.get("sft_average_log_probs") else 1)
            ratio = total - (0.0 if kind == "simpo" else float(reference[sample]))
            rewards.insert(0, beta * ratio / (len(values) if average else 1))
        gap = rewards[0] - rewards[1]
        loss = {
            "dpo": math.log1p(math.exp(-gap)),
            "ipo": (gap / beta - 1 / (2 * beta)) ** 2,
            "simpo": math.log1p(math.exp(-(gap - cfg.get("simpo_margin", 0.0)))),
        }[kind]
        loss = cfg.get("preference_loss_weight", 1.0) * loss + cfg.get("sft_loss_weight", 0.0) * sft
        found["loss"] += loss / PAIRS
        found["accuracy"] += (gap > 0) / PAIRS
        found["rewards_chosen_mean"] += rewards[0] / PAIRS
        found["rewards_rejected_mean"] += rewards[1] / PAIRS
    return found


def computed(
    cfg: dict[str, Any], rows: list[list[int]], multiple: int = 1
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the metrics, and the gradient of each sequence's log-probs. `rows`: pairs of each micro-batch."""
    defaults = {"sft_average_log_probs": cfg.get("preference_average_log_probs", False)}
    loss_fn, (logprobs, reference) = PreferenceLossFn(DPOConfig.model_validate(defaults | cfg)), answers()
    parts, gradients = [], {}
    for pairs in rows:
        samples = [sample for pair in pairs for sample in (2 * pair, 2 * pair + 1)]
        columns = [
            {
                "token_mask": (torch.arange(LENGTHS[i]) >= PROMPT).float(),
                "sample_mask": torch.tensor(1.0),
                "reference_sums": reference[i],
                "values": logprobs[i],
            }
            for i in samples
        ]
        batch = pack_rows([torch.ones(LENGTHS[i], dtype=torch.int64) for i in samples], columns, multiple)
        values = batch.columns.pop("values").requires_grad_()
        loss, metrics = loss_fn(values, batch.loss_inputs(), PAIRS, 1)
        loss.backward()
        parts.append(metrics)
        assert values.grad is not None
        gradients |= dict(zip(samples, batch.split(values.grad), strict=True))
    return combine_metrics(parts), [gradients[i] for i in range(len(LENGTHS))]


@pytest.mark.parametrize("cfg", SETTINGS, ids=lambda cfg: "-".join(map(str, cfg.values())) or "default")
@pytest.mark.parametrize(("rows", "multiple"), [([[0, 1, 2]], 1), ([[2, 0], [1]], 16), ([[0], [1], [2]], 4)])
def test_equals_the_formula(cfg: dict[str, Any], rows: list[list[int]], multiple: int) -> None:
    metrics, gradients = computed(cfg, rows, multiple)
    expected = by_formula(cfg)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    margin = expected["rewards_chosen_mean"] - expected["rewards_rejected_mean"]
    assert metrics["rewards_margin_mean"] == pytest.approx(margin, abs=1e-6)
    assert (metrics["num_valid_samples"], metrics["num_valid_tokens"]) == (PAIRS, sum(LENGTHS) - 6 * PROMPT)
    _, whole = computed(cfg, [[0, 1, 2]])
    for found, other in zip(gradients, whole, strict=True):
        assert not found[:PROMPT].any(), "nothing of the prompt is trained"
        assert torch.allclose(found, other, rtol=0, atol=1e-7)


def test_a_chosen_answer_gets_likelier_and_a_rejected_one_less() -> None:
    _, gradients = computed({}, [[0, 1, 2]])
    for sample, gradient in enumerate(gradients):
        assert ((gradient[PROMPT:] > 0) if sample % 2 else (gradient[PROMPT:] < 0)).all()


@pytest.mark.parametrize("rows", [[[0, 1, 2]], [[2, 0], [1]]])
@pytest.mark.parametrize("pairs", [True, False])
def test_rewards_equal_the_formula(pairs: bool, rows: list[list[int]]) -> None:
    """The value of the only trained token, the last one, is a sample's reward."""
    values, labels = answers()
    loss_fn, parts = RewardLossFn(pairs=pairs), []
    for row in rows:
        samples = [sample for pair in row for sample in (2 * pair, 2 * pair + 1)]
        columns = [
            {"token_mask": (torch.arange(LENGTHS[i]) == LENGTHS[i] - 1).float(), "sample_mask": torch.tensor(1.0)}
            | {"rewards": labels[i] if not (pairs and i % 2) else torch.zeros(()), "values": values[i]}
            for i in samples
        ]
        batch = pack_rows([torch.ones(LENGTHS[i], dtype=torch.int64) for i in samples], columns, 16)
        read = batch.columns.pop("values").requires_grad_()
        loss, metrics = loss_fn(read, batch.loss_inputs(), PAIRS if pairs else 2 * PAIRS, 1)
        loss.backward()
        assert read.grad is not None and read.grad.count_nonzero() == len(samples)
        parts.append(metrics)
    rewards, wanted = [float(of_sample[-1]) for of_sample in values], labels.tolist()
    gaps = [rewards[i] - rewards[i + 1] for i in range(0, 2 * PAIRS, 2)]
    expected = {
        "loss": sum(math.log1p(math.exp(m - gap)) for gap, m in zip(gaps, wanted[::2], strict=True)) / PAIRS,
        "accuracy": sum(gap > 0 for gap in gaps) / PAIRS,
        "rewards_chosen_mean": sum(rewards[::2]) / PAIRS,
        "rewards_rejected_mean": sum(rewards[1::2]) / PAIRS,
        "rewards_margin_mean": sum(gaps) / PAIRS,
        "num_valid_samples": PAIRS,
    }
    errors = [reward - score for reward, score in zip(rewards, wanted, strict=True)]
    regression = {
        "loss": sum(error**2 / 2 for error in errors) / len(errors),
        "rewards_mean": sum(rewards) / len(rewards),
        "reward_error_mean": sum(map(abs, errors)) / len(errors),
        "num_valid_samples": 2 * PAIRS,
    }
    combined = combine_metrics(parts)
    for name, value in (expected if pairs else regression).items():
        assert combined[name] == pytest.approx(value, abs=1e-6), name


def test_padding_and_masked_pairs_count_nothing() -> None:
    loss_fn = PreferenceLossFn(DPOConfig.model_validate({"sft_average_log_probs": False}))
    row = {"token_mask": torch.ones(1, 4), "segments": torch.zeros(4, dtype=torch.int64), "num_segments": 0}
    row |= {"sample_mask": torch.zeros(1, 4), "reference_sums": torch.zeros(1, 4)}
    loss, metrics = loss_fn(torch.full((1, 4), -1.0, requires_grad=True), row, 2, 1)
    assert loss.item() == 0 and metrics["num_valid_samples"] == 0
    masked = {"token_mask": torch.ones(2, 4), "sample_mask": torch.zeros(2), "reference_sums": torch.zeros(2)}
    loss, metrics = loss_fn(torch.full((2, 4), -1.0), masked, 2, 1)
    assert loss.item() == 0 and metrics["accuracy"] == 0


@pytest.mark.parametrize(("samples", "drop", "message"), [(3, "", "no pairs"), (2, "reference_sums", "reference_sums")])
def test_bad_batches(samples: int, drop: str, message: str) -> None:
    loss_fn = PreferenceLossFn(DPOConfig.model_validate({"sft_average_log_probs": False}))
    batch = {"token_mask": torch.ones(samples, 4), "sample_mask": torch.ones(samples)}
    batch |= {"reference_sums": torch.zeros(samples)}
    batch.pop(drop, None)
    with pytest.raises(ValueError, match=message):
        loss_fn(torch.zeros(samples, 4), batch, 1, 1)
