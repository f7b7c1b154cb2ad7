"""Asynchronous reward functions: together, with their limits; what fails, hangs or dies costs its own sample."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from grpo_mcore.environments import create_env
from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.rules.rule_environment import RuleEnvironment
from tests.unit.environments.rules import rule_functions

pytestmark = pytest.mark.slow  # processes that are started and killed

MODULE = "tests.unit.environments.rules.judges"


@contextmanager
def rules(timeout_s: float = 1.0, **functions: dict[str, Any]) -> Iterator[EnvironmentInterface]:
    """An environment with these functions of `judges`, by their names."""
    parts = {name: {"type": "function", "path": f"{MODULE}:{name}"} | keys for name, keys in functions.items()}
    env = create_env("rules", {"components": parts, "timeout_s": timeout_s, "num_workers": 1})
    assert isinstance(env, EnvironmentInterface)
    try:
        yield env
    finally:
        env.shutdown()


def score(env: EnvironmentInterface, *responses: str, **columns: Any) -> EnvironmentReturn:
    conversations = [[{"role": "assistant", "content": response}] for response in responses]
    return env.step(conversations, [columns] * len(responses))


def test_calls_wait_together_up_to_their_limit() -> None:
    with rules(counted={"concurrency": 12}) as env:
        assert max(reward or 0.0 for reward in score(env, *"abcdefghijklmnopqrstuvwxyz").rewards) == 12.0


def test_an_attempt_that_fails_is_repeated_and_counted() -> None:
    with rules(as_told={"retries": 2, "backoff_s": 0.01}) as env:
        result = score(env, "503 2", "fine", "429 1", "503 9", "404 1", "mistake", "nan", "none", "thread")
    assert result.rewards == [3.0, 0.5, 2.0, None, None, None, None, None, 7.0]
    assert result.failures == [
        ["as_told: HTTP 503"] * 2, [], ["as_told: HTTP 429"], ["as_told: HTTP 503"] * 3, ["as_told: HTTP 404"],
        ["as_told: TypeError"], ["as_told: its value is nan"], [], [],
    ]  # fmt: skip
    assert result.reasons[3].startswith("component 'as_told' crashed: Busy: HTTP 503 (")
    assert result.reasons[6] == "component 'as_told' crashed: its value is nan, 4 answers lost"
    assert result.reasons[7] == "no component applies to this sample, all returned None: as_told"


def test_a_repetition_has_columns_of_its_own() -> None:
    with rules(takes_rubric={"backoff_s": 0.01}) as env:
        result = score(env, "a", rubric=[4])
    assert result.rewards == [4.0] and result.failures == [["takes_rubric: ConnectionError"]]


def test_an_answer_that_hangs_costs_itself() -> None:
    with rules(as_told={"timeout_s": 1.0, "retries": 0}) as env:
        result = score(env, "fine", "sleep", "backtrack", "wait", "fine as well")
    assert result.rewards == [0.5, 0.0, 0.0, None, 0.5]
    assert result.reasons[1] == result.reasons[2] == "timed out after 1 s"
    assert result.failures is not None and result.failures[3] == ["as_told: TimeoutError"]


def test_an_answer_that_ends_the_program_costs_itself() -> None:
    """Also one that another thread asks about at the same time."""
    with rules(as_told={}) as env:
        other = threading.Thread(target=score, args=(env, "exit", "fine"))
        other.start()
        result = score(env, "fine", "exit", "fine as well")
        other.join()
    assert result.rewards == [0.5, None, 0.5]
    assert result.reasons[1] == "crashed: it ended its process"


def test_an_answer_on_which_a_judge_quits_costs_itself() -> None:
    """SystemExit in a task ends an event loop, which cancels all that wait in it."""
    with rules(as_told={"retries": 0}) as env:
        result = score(env, "fine", "quit", "thread", "quit-in-a-task", "fine as well")
    assert result.rewards == [0.5, None, 7.0, None, 0.5]
    assert "it raised SystemExit" in result.reasons[1] and result.reasons[3] == "crashed: it ended its process"


def test_a_call_with_the_same_arguments_is_made_once() -> None:
    with rules(number_of_call={"cache": True}) as env:
        first, second = score(env, "a", "b", "a", level=1), score(env, "b", "c", level=1)
        third = score(env, "a", level=2)
    values = first.rewards + second.rewards + third.rewards
    assert values[0] == values[2] and values[1] == values[3] and len(set(values)) == 4


def test_requests_per_second() -> None:
    with rules(start_time={"requests_per_second": 20}) as env:
        times = sorted(reward or 0.0 for reward in score(env, *"abcdef").rewards)
    assert times[-1] > 5 * 0.05 * 0.98


def test_asynchronous_and_other_rules_make_one_reward_and_a_judge_is_not_asked_in_vain() -> None:
    parts = {
        "judge": {"type": "function", "path": f"{MODULE}:number_of_call", "weight": 0.5},
        "told": {"type": "function", "path": f"{rule_functions.__name__}:as_told"},
    }
    env = create_env("rules", {"components": parts, "num_workers": 1})
    assert isinstance(env, EnvironmentInterface)
    try:
        result = score(env, "fine", "raise", "fine as well")
    finally:
        env.shutdown()
    assert result.rewards[1] is None and {result.rewards[0], result.rewards[2]} == {1.0, 1.5}
    assert result.rewards_by_name is not None and list(result.rewards_by_name[0]) == ["judge", "told"]
    assert result.failures == [[], ["told: RuntimeError"], []]


@pytest.mark.parametrize("name", ["imports_late", "imports_late_too"])
def test_what_a_function_imports_is_off_the_samples_clock(name: str) -> None:
    with rules(0.5, **{name: {} if name == "imports_late" else {"timeout_s": 0.5, "retries": 0}}) as env:
        assert score(env, "a").rewards == [1.0]


def test_limits_are_for_asynchronous_functions_and_calls_are_small() -> None:
    def section(function: str, **keys: Any) -> dict[str, Any]:
        return {"components": {"it": {"type": "function", "path": f"{MODULE}:{function}", **keys}}}

    with pytest.raises(EnvironmentConfigError, match="the key retries is for async functions, and .*judges:waits' is"):
        RuleEnvironment.check(section("waits", retries=2))
    RuleEnvironment.check(section("counted", retries=2))
    assert RuleEnvironment.call_limits(section("counted", concurrency=100)) == (132, 4)
    assert RuleEnvironment.call_limits(section("waits")) == (32, 32)
