"""When a sample goes on, with what, and what it has earned: its life is resumed by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_mcore.rollout.life import Life, OpenGroup, OpenSample, Rules, ScoreTurn, TurnLimits, Wait, life_of
from grpo_mcore.rollout.trajectory import (
    AgentRequest,
    GenerationRequest,
    Outcome,
    Sampling,
    Score,
    TrajectoryRef,
    Turn,
    sample_seed,
)

LIMITS = TurnLimits(max_turns=3, max_model_len=20)
FIRST = TrajectoryRef("p", 2, 10, 6, 4, 1, False, "stop", ref="first", turns=1, stop_token=9)
GOES_ON = Outcome(0.25, "a", "why", 0.5, terminated=False, observation="more")


class Template:
    """Every message has `length` tokens."""

    def __init__(self, length: int = 3) -> None:
        self.length, self.calls = length, list[tuple[str, str, int | None]]()

    def turn(self, text: str, role: str, stop_token: int | None) -> Turn:
        self.calls.append((text, role, stop_token))
        return Turn(role, torch.arange(self.length))


def group(template: Template, limits: TurnLimits = LIMITS) -> OpenGroup:
    message: Any = {"role": "user", "content": "?", "token_ids": torch.arange(6)}
    row: Any = {
        "uid": "p", "length": 6, "message_log": [message], "extra_env_info": {"state": [0]}, "stop_strings": ["stop"],
    }  # fmt: skip
    return OpenGroup(row, 7, Sampling(8), Rules(limits, 5, lambda _row, *said: (template.turn(*said), {})), 4)


def after(outcome: Outcome, trajectory: TrajectoryRef = FIRST, template: Template | None = None) -> Wait | tuple:
    """Return what a sample waits for after its first turn, or how it ends."""
    life = life_of(group(template or Template()), 2)
    next(life)
    life.send(trajectory)
    return resumed(life, outcome)


def resumed(life: Life, result: Any) -> Any:
    try:
        return life.send(result)
    except StopIteration as end:
        return end.value


def test_a_life_of_three_turns() -> None:
    template = Template()
    life = life_of(group(template), 2)
    request = next(life)
    assert request == GenerationRequest("p", 2, request.prompt, sample_seed(5, 7, "p", 2), ("stop",))  # type: ignore[union-attr]
    assert [(turn.role, turn.text, len(turn)) for turn in request.prompt] == [("user", "?", 6)]  # type: ignore[union-attr]
    for turns in (1, 2, 3):
        trajectory = replace(FIRST, turns=turns, ref=f"turn {turns}")
        wait: Any = life.send(trajectory)
        assert type(wait) is ScoreTurn and wait.trajectory is trajectory and wait.metadata == {"state": [0]}
        assert wait.is_last == (turns == 3)
        request = resumed(life, GOES_ON)
        if turns < 3:
            seed = sample_seed(5, 7, "p", 2, turns)
            assert request == GenerationRequest("p", 2, request.prompt, seed, ("stop",), continues=f"turn {turns}")
    assert request == (trajectory, Score(0.75, "a", "why", 1.5, terminated=False, step_rewards=(0.25,) * 3))
    assert template.calls == [("more", "user", 9)] * 2


def test_a_later_call_may_score_earlier_turns() -> None:
    life = life_of(group(Template()), 0)
    next(life)
    scored: list[tuple[tuple[float | None, ...], str]] = [((None,), "a"), ((), "b"), ((0.5, None, 2.0), "c")]
    for turns, (rewards, state) in enumerate(scored, start=1):
        life.send(replace(FIRST, turns=turns))
        end = resumed(life, replace(GOES_ON, turn_rewards=rewards, turn_states=(state,)))
    _, score = end
    assert score.turn_rewards == (0.5, None, 2.0) and score.turn_states == ("a", "b", "c")
    assert score.step_rewards == (0.25, 0.25, 0.25)


def test_a_sample_has_its_own_state_where_it_has_several_turns() -> None:
    for turns, own in ((1, False), (2, True)):
        open_group = group(Template(), TurnLimits(turns, 20))
        life = life_of(open_group, 0)
        next(life)
        metadata: Any = life.send(FIRST).metadata  # type: ignore[union-attr]
        assert (metadata is not open_group.prompt["extra_env_info"]) == own


def test_agents_take_all_turns() -> None:
    open_group = group(Template())
    open_group.has_agents = True
    open_group.prompt["extra_env_info"]["agent_task"] = {"question": "?"}
    open_group.prompt["idx"] = 4
    life = life_of(open_group, 2)
    assert next(life) == AgentRequest("p", 2, {"question": "?"}, 4, sample_seed(5, 7, "p", 2))
    assert resumed(life, ("trajectory", "score")) == ("trajectory", "score")


def test_a_sample_that_is_dropped_waits_for_nothing() -> None:
    sample = OpenSample(group(Template()), 1)
    assert sample.key == ("p", 1) and sample.wait is not None
    sample.drop()
    assert sample.wait is None and sample.life.gi_frame is None  # type: ignore[attr-defined]


def test_a_sample_goes_on_with_what_the_environment_says() -> None:
    template = Template()
    life = life_of(group(template), 2)
    next(life)
    life.send(FIRST)
    request = life.send(replace(GOES_ON, stop_strings=("other",), metadata={"state": 1}, role="tool"))
    assert isinstance(request, GenerationRequest)
    assert request.stop_strings == ("other",) and request.prompt[0].role == "tool"
    assert life.send(FIRST).metadata == {"state": 1}  # type: ignore[union-attr]


def test_what_the_environment_leaves_open_stays_as_it_was() -> None:
    for changes, stop_strings, metadata in (
        ({}, ("stop",), {"state": [0]}),
        ({"stop_strings": (), "metadata": {}}, (), {}),
    ):
        life = life_of(group(Template()), 2)
        next(life)
        life.send(FIRST)
        request: Any = life.send(replace(GOES_ON, **changes))
        assert request.stop_strings == stop_strings
        assert life.send(FIRST).metadata == metadata  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sample", "outcome"),
    [
        ({}, {"terminated": True}),
        ({}, {"reward": None}),
        ({}, {"reward": math.nan}),
        ({"finish_reason": "abort"}, {}),
        ({"finish_reason": "length", "truncated": True}, {}),
        ({"turns": 3}, {}),
        ({"turns": 3}, {"observation": None}),
    ],
    ids=["terminated", "failed", "no number", "aborted", "truncated", "no turn left", "nothing left to say"],
)
def test_a_sample_ends(sample: dict, outcome: dict) -> None:
    trajectory, score = after(replace(GOES_ON, **outcome), replace(FIRST, **sample))  # type: ignore[misc]
    assert trajectory == replace(FIRST, **sample)
    assert score.terminated == (outcome == {"terminated": True})
    assert type(score) is Score  # nothing of the environment's next turn is kept


@pytest.mark.parametrize(("length", "fits"), [(8, True), (9, True), (10, False), (11, False)])
def test_the_next_turn_must_leave_room_for_a_token(length: int, fits: bool) -> None:
    """10 tokens so far, a context of 20: what is said may take 9 of them."""
    end = after(GOES_ON, template=Template(length))
    if fits:
        assert isinstance(end, GenerationRequest) and len(end.prompt[0]) == length
    else:
        trajectory, score = end  # type: ignore[misc]
        assert trajectory == replace(FIRST, truncated=True, finish_reason="length")
        assert score.reward == 0.25  # what it has earned stays


def test_rewards_add_up_over_turns() -> None:
    life = life_of(group(Template()), 2)
    next(life)
    life.send(FIRST)
    life.send(replace(GOES_ON, rewards_by_name={"a": 1.0, "b": 2.0}))
    life.send(replace(FIRST, turns=2))
    life.send(replace(GOES_ON, reward=-1.0, rewards_by_name={"b": 0.5, "c": 4.0}))
    life.send(replace(FIRST, turns=3))
    last = Outcome(1.0, "the answer", "the end", 0.25, {}, terminated=True, solved_at=0.2)
    _, score = resumed(life, last)
    by_name = {"a": 1.0, "b": 2.5, "c": 4.0}
    rewards = (0.25, -1.0, 1.0)
    assert score == Score(
        0.25, "the answer", "the end", 1.25, by_name, terminated=True, solved_at=0.2, step_rewards=rewards
    )
    assert score.solved


@pytest.mark.parametrize(
    ("sample", "outcome", "reason"),
    [
        ({"finish_reason": "abort"}, {}, "the engine aborted the sample"),
        ({}, {"reward": math.inf}, "the environment's reward is inf"),
        ({}, {"reward": None, "reason": "timed out"}, "timed out"),
    ],
    ids=["aborted", "no number", "failed"],
)
def test_a_turn_without_a_reward_leaves_none_for_the_sample(sample: dict, outcome: dict, reason: str) -> None:
    life = life_of(group(Template()), 2)
    next(life)
    life.send(FIRST)
    life.send(replace(GOES_ON, reward=1.0))
    life.send(replace(FIRST, turns=2, **sample))
    _, score = resumed(life, replace(GOES_ON, **outcome))
    assert (score.reward, score.reason) == (None, reason)


def test_an_environment_that_says_nothing_has_failed() -> None:
    _, score = after(replace(GOES_ON, observation=None))  # type: ignore[misc]
    assert score.reward is None
    assert score.reason.startswith("after turn 1 the environment neither ended the conversation nor said any")
    assert isinstance(after(replace(GOES_ON, observation="")), GenerationRequest)  # no words are words too
