"""When a sample goes on, with what, and what it has earned."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_mcore.rollout.conversation import Conversation, TurnLimits
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Score, TrajectoryRef, Turn

LIMITS = TurnLimits(max_turns=3, max_model_len=20)
FIRST = TrajectoryRef("p", 2, 10, 6, 4, 1, False, "stop", ref="first", turns=1, stop_token=9)
GOES_ON = Outcome(0.25, "a", "why", 0.5, terminated=False, observation="more")


def said(length: int) -> Turn:
    return Turn("user", torch.arange(length))


def conversation(sample: TrajectoryRef = FIRST) -> Conversation:
    return Conversation({"state": 0}, ("stop",), sample)


def test_a_sample_goes_on_with_what_the_environment_says() -> None:
    one = conversation()
    outcome = replace(GOES_ON, stop_strings=("other",), metadata={"state": 1})
    assert one.judged(outcome, LIMITS) and not one.over
    assert one.metadata == {"state": 1}
    request = one.next_request(said(3), 77, LIMITS)
    assert request == GenerationRequest("p", 2, (said(3),), 77, ("other",), continues="first")


def test_what_the_environment_leaves_open_stays_as_it_was() -> None:
    one = conversation()
    assert one.judged(GOES_ON, LIMITS)
    assert (one.metadata, one.stop_strings) == ({"state": 0}, ("stop",))
    one = conversation()
    assert one.judged(replace(GOES_ON, stop_strings=(), metadata={}), LIMITS)
    assert (one.metadata, one.stop_strings) == ({}, ())


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
    one = conversation(replace(FIRST, **sample))
    assert not one.judged(replace(GOES_ON, **outcome), LIMITS)
    assert one.over and one.score is not None
    assert one.score.terminated == (outcome == {"terminated": True})
    assert type(one.score) is Score  # nothing of the environment's next turn is kept


@pytest.mark.parametrize(("length", "fits"), [(8, True), (9, True), (10, False), (11, False)])
def test_the_next_turn_must_leave_room_for_a_token(length: int, fits: bool) -> None:
    """10 tokens so far, a context of 20: what is said may take 9 of them."""
    one = conversation()
    assert one.judged(GOES_ON, LIMITS)
    request = one.next_request(said(length), 1, LIMITS)
    assert (request is not None) == fits and one.over == (not fits)
    assert one.sample == (FIRST if fits else replace(FIRST, truncated=True, finish_reason="length"))
    assert one.score is not None and one.score.reward == 0.25  # what it has earned stays


def test_rewards_add_up_over_turns() -> None:
    one = conversation()
    assert one.judged(replace(GOES_ON, rewards_by_name={"a": 1.0, "b": 2.0}), LIMITS)
    one.sample = replace(FIRST, turns=2)
    assert one.judged(replace(GOES_ON, reward=-1.0, rewards_by_name={"b": 0.5, "c": 4.0}), LIMITS)
    one.sample = replace(FIRST, turns=3)
    last = Outcome(1.0, "the answer", "the end", 0.25, {}, terminated=True, solved_at=0.2)
    assert not one.judged(last, LIMITS)
    by_name = {"a": 1.0, "b": 2.5, "c": 4.0}
    assert one.score == Score(0.25, "the answer", "the end", 1.25, by_name, terminated=True, solved_at=0.2)
    assert one.score.solved


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
    one = conversation()
    assert one.judged(replace(GOES_ON, reward=1.0), LIMITS)
    one.sample = replace(FIRST, turns=2, **sample)
    assert not one.judged(replace(GOES_ON, **outcome), LIMITS)
    assert one.score is not None and (one.score.reward, one.score.reason) == (None, reason)


def test_an_environment_that_says_nothing_has_failed() -> None:
    silent = conversation()
    assert not silent.judged(replace(GOES_ON, observation=None), LIMITS) and silent.over
    assert silent.score is not None and silent.score.reward is None
    assert silent.score.reason.startswith("after turn 1 the environment neither ended the conversation nor said any")
    one = conversation()
    assert one.judged(replace(GOES_ON, observation=""), LIMITS)  # no words are words too
