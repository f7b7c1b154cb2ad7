"""Rows whose samples share prefixes against the same rows computed whole: log-probs and gradients."""

import functools
from collections.abc import Callable

import pytest

from grpo_mcore.tools.demo.tiny_models import FAMILIES, make_tiny_model
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.policy_cases import LAYOUTS, MOE_LAYOUTS

CASES = {case.name: case for case in (*LAYOUTS, *MOE_LAYOUTS)}
QUICK = (
    [("qwen3", layout) for layout in ("TP1-recompute", "DP2", "TP2-SPxCP2")]
    + [("deepseek_v3", layout) for layout in ("TP2-SPxPP2-EP2", "CP2")]
    + [("qwen3_moe", "EP2-allgather"), ("nemotron_h_moe", "CP2")]
    + [("qwen3_5_text", "CP2"), ("gemma3_text", "TP1"), ("gpt_oss", "TP1")]
)
SLOW = [("qwen3", "VPP2"), ("glm_moe_dsa", "CP2"), ("gpt_oss", "CP2")]
# In what shared prefixes touch, which is attention and layers that carry a state, these are like another one: each
# part of their layouts is a part of one above, or of those with adapters or given experts below.
ALIKE = [("qwen2", "TP2-SP"), ("qwen3_moe", "EP2")] + [("qwen3", layout) for layout in ("TP1-parts", "TP2-SP", "PP2")]
ALIKE += [(family, layout) for family in FAMILIES for layout in ("TP1", "CP2") if (family, layout) not in QUICK + SLOW]


@pytest.mark.parametrize(
    ("family", "layout", "how"),
    [(*each, "") for each in QUICK]
    + [("qwen3", "TP2-SP", "lora"), ("qwen3_moe", "EP2", "replay"), ("qwen3_moe", "EP2xCP2xDP2", "replay")]
    + [pytest.param(*each, "", marks=pytest.mark.slow) for each in SLOW]
    + [pytest.param(*each, "", marks=pytest.mark.every_state) for each in ALIKE],
)
def test_logprobs_and_gradients_equal_the_unshared_run(
    ranks: RankPool, model_of: Callable[[str], str], family: str, layout: str, how: str
) -> None:
    case, target = CASES[layout], "tests.distributed.prefix_cases:compare_with_unshared"
    results = ranks.run(case.world_size, target, model_of(family), case, how)
    for result in results:
        assert result["computed"] < 0.6 or case.data > 1
        assert result["logprobs"] < 1e-5
        error, name = result["gradients"]
        assert error < 1e-4 and result["norm"] > 1e-4, f"{name}: relative error {error:.2e}"


def test_random_trees_equal_the_unshared_run(ranks: RankPool, model_of: Callable[[str], str]) -> None:
    (shares,) = ranks.run(1, "tests.distributed.prefix_cases:try_random_trees", model_of("qwen3"), CASES["TP1"])
    assert shares > 10


@pytest.mark.parametrize(("family", "layout"), [("qwen3", "TP2-SPxCP2"), ("nemotron_h_moe", "TP1")])
def test_branches_of_a_sample_are_computed_like_samples(
    ranks: RankPool, model_of: Callable[[str], str], family: str, layout: str
) -> None:
    target = "tests.distributed.prefix_cases:compare_branches"
    for result in ranks.run(CASES[layout].world_size, target, model_of(family), CASES[layout]):
        assert result["apart log-probs"] == 0 and result["shared log-probs"] < 1e-5
        assert result["apart gradients"] < 1e-6 and result["shared gradients"] < 1e-4


@pytest.mark.parametrize(
    ("family", "layout", "how"),
    [
        ("qwen3", "CP2", ""),
        ("qwen3_moe", "EP2", "replay"),
        pytest.param("qwen3", "TP2-SPxCP2", "", marks=pytest.mark.every_state),
        pytest.param("qwen3", "PP2", "", marks=pytest.mark.every_state),
        pytest.param("qwen3", "DP2", "", marks=pytest.mark.every_state),
        pytest.param("qwen3_moe", "EP2xCP2xDP2", "replay", marks=pytest.mark.every_state),
        pytest.param("nemotron_h_moe", "CP2", "", marks=pytest.mark.every_state),
    ],
)
def test_samples_longer_than_a_bin_are_computed_like_their_branches(
    ranks: RankPool, model_of: Callable[[str], str], family: str, layout: str, how: str
) -> None:
    target, case = "tests.distributed.prefix_cases:compare_long_samples", CASES[layout]
    for result in ranks.run(case.world_size, target, model_of(family), case, how):
        assert result["bins"] > 4 and result["ranks"] == case.data and result["norm"] > 1e-4 and result["shared"]
        for way, (error, name) in result["errors"].items():
            assert error < 1e-4, f"{way}, {name}: relative error {error:.2e}"


def test_a_branch_is_not_seen_by_another(ranks: RankPool, model_of: Callable[[str], str]) -> None:
    target = "tests.distributed.prefix_cases:change_one_branch"
    for result in ranks.run(2, target, model_of("qwen3"), CASES["TP2-SP"]):
        assert result == [True, False, True, True, True, True]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a family's model, which is made once."""
    return functools.cache(lambda family: str(make_tiny_model(family, tmp_path_factory.mktemp(family))))
