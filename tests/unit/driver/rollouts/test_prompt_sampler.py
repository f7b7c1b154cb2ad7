"""Prompts are taken by the pools of their pass rates, and a resumed run takes those that it would have taken."""

from collections.abc import Iterator
from typing import Any

import pytest

from grpo_mcore.driver.rollouts.prompt_sampler import PromptSampler, SamplerError
from grpo_mcore.driver.rollouts.prompt_stream import PromptStream
from grpo_mcore.recipe import SamplerConfig
from grpo_mcore.rollout.pass_rates import PassRates, PromptRecord
from tests.unit.rollout.scored_groups import group

LEVELS = {"easy": [1, 1], "medium": [1, 0], "hard": [0, 0]}


class Levels:
    """An epoch of 30 prompts, a third of each level, in batches of 5."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[list[Any]]:
        levels = list(LEVELS)
        while self.read < 6:
            first = 5 * self.read
            self.read += 1
            yield [group(f"p{n}", [], level=levels[n % 3]).prompt for n in range(first, first + 5)]
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def stream(state: Any = None, epochs: int = 1000, **keys: Any) -> PromptStream:
    config = SamplerConfig.model_validate(keys)
    columns = [config.column] if config.column else []
    return PromptStream(
        Levels(), epochs, state, columns=columns, sampler=lambda rates: PromptSampler(config, rates, seed=3)
    )


def play(prompts: PromptStream, count: int) -> list[str]:
    """Take prompts one by one and score them by their level. Return the levels."""
    levels = []
    for _ in range(count):
        for prompt in prompts.take(1):
            level = prompt["extra_env_info"]["level"]
            levels.append(level)
            prompts.rates.add(group(prompt["uid"], LEVELS[level], level=level))
            prompts.mark_done([prompt["uid"]])
    return levels


def test_after_the_first_pass_each_pool_has_its_weight() -> None:
    prompts = stream()
    levels = play(prompts, 30)
    assert [levels.count(level) for level in LEVELS] == [10, 10, 10], "a prompt that was not tried is taken"
    levels = play(prompts, 700)
    for level, share in zip(LEVELS, (1 / 7, 5 / 7, 1 / 7), strict=True):
        assert abs(levels.count(level) / 700 - share) < 0.05
    metrics = prompts.step_metrics()
    assert metrics.pop("prompts/passed_over") == len(prompts.passed_over()) > 0
    assert metrics == {"prompts/at_most_0.25": 10, "prompts/at_most_0.75": 10, "prompts/at_most_1": 10}
    assert prompts.step_metrics()["prompts/passed_over"] == 0


def test_a_column_stands_for_prompts_that_were_not_tried() -> None:
    prompts = stream(column="level", weights=[0.0, 1.0, 0.0])
    assert play(prompts, 12).count("medium") >= 9
    passed_over = prompts.passed_over()
    assert passed_over and prompts.passed_over() == [] and len(set(passed_over)) == len(passed_over)


def test_what_was_solved_so_often_in_a_row_is_not_taken_again() -> None:
    prompts = stream(drop_solved_after=2, weights=[1.0, 1.0, 1.0])
    levels = play(prompts, 140)
    assert [levels.count(level) for level in LEVELS] == [20, 60, 60]


def test_data_without_a_prompt_worth_its_tokens_have_ended() -> None:
    prompts = stream(drop_solved_after=1, thresholds=[0.75, 1.0], weights=[0.0, 1.0])
    assert len(play(prompts, 90)) == 30 and prompts.take(1) == [] and prompts.epoch < 5


def test_a_resumed_run_has_the_same_pools_and_takes_the_same_prompts() -> None:
    whole, first = stream(column="level"), stream(column="level")
    levels = play(whole, 47)
    assert play(first, 20) == levels[:20]
    resumed = stream(first.state_dict(), column="level")
    assert play(resumed, 27) == levels[20:]
    assert resumed.rates.state_dict() == whole.rates.state_dict() and resumed.step_metrics() == whole.step_metrics()


def only_of(prompt: Any, record: PromptRecord | None, pass_rates: PassRates, level: str, worth: float = 1.0) -> float:
    return worth if prompt["extra_env_info"]["level"] == level else 0.0


def test_a_custom_function() -> None:
    path = f"{__name__}:only_of"
    assert set(play(stream(path=path, options={"level": "hard"}), 25)) == {"hard"}
    with pytest.raises(SamplerError, match="only_of: returned 2.0; a probability is needed"):
        stream(path=path, options={"level": "hard", "worth": 2.0}).take(1)
    with pytest.raises(SamplerError, match=r"data\.sampler\.path"):
        stream(path=f"{__name__}:missing")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"thresholds": [0.5, 1.0]}, "2 thresholds for 3 weights"),
        ({"thresholds": [0.5, 0.2, 1.0]}, "must rise to 1"),
        ({"thresholds": [0.2, 0.5, 0.9]}, "must rise to 1"),
        ({"weights": [0.0, 0.0, 0.0]}, "one of them must be above 0"),
        ({"name": "easy"}, "Input should be 'difficulty'"),
    ],
)
def test_wrong_keys(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplerConfig.model_validate(keys)
