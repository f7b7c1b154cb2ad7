"""LoRA: the policy with adapters equals the model with merged weights, the adapters' gradients follow from those of the
merged weights by the chain rule, and nothing else is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.parity import GRADIENT_LIMIT, LOGPROB_LIMIT, Reference, reference_of
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankFailed, RankPool
from tests.distributed.adapter_cases import PEFT, Parts
from tests.distributed.policy_cases import FEW

CASES = "tests.distributed.adapter_cases"
TP1, TP2, PP2 = LayoutCase("TP1"), LayoutCase("TP2", tensor=2), LayoutCase("PP2", pipeline=2)
EP2_TP2 = LayoutCase("EP2xTP2-SP", tensor=2, data=2, sequence_parallel=True, expert=2)
ETP2 = LayoutCase("ETP2-SP", tensor=2, sequence_parallel=True, expert_tensor=2)
EP2_ETP2 = LayoutCase(
    "EP2xETP2-allgather", tensor=2, data=2, sequence_parallel=True, expert=2, expert_tensor=2, dispatcher="allgather"
)
EP2_PP2 = LayoutCase("EP2xPP2", pipeline=2, data=2, expert=2)
PARITY = [
    ("qwen3", LayoutCase("TP4", tensor=4), {}),  # of two key-value heads
    ("qwen3", LayoutCase("TP2-SP-recompute", tensor=2, sequence_parallel=True, recompute=True), {}),
    ("qwen3", LayoutCase("PP2-recompute", pipeline=2, recompute=True), {"exclude_modules": ["linear_proj"]}),
    ("qwen3", LayoutCase("VPP2", pipeline=2, virtual=2), {}),
    ("qwen3_moe", EP2_ETP2, {}),
    ("deepseek_v3", EP2_TP2, {"target_modules": ["*_proj", "*.shared_experts.*"]}),
    ("nemotron_h_moe", LayoutCase("CP2", context=2, recompute=True), {}),
    ("nemotron_h_moe", EP2_PP2, {}),
]
# They enter no branch that the others do not: only `--chaos` runs them.
ALIKE: list[tuple[str, LayoutCase, dict[str, Any]]] = [
    ("qwen3", TP1, {}),
    ("qwen3", TP2, {}),
    ("qwen3_moe", EP2_TP2, {}),
    ("qwen3_moe", ETP2, {}),
    ("nemotron_h_moe", EP2_TP2, {}),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """References of the models without adapters, of FEW."""
    ties = {"qwen3": True, "qwen3_moe": False, "deepseek_v3": False, "nemotron_h_moe": False}
    folders = {
        family: make_tiny_model(family, tmp_path_factory.mktemp(family), tie_word_embeddings=tied)
        for family, tied in ties.items()
    }
    return {family: reference_of(folder, work=FEW) for family, folder in folders.items()}


@pytest.mark.parametrize(
    ("family", "case", "peft"),
    [*PARITY, *(pytest.param(*each, marks=pytest.mark.every_state) for each in ALIKE)],
    ids=[f"{each[0]}-{each[1].name}" for each in (*PARITY, *ALIKE)],
)
def test_logprobs_and_gradients_follow_from_the_merged_model(
    ranks: RankPool,
    references: dict[str, Reference],
    tmp_path: Path,
    family: str,
    case: LayoutCase,
    peft: dict[str, Any],
) -> None:
    base, folder = references[family], tmp_path / "merged"
    results = ranks.run(case.world_size, f"{CASES}:learn", str(base.folder), case, peft, str(folder))
    merged = reference_of(folder, work=FEW)
    for name, expected in (("logprobs", merged.logprobs), ("reference", base.logprobs)):
        found = {i: values for result in results for i, values in result[name].items()}
        assert found.keys() == expected.keys()
        assert max((found[i] - expected[i]).abs().max().item() for i in expected) < LOGPROB_LIMIT, name
    assert max((merged.logprobs[i] - base.logprobs[i]).abs().max().item() for i in base.logprobs) > 1e-2

    before, after = assembled([r["before"] for r in results]), assembled([r["after"] for r in results])
    scale, squares, seen = PEFT["alpha"] / PEFT["dim"], 0.0, set()
    for weight in {weight for weight, _ in before}:
        (down,), ups = before[weight, "down"].values(), before[weight, "up"]
        of_weight = {name: merged.gradients[name.removesuffix(".up")] for name in ups}
        seen |= {name.removesuffix(".up") for name in ups}
        expected = {("up", name): scale * gradient @ down.T for name, gradient in of_weight.items()}
        (name,) = before[weight, "down"]
        expected["down", name] = scale * sum(ups[up].T @ gradient for up, gradient in of_weight.items())
        for (part, name), wanted in expected.items():
            gradient = before[weight, part][name] - after[weight, part][name]
            error = (gradient - wanted).norm() / wanted.norm().clamp(min=1e-12)
            assert error < GRADIENT_LIMIT, f"{part} of {weight}: {error:.1e}"
            squares += wanted.square().sum().item()
    matrices = {name for name, g in base.gradients.items() if g.dim() == 2 and ".layers." in name}
    if not peft:
        assert seen == {name for name in matrices if not name.endswith("gate.weight")}
    for result in results:
        assert result["norm"] == pytest.approx(squares**0.5, rel=1e-4), "clipping uses this norm"
        trained, of_adapters = result["trained"]
        assert result["frozen"] and not result["copies"] and trained == of_adapters
        assert trained <= result["gradients"] < trained + 4096  # with padding


DROPOUT = {"dropout": 0.4}


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        ("qwen3", (TP1, LayoutCase("TP2-SP-recompute", tensor=2, sequence_parallel=True, recompute=True),
                   LayoutCase("VPP2", pipeline=2, virtual=2), LayoutCase("CP2", context=2))),
        ("qwen3_moe", (EP2_PP2, EP2_TP2)),
    ],
    ids=["qwen3", "qwen3_moe"],
)  # fmt: skip
def test_dropout_is_the_same_in_every_pass_and_on_every_layout(
    ranks: RankPool, references: dict[str, Reference], tmp_path: Path, family: str, cases: tuple[LayoutCase, ...]
) -> None:
    model, gradients = str(references[family].folder), []
    merged: Reference | None = None
    for number, case in enumerate(cases):
        folder = "" if number else str(tmp_path / "merged")
        results = ranks.run(case.world_size, f"{CASES}:drop", model, case, DROPOUT, folder)
        merged = merged or reference_of(tmp_path / "merged", work=FEW)
        found = {i: values for result in results for i, values in result["logprobs"].items()}
        first = {i: values for result in results for i, values in result["first"].items()}
        assert max((found[i] - merged.logprobs[i]).abs().max().item() for i in found) < LOGPROB_LIMIT, case.name
        assert max((found[i] - first[i]).abs().max().item() for i in found) > 1e-2, "each step has its own draw"
        for result in results:
            for ratio in result["ratios"].values():
                assert ratio == pytest.approx(1, abs=1e-5), "log-probs and training have the same draw"
        before, after = assembled([r["before"] for r in results]), assembled([r["after"] for r in results])
        gradients.append({(key, name): before[key][name] - after[key][name] for key in before for name in before[key]})
    downs = [gradient for (key, _), gradient in gradients[0].items() if key[1] == "down"]
    left_out = sum((gradient == 0).all(0).sum().item() for gradient in downs) / sum(g.shape[1] for g in downs)
    assert left_out == pytest.approx(DROPOUT["dropout"], abs=0.1), "what is left out gets no gradient"
    for other, case in zip(gradients[1:], cases[1:], strict=True):
        for key, expected in gradients[0].items():
            error = (other[key] - expected).norm() / expected.norm().clamp(min=1e-12)
            assert error < GRADIENT_LIMIT, f"{case.name}, {key}: {error:.1e}"


def assembled(of_ranks: list[Parts]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Assemble whole tensors from the slices of all ranks; ranks that hold the same slice must agree."""
    sizes: dict[tuple[str, str], dict[str, list[int]]] = {}
    for key, held in (item for one in of_ranks for item in one.items()):
        for name, box, _ in held:
            stops = [stop for _, stop in box]
            known = sizes.setdefault(key, {}).setdefault(name, stops)
            sizes[key][name] = list(map(max, known, stops))
    found = {key: {name: torch.full(size, torch.nan) for name, size in each.items()} for key, each in sizes.items()}
    for one in of_ranks:
        for key, pieces in one.items():
            for name, box, values in pieces:
                there = found[key][name][tuple(slice(*span) for span in box)]
                assert there.isnan().all() or torch.allclose(there, values, rtol=0, atol=1e-6), (key, name)
                there.copy_(values)
    assert not any(tensor.isnan().any() for each in found.values() for tensor in each.values())
    return found


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [("qwen3", TP2, TP2), ("qwen3_moe", EP2_PP2, EP2_ETP2)]
    + [
        pytest.param(*each, marks=pytest.mark.every_state)
        for each in (("qwen3", TP2, PP2), ("nemotron_h_moe", EP2_TP2, EP2_PP2))
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_adapters_are_saved_and_go_on(
    ranks: RankPool,
    references: dict[str, Reference],
    tmp_path: Path,
    family: str,
    saved: LayoutCase,
    loaded: LayoutCase,
) -> None:
    model, folder = str(references[family].folder), str(tmp_path / "ckpt")
    through = ranks.run(saved.world_size, f"{CASES}:train_save_train", model, saved, folder)
    resumed = ranks.run(loaded.world_size, f"{CASES}:load_train", model, loaded, folder, {})
    exact = saved == loaded
    for before, after in zip(through[0], resumed[0], strict=True):
        assert after == (before if exact else pytest.approx(before, rel=1e-3)), (through, resumed)


def test_a_checkpoint_of_other_adapters_is_refused(
    ranks: RankPool, references: dict[str, Reference], tmp_path: Path
) -> None:
    model, folder = str(references["qwen3"].folder), str(tmp_path / "ckpt")
    ranks.run(1, f"{CASES}:train_save_train", model, TP1, folder)
    with pytest.raises(RankFailed, match=r"CheckpointError.*holds another model.*adapters.*'rank': 4.*'rank': 8"):
        ranks.run(1, f"{CASES}:load_train", model, TP1, folder, {"dim": 8})
    with pytest.raises(RankFailed, match=r"CheckpointError.*holds another model.*adapters"):
        ranks.run(1, f"{CASES}:load_train", model, TP1, folder, {"enabled": False})
