"""The parts of a trace of verifiers that are trained: its calls as the endpoint has recorded them, and its reward."""

from types import SimpleNamespace as Made
from typing import Any

import pytest

from grpo_mcore.environments.agents.samples import AgentFailure
from grpo_mcore.environments.verifiers import config
from grpo_mcore.environments.verifiers.config import VerifiersConfig
from grpo_mcore.environments.verifiers.environment import VerifiersEnvironment, _calls, _reward, _stage_of
from grpo_mcore.recipe import environment_class


def call(continues: int | None, prompt: list[int], generated: list[int], request: int = 9) -> dict[str, Any]:
    logprobs = [-0.5] * len(generated)
    return {
        "request": request,
        "continues": continues,
        "prompt": prompt,
        "generated": generated,
        "logprobs": logprobs,
        "text": "",
    } | {"weight_versions": [[1, 0, len(prompt) + len(generated)]]}


def trace(*sizes: tuple[int, int] | None, **fields: Any) -> Any:
    """Return a trace with turns of these (prompt, generated) tokens; None: one whose usage is not known."""
    usages = [size and Made(input_tokens=size[0], completion_tokens=size[1]) for size in sizes]
    spans = {name: Made(start=0.0, end=0.0) for name in ("boot", "setup", "agent", "finalize", "scoring")}
    for name in fields.pop("begun", ["boot", "setup", "agent", "finalize", "scoring"]):
        spans[name].start = 5.0
    plain = {
        "rewards": {"right": Made(value=1.0)},
        "ok": True,
        "errors": [],
        "is_timeout": False,
        "stop_condition": "agent_completed",
        "reward": 1.0,
    }
    calls = [Made(node=number, usage=usage) for number, usage in enumerate(usages)]
    return Made(calls=calls, timing=Made(start=1.0, **spans), **plain | fields)


def kept(found: Any, *recorded: Any) -> list[list[int]]:
    return [one.tokens for one in _calls(found, recorded)[0]]


def test_prompts_are_put_together_from_what_they_continue() -> None:
    recorded = call(None, [1, 2], [3]), call(0, [4], [5, 6]), call(1, [7], [8])
    calls, versions, note = _calls(trace((2, 1), (4, 2), (7, 1)), recorded)
    assert [(one.prompt, one.generated) for one in calls] == [
        ([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6, 7], [8])
    ]  # fmt: skip
    assert versions == [recorded[number]["weight_versions"] for number in range(3)] and note == ""


def test_of_two_answers_to_one_request_the_agent_uses_one() -> None:
    twice = call(None, [1], [2, 2]), call(None, [1], [3]), call(1, [4], [5])
    assert kept(trace((1, 2), (1, 1), (3, 1)), *twice) == [[1, 3], [1, 3, 4, 5]]
    assert kept(trace((1, 2), (1, 1)), *twice[:2]) == [[1, 3]], "without a next turn, the last one"
    both = *twice, call(0, [4], [5])
    assert len(kept(trace((1, 2), (1, 1), (3, 1), (4, 1)), *both)) == 4, "it goes on from both"
    slow = call(None, [1], [3], request=2), call(None, [1], [2, 2], request=1)
    assert kept(trace((1, 2), (1, 1)), *slow) == [[1, 3]], "the first request is answered last"
    assert kept(trace((1, 2), (1, 1), (3, 1)), *slow, call(0, [4], [5])) == [[1, 3], [1, 3, 4, 5]]


def test_an_answer_that_came_too_late_is_left_out() -> None:
    late = call(None, [1], [2]), call(0, [3], [4, 4, 4])
    assert kept(trace((1, 1)), *late) == [[1, 2]]
    assert kept(trace((1, 1), None), *late) == [[1, 2], [1, 2, 3, 4, 4, 4]], "a stream that does not tell its usage"


