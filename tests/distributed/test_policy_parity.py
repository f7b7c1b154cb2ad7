"""The policy against transformers: every family on every layout, with packed rows of uneven lengths."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.step.step_batch import rank_steps
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.parity import GRADIENT_LIMIT, LOGPROB_LIMIT, ROUNDING, Reference, compare, reference_of
from grpo_mcore.tools.parity.rank import LENGTHS, STANDARD, LayoutCase, ParityWorkload, layout_named
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.policy_cases import FEW, LAYOUTS, MOE_LAYOUTS
from tests.unit.step.step_cases import config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
DENSE: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": False, "rope_parameters": YARN},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
}
MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"tie_word_embeddings": False},
    "mixtral": {"tie_word_embeddings": True},
    "deepseek_v3": {"tie_word_embeddings": False},
}
HYBRID: dict[str, dict[str, Any]] = {"nemotron_h": {}, "nemotron_h_moe": {}}
# Made of parts that the families above compare on every layout; `grpo-mcore parity` compares them on all.
LATER = {
    "moonlight": "TP2-SPxPP2-EP2",
    "glm4_moe_lite": "TP2-SPxPP2-EP2",
    "glm4_moe": "TP2-SPxPP2-EP2",
    "glm_moe_dsa": "TP2-SPxPP2-EP2",
    "nemotron_h_latent": "TP2-SPxPP2-EP2",
    "qwen3_5_text": "TP2-SPxCP2",
    "qwen3_next": "TP2-SPxPP2-EP2",
    "minimax_m2": "TP2-SPxPP2-EP2",
    "gemma3_text": "TP2-SPxCP2",
    "gpt_oss": "TP2-SPxPP2-EP2",
}
FAMILIES = DENSE | MOE | HYBRID | {family: {} for family in LATER}
FAMILIES["qwen3_next"] = {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}}
# The layouts that are compared: for families that differ from another one in few parts those that cut these parts, none
# where ranks that share key-value heads are compared below, or nothing differs but sizes. `pytest --chaos` and
# `grpo-mcore parity` compare the others too. A layout of several parts stands for each of its parts.
COMPARED = {
    "qwen3": ("TP1", "TP1-parts", "PP2xDP2", "CP2-recompute", "TP2-SPxCP2", "PP2xCP2", "VPP2xDP2", "PP2-uneven"),
    "qwen2": ("TP2-SPxCP2",),
    "llama": ("TP2xPP2",),
    "mixtral": ("TP2-SPxPP2-EP2",),
    "qwen3_moe": ("TP1", "EP2-allgather", "EP2xETP2-allgather", "EP2xCP2xDP2"),
    "deepseek_v3": ("EP2-parts", "VPP2", "CP2", "ETP2", "TP2-SPxPP2-EP2"),
    "nemotron_h": ("TP2-SPxCP2",),
    "nemotron_h_moe": ("TP1", "CP2", "VPP2", "TP2-SPxPP2-EP2"),
    **dict.fromkeys(("moonlight", "glm4_moe_lite", "glm4_moe", "qwen3_5_text", "gpt_oss"), ()),
}


def cases() -> list[Any]:
    """Return (family, layout) of all families: a family of LATER has one layout."""
    found = []
    for family in FAMILIES:
        layouts = MOE_LAYOUTS if family in MOE or family == "nemotron_h_moe" else LAYOUTS
        if family in LATER:
            layouts = tuple(case for case in (*LAYOUTS, *MOE_LAYOUTS) if case.name == LATER[family])
        for case in layouts:
            few = case.name in COMPARED.get(family, (case.name,))
            found.append(pytest.param(family, case, marks=() if few else pytest.mark.every_state))
    return found


@pytest.fixture(scope="module")
def references() -> dict[Any, Any]:
    """Folders by family, and references by family and workload, of those made so far."""
    return {}


@pytest.mark.parametrize(("family", "case"), cases(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_logprobs_and_gradients_equal_transformers(
    ranks: RankPool, references: dict, tmp_path_factory: pytest.TempPathFactory, family: str, case: LayoutCase
) -> None:
    work = work_of(case)
    if (family, work) not in references:
        if family not in references:
            references[family] = make_tiny_model(family, tmp_path_factory.mktemp(family), **FAMILIES[family])
        references[family, work] = reference_of(references[family], work=work)
    equal_to_transformers(ranks, references[family, work], case)


def work_of(case: LayoutCase) -> ParityWorkload:
    """Return what is computed: two rows, but two of each data-parallel rank, and more of interleaved stages, for all
    phases of their schedule."""
    return STANDARD if case.data > 1 or case.virtual else FEW


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "TP2-SPxPP2"),
        ("qwen3", "PP2xCP2"),
        ("qwen3_moe", "EP2xTP2-SP"),
        pytest.param("qwen3", "TP2xDP2", marks=pytest.mark.every_state),
        pytest.param("llama", "TP2xCP2", marks=pytest.mark.every_state),
        pytest.param("gpt_oss", "EP2xTP2-SPxPP2", marks=pytest.mark.every_state),
    ],
)
def test_values_and_gradients_equal_transformers(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    """A head of one output: a value in place of each log-prob, through everything else that a policy has."""
    folder = make_tiny_model(family, tmp_path, value=True)
    case = layout_named(layout, shape_of(read_hf_config(folder), "value"))
    equal_to_transformers(ranks, reference_of(folder, work=work_of(case)), case)


@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("nemotron_h_moe", {"n_groups": 4}, "TP4-SP"),  # 2 key-value heads, as Nemotron 3 Nano
        ("qwen2", {}, "TP4"),
        ("qwen3_5_text", {"num_key_value_heads": 1}, "TP2-SPxCP2"),
        ("gemma3_text", {"num_key_value_heads": 1}, "TP2xPP2"),
        ("gpt_oss", {"num_key_value_heads": 1}, "EP2xTP2-SPxPP2"),
    ],
)
def test_ranks_that_share_key_value_heads_equal_transformers(
    ranks: RankPool, tmp_path: Path, family: str, changes: dict[str, Any], layout: str
) -> None:
    folder = make_tiny_model(family, tmp_path, **changes)
    case = layout_named(layout, shape_of(read_hf_config(folder)))
    reference = reference_of(folder, work=work_of(case))
    equal_to_transformers(ranks, reference, case, gradient_limit=2e-4 if family == "gpt_oss" else 1e-4)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("moonlight", "EP2xTP2-SPxPP2"),
        ("qwen3_moe", "EP2"),
        ("gpt_oss", "TP1"),
        *(
            pytest.param(family, "TP1", marks=pytest.mark.every_state)
            for family in (
                "glm4_moe", "minimax_m2", "mixtral", "nemotron_h_moe", "nemotron_h_latent", "qwen3_next",
                "glm4_moe_lite",
            )
        ),
    ],
)  # fmt: skip
def test_one_expert_a_token_equals_transformers(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    """Its weight is score / score = 1, also where Megatron-Core would take the score."""
    folder = make_tiny_model(family, tmp_path, num_experts_per_tok=1)
    case = layout_named(layout, shape_of(read_hf_config(folder)))
    reference = reference_of(folder, work=work_of(case))
    equal_to_transformers(ranks, reference, case, gradient_limit=3e-4, smallest=ROUNDING)


def equal_to_transformers(
    ranks: RankPool,
    reference: Reference,
    case: LayoutCase,
    gradient_limit: float = GRADIENT_LIMIT,
    smallest: float = 0.0,
) -> None:
    target = "grpo_mcore.tools.parity.rank:logprobs_and_gradients"
    results = ranks.run(case.world_size, target, str(reference.folder), case, True, work_of(case))
    found = compare(reference, results, case.name, packed=True, smallest=smallest)
    assert max(found.logprobs.values()) < LOGPROB_LIMIT
    gradient, name = max(found.by_layer().values())
    assert gradient < gradient_limit, f"{name}: relative error {gradient:.2e}"
    norm = torch.stack([gradient.norm() for gradient in reference.gradients.values()]).norm().item()
    assert [result["grad_norm"] for result in results] == pytest.approx([norm] * len(results), rel=1e-4), (
        "clipping uses this norm"
    )


def test_experts_may_be_split_over_data_parallel_ranks_with_rows_of_their_own_length(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """ETP 2 over two data-parallel ranks, which send each other different numbers of tokens."""
    reference = reference_of(make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("etp")))
    case = LayoutCase("DP2xETP2", data=2, expert_tensor=2)
    results = ranks.run(2, "grpo_mcore.tools.parity.rank:logprobs_and_gradients", str(reference.folder), case)
    assert compare(reference, results, case.name, packed=True).ok


def test_batched_by_length_logprobs_and_gradients_equal_float64(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The bins are those of a recipe with policy.dynamic_batching, on two data-parallel ranks."""
    recipe = config()
    recipe.policy.sequence_packing.enabled, recipe.policy.dynamic_batching.enabled = False, True
    recipe.policy.dynamic_batching.train_mb_tokens, recipe.policy.dynamic_batching.sequence_length_round = 48, 8
    case, samples = LayoutCase("DP2", data=2), {i: None for i in range(len(LENGTHS))}
    layout = PolicyLayout(tensor=1, pipeline=1, context=1, data=2)
    _, steps = rank_steps(samples, LENGTHS, recipe, layout, optimizer_steps=1)  # type: ignore[arg-type]
    bins = [bin for pair in zip(*(step.batches[0] for step in steps), strict=True) for bin in pair]
    assert sorted(i for bin in bins for i in bin) == sorted(samples) and max(map(len, bins)) > 1
    folder = make_tiny_model("qwen3", tmp_path_factory.mktemp("float64"))
    reference = reference_of(folder, torch.float64)
    results = ranks.run(2, "tests.distributed.policy_cases:in_bins", str(folder), case, bins)
    found = compare(reference, results, case.name, packed=True)
    assert max(found.logprobs.values()) < 1e-5
    assert max(found.gradients.values()) < 2e-5
