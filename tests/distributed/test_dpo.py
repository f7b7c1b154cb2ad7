"""Preference and reward training on every layout, against transformers and formulas in float64 and against TRL."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.objective import combine_metrics
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.parity import GRADIENT_LIMIT, LOGPROB_LIMIT, Reference, compare
from grpo_mcore.tools.parity.rank import LENGTHS, LayoutCase, sequences
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.dpo_cases import LABELS, PAIRS, REFERENCE, prompt_tokens
from tests.distributed.trl_dpo import RECORD, write_model

BETA = 0.1
DPO = {"reference_policy_kl_penalty": BETA}
WITH_SFT = DPO | {"sft_loss_weight": 0.3, "sft_average_log_probs": True, "preference_loss_weight": 0.7}
IPO = DPO | {"preference_loss": "ipo", "preference_average_log_probs": True}
SIMPO = {"preference_loss": "simpo", "reference_policy_kl_penalty": 2.0, "simpo_margin": 0.8}
CASES = [
    ("qwen3", LayoutCase("TP1"), DPO),
    ("qwen3", LayoutCase("TP1"), IPO),
    ("qwen3", LayoutCase("TP1"), SIMPO),
    ("qwen3", LayoutCase("TP2", tensor=2), WITH_SFT),
    ("qwen3", LayoutCase("PP2", pipeline=2), WITH_SFT),
    ("qwen3", LayoutCase("CP2", context=2), WITH_SFT),
    ("qwen3", LayoutCase("DP2", data=2), WITH_SFT),
    ("qwen3_moe", LayoutCase("EP2", data=2, expert=2), WITH_SFT),
]
TARGET = "tests.distributed.dpo_cases:loss_and_gradients"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_tiny_model(family, tmp_path_factory.mktemp(family), tie_word_embeddings=False)
        for family in ("qwen3", "qwen3_moe")
    }


def by_transformers(folder: Path, dpo: dict[str, Any]) -> tuple[Reference, float]:
    """Return the log-probs and gradients of transformers, and the loss as the papers write it, in float64."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    dtype = torch.float32 if "moe" in kind else torch.float64  # torch has no grouped product in float64
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    logprobs: dict[int, Tensor] = {}
    sums, means, counts = [], [], []
    for i, tokens in enumerate(sequences(network.config.vocab_size)):
        scores = torch.log_softmax(network(tokens[None]).logits[0, :-1].double(), -1)
        scores = scores.gather(1, tokens[1:, None]).squeeze(1)
        answer = torch.cat([torch.zeros(1), scores])[max(1, prompt_tokens(i)) :]
        logprobs[i] = torch.zeros(LENGTHS[i])
        logprobs[i][LENGTHS[i] - len(answer) :] = answer.detach().float()
        sums.append(answer.sum())
        means.append(answer.mean())
        counts.append(len(answer))
    total = torch.zeros((), dtype=torch.float64)
    for chosen in range(0, len(LENGTHS), 2):
        rejected, beta = chosen + 1, dpo["reference_policy_kl_penalty"]
        kind = dpo.get("preference_loss", "dpo")
        ratios = [sums[i] - REFERENCE[i] for i in (chosen, rejected)]
        if kind == "simpo":
            gap = beta * (means[chosen] - means[rejected]) - dpo["simpo_margin"]
            loss = torch.log1p(torch.exp(-gap))
        elif kind == "ipo":
            gap = ratios[0] / counts[chosen] - ratios[1] / counts[rejected]
            loss = (gap - 1 / (2 * beta)) ** 2
        else:
            gap = ratios[0] - ratios[1]
            loss = torch.log1p(torch.exp(-beta * gap))
        total = total + dpo.get("preference_loss_weight", 1.0) * loss - dpo.get("sft_loss_weight", 0.0) * means[chosen]
    total = total / PAIRS
    total.backward()
    gradients = revert_weight_conversion(network, {name: p.grad for name, p in network.named_parameters()})
    return Reference(folder, "", network, logprobs, {n: g.float() for n, g in gradients.items()}), total.item()


