"""The loss over whole distributions on every layout, against transformers and formulas in float64; a teacher has
another size and layout than the policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.objective import combine_metrics
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.parity import GRADIENT_LIMIT, Reference, compare
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.distillation_cases import tokens_of, trained
from tests.distributed.policy_cases import FEW

CASES = "tests.distributed.distillation_cases"
MIXED = {"kl_type": "mixed", "mixed_kl_weight": 0.3}
TOP = {"kl_type": "reverse", "topk_logits_k": 7}
GAP = "on_policy_distillation/teacher_student_logprob_gap_mean"
LAYOUTS = [
    ("qwen3", LayoutCase("TP1"), MIXED, False),
    ("qwen3", LayoutCase("TP1"), MIXED, True),
    ("qwen3", LayoutCase("TP2", tensor=2), {"kl_type": "jsd", "jsd_beta": 0.3}, False),
    ("qwen3", LayoutCase("TP2-SP", tensor=2, sequence_parallel=True), TOP, False),
    ("qwen3", LayoutCase("PP2", pipeline=2), {"kl_type": "forward"}, False),
    ("qwen3", LayoutCase("CP2", context=2), {"kl_type": "reverse"}, False),
    ("qwen3", LayoutCase("DP2", data=2), MIXED, False),
    ("qwen3", LayoutCase("TP2xPP2", tensor=2, pipeline=2), MIXED | {"temperature": 1.5}, False),
    ("qwen3_moe", LayoutCase("EP2", data=2, expert=2), MIXED, False),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        family: make_tiny_model(family, tmp_path_factory.mktemp(family), seed=1, tie_word_embeddings=False)
        for family in ("qwen3", "qwen3_moe", "deepseek_v3", "nemotron_h")
    }
    folder = tmp_path_factory.mktemp("teacher")
    return made | {"teacher": make_tiny_model("qwen3", folder, seed=5, hidden_size=96, tie_word_embeddings=True)}


def states(ranks: RankPool, model: Path, case: LayoutCase, shared: bool) -> dict[int, Tensor]:
    parts = ranks.run(case.world_size, f"{CASES}:teacher_states", str(model), case, shared)
    return {index: part for of_rank in parts for index, part in of_rank.items()}


def exact(folder: Path) -> torch.dtype:
    """Return the number format of the reference: torch has no grouped product of experts in float64."""
    return torch.float32 if any(name in folder.name for name in ("moe", "deepseek")) else torch.float64


def by_transformers(folder: Path, teacher: Path, cfg: dict[str, Any], shared: bool) -> tuple[Reference, float, float]:
    """Return gradients of the loss with transformers, the loss and the mean gap of the sampled tokens, in float64."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    network, master = (AutoModelForCausalLM.from_pretrained(it, dtype=exact(it)) for it in (folder, teacher))
    losses, gaps, temperature = [], [], cfg.get("temperature", 1.0)
    for i, tokens in enumerate(tokens_of(network.config.vocab_size, shared)):
        if i == 2:
            continue
        at = trained(len(tokens)).bool()[1:]
        mine = network(tokens[None]).logits[0, :-1][at].double() / temperature
        with torch.no_grad():
            theirs = master(tokens[None]).logits[0, :-1][at] / temperature
        sampled = [scores.log_softmax(-1).gather(1, tokens[1:][at][:, None])[:, 0] for scores in (mine, theirs)]
        gaps.append((sampled[1] - sampled[0]).detach())
        if (k := cfg.get("topk_logits_k")) is not None:
            theirs, kept = theirs.topk(k, -1)
            mine = mine.gather(1, kept)
        p, q = mine.log_softmax(-1), theirs.log_softmax(-1)
        forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
        share = {"forward": 1.0, "reverse": 0.0, "mixed": cfg.get("mixed_kl_weight"), "jsd": None}[cfg["kl_type"]]
        if share is not None:
            losses.append(share * forward + (1 - share) * reverse)
        else:
            beta = cfg["jsd_beta"]
            m = (beta * q.exp() + (1 - beta) * p.exp()).log()
            losses.append(beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1))
    total = torch.cat(losses).mean()
    total.backward()
    gradients = revert_weight_conversion(network, {name: p.grad for name, p in network.named_parameters()})
    reference = Reference(folder, "", network, {}, {name: gradient.float() for name, gradient in gradients.items()})
    return reference, total.item(), torch.cat(gaps).mean().item()


@pytest.mark.parametrize(
    ("family", "case", "cfg", "shared"), LAYOUTS, ids=[f"{f}-{c.name}-{d['kl_type']}-{s}" for f, c, d, s in LAYOUTS]
)
def test_loss_and_gradients(
    ranks: RankPool, models: dict[str, Path], family: str, case: LayoutCase, cfg: dict[str, Any], shared: bool
) -> None:
    reference, loss, gap = by_transformers(models[family], models["teacher"], cfg, shared)
    layout = LayoutCase("TP2-SP", tensor=2, sequence_parallel=True)
    hidden = states(ranks, models["teacher"], layout, shared)
    arguments = str(models[family]), case, str(models["teacher"]), hidden, cfg, shared
    results = ranks.run(case.world_size, f"{CASES}:loss_and_gradients", *arguments)
    metrics = combine_metrics([result["metrics"] for result in results])
    assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
    assert metrics[GAP] == pytest.approx(gap, abs=1e-5)
    compared = compare(reference, [result | {"logprobs": {}} for result in results], case.name, packed=True)
    gradient, name = max(compared.by_layer().values())
    assert gradient < GRADIENT_LIMIT, f"{name}: relative error {gradient:.2e}"


FAMILIES = [  # policy, its layout, teacher
    ("deepseek_v3", LayoutCase("TP2-SP", tensor=2, sequence_parallel=True), "nemotron_h"),
    ("nemotron_h", LayoutCase("PP2", pipeline=2), "deepseek_v3"),
    ("qwen3", LayoutCase("DP2", data=2), "qwen3_moe"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "case", "teacher"), FAMILIES, ids=[f"{t}-to-{f}" for f, _, t in FAMILIES])
def test_families_teach_each_other(
    ranks: RankPool, models: dict[str, Path], family: str, case: LayoutCase, teacher: str
) -> None:
    test_loss_and_gradients(ranks, models | {"teacher": models[teacher]}, family, case, MIXED, False)


OTHERS = (LayoutCase("PP2", pipeline=2), LayoutCase("CP2", context=2), LayoutCase("DP2", data=2))


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_a_teacher_says_the_same_on_every_layout(ranks: RankPool, models: dict[str, Path], case: LayoutCase) -> None:
    one = states(ranks, models["teacher"], LayoutCase("TP1"), False)
    other = states(ranks, models["teacher"], case, False)
    assert one.keys() == other.keys() == set(range(len(FEW.lengths)))
    assert all(torch.allclose(one[i], other[i], atol=1e-5) for i in one)


def test_the_policy_itself_teaches_exactly_nothing(ranks: RankPool, models: dict[str, Path]) -> None:
    case, model = LayoutCase("TP1"), models["qwen3"]
    hidden = states(ranks, model, case, False)
    for cfg in (MIXED, {"kl_type": "jsd"}, TOP):
        (result,) = ranks.run(1, f"{CASES}:loss_and_gradients", str(model), case, str(model), hidden, cfg, False)
        assert result["metrics"]["loss"] == 0 and result["metrics"][GAP] == 0
        assert not any(gradient.any() for _, _, gradient in result["gradients"])
