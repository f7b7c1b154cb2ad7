"""Every field of an environment's return is checked where it arrives, at the cost of that sample alone."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from grpo_mcore.rollout.trajectory import Trajectory, Turn, fingerprint

GOOD: dict[str, Any] = {
    "observations": {"role": "tool", "content": "ok"},
    "metadata": {"turn": 1},
    "next_stop_strings": ["</x>"],
    "rewards": 0.5,
    "terminateds": False,
    "answers": "5",
    "reasons": "right",
    "seconds": 0.25,
    "rewards_by_name": {"form": 1.0},
    "tracebacks": None,
    "failures": ["judge: HTTP 503"],
    "turn_rewards": [None, 0.25],
    "state_keys": "b4",
}


class Careless(EnvironmentInterface):
    """Returns what it is told to."""

    def __init__(self, rows: list[dict[str, Any]], **columns: Any) -> None:
        super().__init__({})
        self.columns = {field: [row[field] for row in rows] for field in EnvironmentReturn._fields} | columns

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        return EnvironmentReturn(**self.columns)


def advance(environment: Careless, count: int = 3) -> Any:
    turns = (Turn("user", torch.arange(3)), *[Turn("assistant", torch.arange(2), loss_mask=True)] * 2)
    trajectory = Trajectory("u", 0, turns, (), "stop", truncated=False)
    return environment.advance([{}] * count, *[trajectory] * count)


WRONG: list[tuple[str, Any, str]] = [
    ("answers", {"a": 1}, "returned answers with {'a': 1}, which is not text but dict"),
    ("answers", ["5"], "answers with .*, which is not text but list"),
    ("answers", True, "answers with True"),
    ("reasons", 7, "reasons with 7, which is not text but int"),
    ("rewards", "1.0", "rewards with '1.0', which is not a finite number"),
    ("rewards", float("nan"), "rewards with nan, which is not a finite number"),
    ("rewards", [1.0], r"rewards|must be real number"),
    ("rewards_by_name", {"form": float("inf")}, r"rewards_by_name\['form'\] with inf"),
    ("rewards_by_name", [1.0], "rewards_by_name with .*, which is not a mapping but list"),
    ("terminateds", None, "terminateds with None, which is neither true nor false"),
    ("terminateds", "no", "terminateds with 'no', which is neither true nor false"),
    ("observations", "text", "observations with 'text', which is not a mapping but str"),
    ("observations", {"role": "tool", "content": {5}}, "set is not JSON serializable"),
    ("observations", {"role": None, "content": "x"}, r"observations\[\].role with None, which is no role"),
    ("observations", {"content": "\ud83d"}, r"an observation that is no Unicode: half a surrogate pair, \\ud83d"),
    ("next_stop_strings", "</x>", "next_stop_strings with .</x>.; a list of non-empty strings is needed"),
    ("next_stop_strings", [""], "a list of non-empty strings is needed"),
    ("next_stop_strings", [3], "a list of non-empty strings is needed"),
    ("next_stop_strings", 3, "not iterable"),
    ("metadata", [1], "metadata with .*, which is not a mapping but list"),
    ("seconds", "fast", "seconds with 'fast', which is not a finite number"),
    ("tracebacks", 3, "tracebacks with 3, which is not text but int"),
    ("failures", "busy", "failures with .busy.; a list of strings is needed"),
    ("failures", [503], "failures with 503, which is not text but int"),
    ("turn_rewards", [0.5], "turn_rewards with 1 entries for the 2 turns of the policy"),
    ("turn_rewards", [0.5, None, 1], "turn_rewards with 3 entries for the 2 turns"),
    ("turn_rewards", [0.5, "1"], r"turn_rewards\[1\] with '1', which is not a finite number"),
    ("turn_rewards", float("nan"), r"turn_rewards\[1\] with nan, which is not a finite number"),
    ("turn_rewards", {"a": 1}, "must be real number"),
    ("state_keys", 3, "state_keys with 3, which is not text but int"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG, ids=lambda value: str(value)[:20])
def test_a_wrong_field_costs_its_own_sample(field: str, value: Any, message: str) -> None:
    before, wrong, after = advance(Careless([GOOD, GOOD | {field: value}, GOOD]))
    assert wrong.reward is None and wrong.terminated
    assert wrong.reason.startswith("Careless returned ")
    assert re.search(message, wrong.reason), wrong.reason
    for fine in (before, after):
        assert (fine.reward, fine.answer, fine.reason, fine.terminated) == (0.5, "5", "right", False)
        assert (fine.observation, fine.role, fine.stop_strings) == ("ok", "tool", ("</x>",))
        assert (fine.metadata, fine.rewards_by_name, fine.seconds) == ({"turn": 1}, {"form": 1.0}, 0.25)


def test_an_observation_may_be_a_value_as_a_result_in_data_may() -> None:
    values = [{"temperature": 21}, [{"row": 1}], 5]
    outcomes = advance(Careless([GOOD | {"observations": {"role": "tool", "content": value}} for value in values]))
    assert [outcome.observation for outcome in outcomes] == ['{"temperature": 21}', '[{"row": 1}]', "5"]


class Exiting(EnvironmentInterface):
    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        sys.exit(3)


def test_none_as_a_reward_says_what_it_means() -> None:
    """Environments of other frameworks give it to each turn but the last: the run ended without a reason."""
    row = GOOD | {"rewards": None, "reasons": None}
    said, silent = advance(Careless([row | {"reasons": "the judge is down"}, row]), 2)
    assert (said.reward, said.reason) == (None, "the judge is down")
    assert (
        silent.reason == "Careless returned None as the reward: it could not score the turn (0.0: a turn without one)"
    )


def test_a_step_that_exits_is_an_error_with_its_place() -> None:
    with pytest.raises(RuntimeError, match=r"Exiting.step called sys.exit\(3\) \(.*test_returns.py:\d+\)"):
        advance(Exiting(), 1)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    row = GOOD | {
        "answers": np.int64(5), "rewards": torch.tensor(0.5), "terminateds": np.bool_(True),
        "rewards_by_name": {"form": np.float32(1.0)}, "seconds": np.float64(2.0),
    }  # fmt: skip
    (outcome, other) = advance(Careless([row, GOOD | {"answers": 5}]), 2)
    assert (outcome.answer, outcome.reward, outcome.terminated, outcome.seconds) == ("5", 0.5, True, 2.0)
    assert type(outcome.reward) is float and other.answer == "5"
    whole = Careless([GOOD] * 2, rewards=torch.tensor([1.0, 0.0]), terminateds=np.array([True, False]))
    assert [(one.reward, one.terminated) for one in advance(whole, 2)] == [(1.0, True), (0.0, False)]


def test_a_number_is_the_reward_of_the_last_turn_and_without_a_key_the_tokens_before_it_are_its_state() -> None:
    rows = [GOOD, GOOD | {"turn_rewards": torch.tensor(2.0), "state_keys": None}, GOOD | {"turn_rewards": None}]
    listed, number, nothing = advance(Careless(rows))
    assert (listed.turn_rewards, number.turn_rewards, nothing.turn_rewards) == ((None, 0.25), (None, 2.0), ())
    assert number.turn_states == (fingerprint([0, 1, 2, 0, 1]),)
    assert listed.turn_states == nothing.turn_states != number.turn_states


def test_text_that_is_only_shown_is_made_printable() -> None:
    (outcome,) = advance(Careless([GOOD | {"answers": "\ud83d", "reasons": "x\udc00"}]), 1)
    assert (outcome.answer, outcome.reason, outcome.reward) == ("\ufffd", "x\ufffd", 0.5)


@pytest.mark.parametrize("field", EnvironmentReturn._fields)
def test_a_field_of_another_length_is_refused_with_its_name(field: str) -> None:
    """Whose entry is whose is unknown then: the samples are asked about one by one."""
    with pytest.raises(ValueError, match=f"step returned 2 {field} for 3 conversations"):
        advance(Careless([GOOD] * 3, **{field: [GOOD[field]] * 2}))
    with pytest.raises(ValueError, match=f"step returned {field} of type"):
        advance(Careless([GOOD] * 3, **{field: 5}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"answers": itertools.repeat(None)}, "step returned more than 2 answers for 2 conversations"),
        ({"rewards": {0.0, 1.0}}, "step returned rewards of type set; a list is needed"),
    ],
)
def test_iterators_without_an_end_and_sets_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        advance(Careless([GOOD] * 2, **changes), 2)


def test_what_a_return_leaves_out_has_a_default() -> None:
    (outcome,) = advance(Careless([GOOD], seconds=None, rewards_by_name=None, tracebacks=None), 1)
    assert outcome.rewards_by_name == {} and outcome.seconds >= 0 and outcome.traceback is None


class Waiting(Careless):
    """Waits for others of its calls, as for a service; exits if it is told to."""

    together = threading.Barrier(2, timeout=30)
    loops: ClassVar[set[int]] = set()

    async def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:  # type: ignore[override]
        self.loops.add(id(asyncio.get_running_loop()))
        await asyncio.to_thread(self.together.wait)
        if self.columns["reasons"] == ["exit"]:
            sys.exit(3)
        return super().step(message_log_batch, metadata)


def test_a_step_may_be_async() -> None:
    """Its clients are bound to an event loop: all calls have the same one."""
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            outcomes = pool.map(lambda _: advance(Waiting([GOOD]), 1), range(2))
            assert [outcome.reward for (outcome,) in outcomes] == [0.5, 0.5]
        calls = [pool.submit(advance, Waiting([GOOD | {"reasons": "exit"}]), 1) for _ in range(2)]
        for call in calls:
            with pytest.raises(RuntimeError, match=r"Waiting.step called sys.exit\(3\)"):
                call.result()
    assert len(Waiting.loops) == 1
