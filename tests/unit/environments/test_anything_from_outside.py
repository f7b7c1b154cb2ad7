"""Answers, programs' results and Gym results of any form are scored, or fail with their reason: no exception."""

from __future__ import annotations

import copy
import math
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.sliding_puzzle.environment import SlidingPuzzleEnvironment
from examples.sliding_puzzle.puzzle import shuffled
from grpo_mcore.environments.agents.samples import AgentFailure
from grpo_mcore.environments.gym.gym_result import read_result
from grpo_mcore.environments.math.dapo import dapo_math_verify
from grpo_mcore.environments.math.multiple_choice import english_choice, multilingual_choice
from tests.fuzz import JSON, TEXTS, examples
from tests.unit.environments.gym.gym_results import TWO, result

ANSWERS = st.builds(
    lambda parts: "".join(parts),
    st.lists(
        TEXTS | st.sampled_from(["Answer: ", "\\boxed{", "}", "<action>", "</action>", "slide ", "(B)", "```python\n"]),
        max_size=8,
    ),
)


@pytest.mark.parametrize("verify", [dapo_math_verify, english_choice, multilingual_choice])
@examples(25)
@given(answer=ANSWERS)
def test_any_answer_is_verified(verify: Any, answer: str) -> None:
    start = time.perf_counter()
    reward, _ = verify(answer, "B")
    assert 0.0 <= abs(float(reward)) <= 1.0
    assert time.perf_counter() - start < 60.0


@examples(25)
@given(answer=ANSWERS)
def test_any_move_is_answered(answer: str) -> None:
    board, _ = shuffled(3, 4, random.Random(1))
    environment = SlidingPuzzleEnvironment({})
    returned = environment.step([[{"role": "assistant", "content": answer}]], [{"board": list(board)}])
    assert returned.rewards[0] in (0.0, 1.0) and isinstance(returned.observations[0]["content"], str)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list | tuple) else ()
    return [path] * bool(path) + [found for key in keys for found in places(value[key], (*path, key))]


WHOLE = result(*TWO, reward_components={"a": 1.0})


@examples(60)
@given(place=st.sampled_from(places(WHOLE)), value=JSON)
def test_any_gym_result_is_read_or_refused(place: tuple[Any, ...], value: Any) -> None:
    damaged = copy.deepcopy(WHOLE)
    inner = damaged
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        rollout = read_result(damaged, 1.0)
    except AgentFailure as failure:
        assert str(failure)
        return
    assert math.isfinite(rollout.score.reward or 0.0)
    spans = [[(1, 0, len(call.tokens))] for branch in rollout.branches for call in branch]
    assert rollout.trajectory("p0", 0, spans).uid == "p0"
