"""Vision models against transformers: packed rows of samples with no, one and two images on every layout, shared
prefixes of equal text with unequal images, and the faults that would go unnoticed elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.images import STANDARD_IMAGES, ParityImage
from grpo_mcore.tools.parity.parity import Reference, compare, reference_of
from grpo_mcore.tools.parity.rank import LayoutCase, ParityWorkload, layout_named
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.image_cases import FAULTS

RANK = "tests.distributed.image_cases"
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl_moe")
WORK = ParityWorkload(images=STANDARD_IMAGES)
# Two samples of an image, and two of another one of equal size after equal text.
ALIKE = ParityWorkload(
    lengths=(17, 26, 21, 19),
    bins=((0, 1, 2, 3),),
    prompts=(12,) * 4,
    common=12,
    images=tuple(ParityImage(i, 4, 2, 2, seed=i // 2) for i in range(4)),
)
SHORT_STAGE = LayoutCase("TP2-SPxPP2-1", tensor=2, sequence_parallel=True, pipeline=2, first_stage=1, recompute=True)
"""Its first stage has fewer layers than the deepstack, so that both have a tower."""
QUICK = [("qwen3_vl", SHORT_STAGE, WORK), ("qwen3_vl", "CP2", ALIKE)]
CASES: list[Any] = [
    *QUICK,
    *(
        pytest.param(family, layout, work, marks=pytest.mark.every_state)
        for family in FAMILIES
        for work in (WORK, ALIKE)
        for layout in ("TP1", "TP2-SP", "PP2", "VPP2", "CP2", *(["EP2", "EP2xTP2-SPxPP2"] if "moe" in family else []))
        if (family, layout, work) not in QUICK
        and not (layout in ("VPP2", "EP2") and work is ALIKE)  # these need several rows
    ),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the reference of a family and a workload, made once."""
    folders, made = dict[str, Path](), dict[Any, Reference]()

    def of(family: str, work: ParityWorkload) -> Reference:
        if family not in folders:
            folders[family] = make_tiny_model(family, tmp_path_factory.mktemp(family))
        if (family, work) not in made:
            made[family, work] = reference_of(folders[family], work=work)
        return made[family, work]

    return of


@pytest.mark.parametrize(("family", "layout", "work"), CASES)
def test_logprobs_and_gradients_with_images_equal_transformers(
    ranks: RankPool, references: Any, family: str, layout: LayoutCase | str, work: ParityWorkload
) -> None:
    reference = references(family, work)
    case = layout_named(layout, shape_of(read_hf_config(reference.folder))) if isinstance(layout, str) else layout
    target = "grpo_mcore.tools.parity.rank:logprobs_and_gradients"
    results = ranks.run(case.world_size, target, str(reference.folder), case, True, work)
    found = compare(reference, results, case.name, packed=True)
    gradient, name = max(found.by_layer().values())
    assert found.ok and max(found.logprobs.values()) < 1e-5, f"{name}: relative error {gradient:.2e}"
    assert not any("visual" in name for name, _, _ in results[0]["gradients"])


@pytest.mark.parametrize("fault", ["no fault", *FAULTS])
def test_a_fault_that_raises_nothing_is_found(ranks: RankPool, references: Any, fault: str) -> None:
    reference = references("qwen3_vl", ALIKE if fault == "prefixes by ids" else WORK)
    target, case = f"{RANK}:with_fault", LayoutCase("TP1")
    (result,) = ranks.run(1, target, str(reference.folder), case, reference.work, fault)
    assert compare(reference, [result], case.name, packed=True).ok is (fault == "no fault")


@pytest.mark.parametrize("work", [WORK, ALIKE], ids=["no prefixes", "shared prefixes"])
def test_samples_of_a_run_are_scored_as_transformers_does(
    ranks: RankPool, references: Any, work: ParityWorkload
) -> None:
    """Turns, branches that each count from 0, and bytes by reference."""
    reference = references("qwen3_vl", work)
    (found,) = ranks.run(1, f"{RANK}:scored", str(reference.folder), LayoutCase("TP1"), work)
    assert found.keys() == reference.logprobs.keys()
    for i, logprobs in reference.logprobs.items():
        torch.testing.assert_close(found[i], logprobs[work.counts(i)], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.every_state) for family in FAMILIES[1:])]
)
def test_transformers_on_an_export_equals_the_policy_and_its_tower_is_the_sources(
    ranks: RankPool, references: Any, tmp_path: Path, family: str
) -> None:
    source, out = references(family, WORK), tmp_path / "out"
    (trained,) = ranks.run(1, f"{RANK}:trained_and_exported", str(source.folder), str(out), WORK)
    exported = reference_of(out, work=WORK)
    for i, logprobs in exported.logprobs.items():
        torch.testing.assert_close(trained[i], logprobs, atol=1e-4, rtol=0)
        assert (logprobs - source.logprobs[i]).abs().max() > 1e-3, "the step changed nothing"
    before, after = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (source.folder, out)
    )
    towers = [name for name in before if "visual." in name]
    assert before.keys() == after.keys() and towers and all(torch.equal(before[name], after[name]) for name in towers)
    assert (out / "preprocessor_config.json").read_bytes() == (source.folder / "preprocessor_config.json").read_bytes()
