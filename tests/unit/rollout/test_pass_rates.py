"""Pass rates of prompts, and by columns of their rows."""

import json

import pytest

from grpo_mcore.rollout.pass_rates import MOST_VALUES, PassRates, PromptRecord, rewards_by_column, row_uid
from tests.unit.rollout.scored_groups import group


@pytest.mark.parametrize(
    ("rewards", "solved_at", "rate"),
    [
        ([1, 0, 0, 1], None, 0.5),
        ([1, None, 1], None, 1.0),
        ([0.5, 2.0, -1.0, 0.5], None, 0.5),  # graded: the mean between 0 and 1
        ([0.5, 2.0, -1.0, 0.4], 0.5, 0.5),
        ([None, None], None, None),
    ],
)
def test_the_pass_rate_of_a_group(rewards: list[float | None], solved_at: float | None, rate: float | None) -> None:
    rates = PassRates()
    assert rates.add(group("a", rewards, solved_at)) == rate
    assert (rates.record(group("a@2", []).prompt) is None) == (rate is None)


def test_a_record_goes_over_all_groups_of_a_row() -> None:
    rates = PassRates(["level", "level"])
    for number, rewards in enumerate([[1, 1], [0, 1], [1, 1], [1, 1]], 1):
        rates.add(group(f"a@{number}", rewards, level=3))
    assert rates.prompts == {"a": PromptRecord(1.0, 4, 8, 7.0, 2, {"level": "3"})}
    restored = PassRates(["level"], json.loads(json.dumps(rates.state_dict())))
    assert restored.prompts == rates.prompts and restored.metrics() == rates.metrics()


def test_rates_by_column_move_with_the_newest_groups() -> None:
    rates = PassRates(["level", "task"])
    assert rates.of_column(group("a", [], level="easy").prompt, "level") is None
    rates.add(group("a", [1, 1], level="easy"))
    rates.add(group("b", [0, 0], level="easy"))
    rates.add(group("c", [0, 0]))
    assert rates.of_column(group("new", [], level="easy").prompt, "level") == 0.95
    by_level = {"pass_rate/by/level/easy": 0.95, "pass_rate/by/level/none": 0.0}
    assert rates.metrics() == by_level | {"pass_rate/by/task/sums": 0.95 * 0.95}


def test_a_column_may_lie_in_a_record() -> None:
    """As difficulties do in verl's rows and slime's; every prompt had counted as `none`."""
    rates = PassRates(["extra_info.level", "metadata.level"])
    rates.add(group("a", [1, 1], extra_info={"level": 3}, metadata='{"level": 4}'))
    assert rates.metrics() == {"pass_rate/by/extra_info.level/3": 1.0, "pass_rate/by/metadata.level/4": 1.0}


def test_rewards_by_column_are_those_of_the_most_frequent_values() -> None:
    groups = [group(str(n), [n, None], number=n, task_name="other") for n in range(MOST_VALUES + 3)]
    groups += [group("x", [1, 0], number=1), group("y", [None])]
    metrics = rewards_by_column(groups, ["number", "task"])
    assert metrics["reward/by/number/1"] == 2 / 3 and len(metrics) == MOST_VALUES + 1
    assert set(metrics) >= {"reward/by/number/0", "reward/by/task/sums"}
    assert rewards_by_column(groups, []) == {}


def test_the_uid_of_a_row() -> None:
    assert [row_uid(uid) for uid in ("data:7", "data:7@2", "a@b", "a@2b@31")] == ["data:7", "data:7", "a@b", "a@2b"]
