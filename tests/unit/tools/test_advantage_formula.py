"""An advantage of the page can be computed by hand from the formula beside it, to the last digit printed."""

import json
from typing import Any

import pytest
import torch

from grpo_mcore.driver.record.sample_writer import advantage_columns
from grpo_mcore.objective import AdvantageEstimate, SampleKL, clip_advantages, estimate_advantages, group_stats
from grpo_mcore.tools.report.page import advantage_formula

NAN = float("nan")


def steps(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards of 6 groups of 4 to 8 samples: of 0 and 1, graded, equal, tiny, and one with a failed sample."""
    draw = torch.Generator().manual_seed(seed)
    groups = [
        torch.randint(0, 2, (8,), generator=draw).double(),
        torch.rand(8, generator=draw, dtype=torch.float64),
        torch.ones(4, dtype=torch.float64),
        1e-5 * torch.randn(5, generator=draw, dtype=torch.float64),
        -100 * torch.rand(7, generator=draw, dtype=torch.float64),
        torch.tensor([1.0, NAN, 0.0, 0.25], dtype=torch.float64),
    ]
    ids = torch.cat([torch.full((len(group),), number) for number, group in enumerate(groups)])
    return torch.cat(groups), ids


def rows(estimate: AdvantageEstimate, clip: tuple[float | None, float | None] = (None, None)) -> list[dict[str, Any]]:
    columns = advantage_columns(estimate, clip)
    columns["advantage"] = clip_advantages(estimate.advantages, *clip).tolist()
    return [{name: values[i] for name, values in columns.items()} for i in range(len(estimate.advantages))]


def by_hand(row: dict[str, Any]) -> str:
    formula = advantage_formula(row)
    assert formula is not None
    return f"{eval(formula):.6g}"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("clip", [(None, None), (-0.7, None), (None, 1.1), (-0.5, 0.5)])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("grpo", {}),
        ("grpo", {"normalize": False}),
        ("grpo", {"leave_one_out": False}),
        ("dr_grpo", {}),
        ("rloo", {}),
        ("reinforce_plus_plus", {}),
        ("reinforce_plus_plus", {"minus_baseline": False}),
        ("gdpo", {"reward_weights": {"form": 0.3, "right": -1.0}}),
    ],
)
def test_the_formula_gives_the_advantage(
    name: str, keys: dict[str, Any], clip: tuple[float | None, float | None], seed: int
) -> None:
    rewards, ids = steps(seed)
    form = torch.rand(len(rewards), generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)
    form[3] = NAN  # it does not apply to this sample
    estimate = estimate_advantages(
        name, rewards, ids, ~rewards.isnan(), tokens=torch.arange(len(rewards)) + 1,
        rewards_by_name={"right": rewards, "form": form}, **keys,
    )  # fmt: skip
    for row, reward in zip(rows(estimate, clip), rewards.tolist(), strict=True):
        if reward != reward:
            assert advantage_formula(row) is None
        else:
            assert float(by_hand(row)) == float(f"{row['advantage']:.6g}"), advantage_formula(row)


def test_numbers_are_as_short_as_they_can_be() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, -0.5], dtype=torch.float64)
    first, *_, last = rows(estimate_advantages("grpo", rewards, torch.zeros(5)))
    assert advantage_formula(first) == "(1 - (-0.125)) / 0.5477236" and first["group_size"] == 5
    assert advantage_formula(last) == "((-0.5) - 0.25) / 0.547724"
    (row, *_) = rows(estimate_advantages("dr_grpo", rewards[:2], torch.zeros(2)), (None, 0.2))
    assert advantage_formula(row) == "min((1 - 0.5), 0.2)"


def test_what_a_teacher_adds_is_a_term() -> None:
    (row, *_) = rows(estimate_advantages("dr_grpo", torch.tensor([1.0, 0.0]), torch.zeros(2)))
    assert advantage_formula(row | {"teacher_part": -0.25, "advantage": 0.25}) == "(1 - 0.5) + (-0.25)"


def test_the_kl_is_in_the_reward() -> None:
    rewards, ids, kl = torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([0.5, 0.25], dtype=torch.float64)
    estimate = estimate_advantages("rloo", rewards, ids, kl=SampleKL(kl, kl, kl), kl_penalty=0.1)
    assert [advantage_formula(row) for row in rows(estimate)] == ["(0.95 - (-0.025))", "((-0.025) - 0.95)"]


def test_a_custom_estimator_has_no_formula_and_old_files_neither() -> None:
    rewards, ids = steps(0)
    custom = AdvantageEstimate(rewards.nan_to_num(), group_stats(rewards, ids, ~rewards.isnan()))
    assert {advantage_formula(row) for row in rows(custom)} == {None}
    assert advantage_formula({"advantage": 0.5}) is None
    assert json.dumps(rows(custom)[0])