def assert_close(reference: Reference, results: list[Any], case: LayoutCase) -> None:
    found = compare(reference, results, case.name, packed=True)
    assert max(found.logprobs.values()) < LOGPROB_LIMIT
    gradient, name = max(found.by_layer().values())
    assert gradient < GRADIENT_LIMIT, f"{name}: relative error {gradient:.2e}"


@pytest.mark.parametrize(("family", "case", "dpo"), CASES, ids=[f"{f}-{c.name}-{len(d)}" for f, c, d in CASES])
def test_loss_and_gradients(
    ranks: RankPool, models: dict[str, Path], family: str, case: LayoutCase, dpo: dict[str, Any]
) -> None:
    reference, loss = by_transformers(models[family], dpo)
    results = ranks.run(case.world_size, TARGET, str(models[family]), case, dpo)
    metrics = combine_metrics([result["metrics"] for result in results])
    assert metrics["num_valid_samples"] == PAIRS
    assert metrics["loss"] == pytest.approx(loss, abs=2e-5), "float32 log-probs of up to 30 tokens"
    assert_close(reference, results, case)


def rewards_by_transformers(folder: Path, pairs: bool) -> tuple[Reference, float]:
    """Return the values and gradients of transformers, and the loss of a reward model, in float64."""
    from transformers import AutoModelForSequenceClassification

    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    states = [network.model(tokens[None]).last_hidden_state for tokens in sequences(network.config.vocab_size)]
    rewards = torch.cat([network.score(of_sample)[0, -2] for of_sample in states])
    labels = torch.tensor(LABELS)
    if pairs:
        loss = torch.log1p(torch.exp(labels[::2] - rewards[::2] + rewards[1::2])).mean()
    else:
        loss = 0.5 * (rewards - labels).square().mean()
    loss.backward()
    values = {i: torch.zeros(length) for i, length in enumerate(LENGTHS)}
    for i, of_sample in enumerate(rewards.detach().float()):
        values[i][-1] = of_sample
    gradients = {name: parameter.grad.float() for name, parameter in network.named_parameters()}
    return Reference(folder, "", network, values, gradients), loss.item()


@pytest.mark.parametrize(
    "case", [case for family, case, _ in CASES[3:] if family == "qwen3"], ids=lambda case: case.name
)
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "scores"])
def test_a_reward_model(ranks: RankPool, tmp_path: Path, case: LayoutCase, pairs: bool) -> None:
    model = make_tiny_model("qwen3", tmp_path, value=True)
    reference, loss = rewards_by_transformers(model, pairs)
    results = ranks.run(case.world_size, TARGET, str(model), case, None, pairs)
    assert combine_metrics([result["metrics"] for result in results])["loss"] == pytest.approx(loss, abs=2e-5)
    assert_close(reference, results, case)


def test_loss_and_rewards_equal_those_of_trl(ranks: RankPool, tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text())
    chosen, rejected = recorded["answers"][:4], recorded["answers"][4:]
    answers = [answer for pair in zip(chosen, rejected, strict=True) for answer in pair]
    folders = [str(write_model(tmp_path / name, phase)) for name, phase in (("policy", 0.0), ("reference", 0.4))]
    dpo = {"reference_policy_kl_penalty": recorded["beta"]}
    ipo = dpo | {"preference_loss": "ipo", "preference_average_log_probs": True}
    cases = "tests.distributed.dpo_cases"
    (sums,) = ranks.run(1, f"{cases}:sums_of_answers", folders[1], answers)
    ((by_dpo, by_ipo),) = ranks.run(1, f"{cases}:losses_of_answers", folders[0], answers, sums, [dpo, ipo])
    trl = recorded["losses"]["sigmoid"]
    for ours, name in (("rewards_chosen_mean", "chosen"), ("rewards_rejected_mean", "rejected")):
        assert by_dpo[ours] == pytest.approx(trl[f"rewards/{name}"], abs=1e-4)
    assert by_dpo["rewards_margin_mean"] == pytest.approx(trl["rewards/margins"], abs=1e-4)
    assert by_dpo["accuracy"] == trl["rewards/accuracies"]
    assert by_dpo["loss"] == pytest.approx(trl["loss"], abs=1e-4)
    assert by_ipo["loss"] == pytest.approx(recorded["losses"]["ipo"]["loss"], abs=1e-4)
