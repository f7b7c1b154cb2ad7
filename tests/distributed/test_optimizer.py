"""Variants of the optimizer on real meshes: overlapped gathering of weights, bfloat16 gradients without float32 copies
(with a stand-in for TransformerEngine's kernel), and updates on the host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool

CASES = "tests.distributed.optimizer_cases"
STATE_CASES = "tests.distributed.policy_state_cases"
DP2 = LayoutCase("DP2", data=2)
EP2_PP2 = LayoutCase("EP2xPP2", pipeline=2, data=2, expert=2)

PLAIN = {"use_precision_aware_optimizer": False}
FUSED = {"use_precision_aware_optimizer": True}
HOST = {"optimizer_cpu_offload": True}
HALF = HOST | {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}
VARIANTS = {"plain": PLAIN, "fused": FUSED, "host": HOST, "half": HALF}
ADAM = {"lr": 0.01, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-3}


def name_of(value: Any) -> str:
    names = [name for name, variant in VARIANTS.items() if variant == value]
    return names[0] if names else value.name if isinstance(value, LayoutCase) else str(value)


def rarely(*values: object) -> object:
    """Return a case that only `--chaos` runs: the others enter every branch that it does."""
    return pytest.param(*values, marks=pytest.mark.every_state)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    families = ("qwen3", "qwen3_moe", "nemotron_h_moe")
    return {family: str(make_tiny_model(family, tmp_path_factory.mktemp(family))) for family in families}


@pytest.mark.parametrize(
    ("family", "case", "lora"),
    [
        ("qwen3", DP2, False),
        ("qwen3", LayoutCase("VPP2xDP2", pipeline=2, virtual=2, data=2), False),
        ("qwen3_moe", LayoutCase("DP4-EP2", data=4, expert=2), False),
        rarely("qwen3", DP2, True),
        rarely("qwen3", LayoutCase("DP2-recomputed", data=2, recompute=True), False),
        rarely("nemotron_h_moe", DP2, False),
    ],
    ids=lambda value: value.name if isinstance(value, LayoutCase) else {True: "lora", False: ""}.get(value, value),
)
def test_weights_gathered_during_the_next_forward_pass_are_those_gathered_at_once(
    ranks: RankPool, models: dict[str, str], family: str, case: LayoutCase, lora: bool
) -> None:
    """Also right after the last update, when a refit reads them; between the updates they are not gathered yet."""
    at_once, overlapped = (
        ranks.run(case.world_size, f"{CASES}:train_gathering", models[family], case, overlap, lora)
        for overlap in (False, True)
    )
    not_yet = False
    assert max(buckets for _, buckets in overlapped) > 3  # later pipeline stages have a bucket a chunk
    for (expected, _), (found, _) in zip(at_once, overlapped, strict=True):
        assert [norm for norm, _ in found] == [norm for norm, _ in expected]
        assert torch.equal(found[-1][1], expected[-1][1])
        not_yet |= not torch.equal(found[0][1], expected[0][1])
    assert not_yet


def train(ranks: RankPool, model: str, case: LayoutCase, folder: Path, in_parts: bool, variant: Any) -> list[Any]:
    """Train two steps, save, and return the two after that by rank."""
    function = f"{STATE_CASES}:train_save_train"
    return ranks.run(case.world_size, function, model, case, str(folder), in_parts, "bfloat16", variant)


def resume(ranks: RankPool, model: str, case: LayoutCase, folder: Path, variant: Mapping[str, Any]) -> list[Any]:
    return ranks.run(case.world_size, f"{STATE_CASES}:load_train", model, case, str(folder), "bfloat16", variant)


@pytest.mark.parametrize("variant", [FUSED, HOST, HALF], ids=name_of)
def test_an_update_is_adamws_and_starts_from_the_weights_without_a_saved_optimizer(
    ranks: RankPool, models: dict[str, str], tmp_path: Path, variant: dict[str, Any]
) -> None:
    arguments = (models["qwen3"], DP2, str(tmp_path / "ckpt"), ADAM | variant)
    ranks.run(2, f"{STATE_CASES}:save_without_the_optimizer", *arguments)
    for _, equal, difference in ranks.run(2, f"{STATE_CASES}:resume_without_the_optimizer", *arguments):
        assert equal and difference < 1e-6


@pytest.mark.parametrize(
    ("family", "case", "variant", "in_parts"),
    [
        ("qwen3", DP2, FUSED, True),
        ("qwen3", DP2, HOST, True),
        ("qwen3_moe", EP2_PP2, HALF, False),
        rarely("qwen3", DP2, FUSED, False),
        rarely("qwen3", DP2, HALF, False),
        rarely("qwen3", DP2, HALF, True),
    ],
    ids=name_of,
)
def test_training_continues_from_a_checkpoint_as_without_interruption(
    ranks: RankPool, models: dict[str, str], tmp_path: Path, family: str, case: LayoutCase, variant: Any, in_parts: bool
) -> None:
    through = train(ranks, models[family], case, tmp_path, in_parts, variant)
    assert resume(ranks, models[family], case, tmp_path, variant) == through


def test_bfloat16_gradients_without_copies_train_bit_for_bit_as_with_them(
    ranks: RankPool, models: dict[str, str], tmp_path: Path
) -> None:
    """The norms are sums in another order."""
    plain, fused = (
        train(ranks, models["qwen3"], DP2, tmp_path / name_of(variant), False, variant) for variant in (PLAIN, FUSED)
    )
    for expected, found in zip(plain, fused, strict=True):
        assert [loss for _, loss in found] == [loss for _, loss in expected]
        assert [norm for norm, _ in found] == pytest.approx([norm for norm, _ in expected], rel=1e-6)


@pytest.mark.parametrize("variant", [rarely(FUSED), HALF], ids=name_of)
def test_a_checkpoint_may_change_the_optimizers_variant(
    ranks: RankPool, models: dict[str, str], tmp_path: Path, variant: dict[str, Any]
) -> None:
    for saved, loaded in ((PLAIN, variant), (variant, PLAIN)):
        folder = tmp_path / name_of(saved)
        through = train(ranks, models["qwen3"], DP2, folder, False, saved)
        resumed = resume(ranks, models["qwen3"], DP2, folder, loaded)
        for before, after in zip(through, resumed, strict=True):
            for expected, found in zip(before, after, strict=True):
                assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("variant", [FUSED, rarely(HOST), HALF], ids=name_of)
def test_offloading_changes_nothing_that_is_trained(
    ranks: RankPool, models: dict[str, str], variant: dict[str, Any]
) -> None:
    """It moves what is on the device; what is updated on the host stays where it is."""
    arguments = (f"{STATE_CASES}:train_offload_train", models["qwen3"], DP2, "bfloat16")
    run = [ranks.run(2, *arguments, offload, variant) for offload in (False, True)]
    for (expected, _, _), (steps, moved, views_kept) in zip(*run, strict=True):
        assert steps == expected
        assert views_kept and (moved or variant == HOST)