@pytest.mark.parametrize(
    ("found", "recorded", "reason"),
    [
        (trace((1, 1), (5, 5)), [call(None, [1], [2])], "the trace has 1 turns that the policy's endpoint has not gen"),
        (trace(), [], "the agent has not asked the policy"),
        (trace(), [call(None, [1], [2])], "the agent has not asked the policy"),
    ],
)
def test_a_trace_that_contradicts_the_record_has_no_reward(found: Any, recorded: Any, reason: str) -> None:
    with pytest.raises(AgentFailure, match=reason):
        _calls(found, recorded)


def error(kind: str) -> Any:
    return Made(type=kind, message=f"{kind} \n happened")


@pytest.mark.parametrize(
    ("fields", "counted", "again"),
    [
        ({"ok": False, "errors": [error("SandboxError")], "begun": ["boot"]}, "set-up: SandboxError", True),
        ({"ok": False, "errors": [error("ProviderError")], "begun": ["setup", "agent"]}, "play: ProviderError", True),
        ({"ok": False, "errors": [error("HarnessError")], "begun": ["agent"]}, "play: HarnessError", False),
        ({"ok": False, "errors": [error("TaskError")]}, "score: TaskError", False),
        ({"is_timeout": True, "stop_condition": "setup_timeout"}, "set-up: timeout", False),
        ({"is_timeout": True, "stop_condition": "finalize_timeout"}, "finalize: timeout", False),
        ({"rewards": {}}, "score: no reward", False),
        ({"rewards": {"right": None}}, "score: no reward", False),
        ({"reward": float("inf")}, "score: no number", False),
    ],
)
def test_what_fails_is_named_by_its_stage(fields: dict[str, Any], counted: str, again: bool) -> None:
    with pytest.raises(AgentFailure) as raised:
        _reward(Made(ok=True, errors=[]), trace(**fields), 0.0)
    assert (raised.value.kind, raised.value.again) == (counted, again)
    assert str(raised.value).startswith(counted.partition(":")[0] + ":") and "\n" not in str(raised.value)


def test_rewards_after_a_deadline() -> None:
    fine = Made(ok=True, errors=[])
    assert _reward(fine, trace(), 0.0) == (1.0, ())
    played = trace(is_timeout=True, stop_condition="agent_timeout")
    assert _reward(fine, played, None) == (1.0, ("play: timeout",)), "it is scored as it stands"
    scored = trace(is_timeout=True, stop_condition="scoring_timeout", rewards={"right": None})
    assert _reward(fine, scored, 0.25) == (0.25, ("score: timeout",))
    with pytest.raises(AgentFailure, match="score: its deadline has ended it"):
        _reward(fine, scored, None)
    with pytest.raises(AgentFailure, match="EnvError"):
        _reward(Made(ok=False, errors=[error("EnvError")]), trace(), 0.0)


def test_the_stage_of_a_trace_is_the_last_that_has_begun() -> None:
    assert _stage_of(trace(begun=[])) == ("set-up", 1.0)
    assert _stage_of(trace(begun=["boot"])) == ("set-up", 1.0)
    assert _stage_of(trace(begun=["boot", "setup", "agent"])) == ("play", 5.0)
    over = trace()
    over.timing.scoring.end = 9.0
    assert _stage_of(over) == ("clean-up", 9.0)


def test_a_section_with_the_key_is_this_environment() -> None:
    section = {"verifiers": {"environment": "wordle"}, "start_timeout_s": 3}
    assert environment_class("my_game", section) == ("verifiers", section)
    limits = VerifiersConfig.read(section).stage_limits()
    assert limits == {"set-up": 3, "play": 600, "finalize": 600, "score": 600}
    assert VerifiersEnvironment.sample_timeout_s(section) > 3 * sum(limits.values())


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(config.EnvironmentConfigError, match=r"pip install 'grpo-mcore\[verifiers\]'"):
        VerifiersEnvironment.check({"verifiers": {"environment": "wordle"}})
