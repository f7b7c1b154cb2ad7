"""Components of a reward, one by one and as an environment."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.environments import create_env
from grpo_mcore.environments.interfaces import EnvironmentInterface
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.rules.reward_functions import Sample
from grpo_mcore.environments.rules.rule_environment import RuleEnvConfig, RuleEnvironment
from grpo_mcore.environments.rules.rules import make_rules
from grpo_mcore.rollout.trajectory import Trajectory, Turn
from tests.unit.environments.rules import rule_functions

FUNCTIONS = "tests.unit.environments.rules.rule_functions"


def value(rule: dict[str, Any], response: str, **info: Any) -> Any:
    found = make_rules({"it": rule})(Sample(response, info))
    return found["values"]["it"] if "values" in found else {name: found[name] for name in ("failed", "error")}


BOX = "[100, 100, 200, 200]"


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        (BOX, BOX, 1.0),
        ("150, 100, 250, 200", BOX, 1 / 3),  # no gap in the box around both
        ("[900, 900, 0, 0]", BOX, 0.0),  # crossed corners, whose area would be the product of two negative sides
        ("[0, 900, 900, 0]", BOX, 0.0),
        ("[nan, 0, 1, 1]", BOX, 0.0),
        ("[0, 0, inf, inf]", BOX, 0.0),
        (BOX, "[200, 200, 100, 100]", 0.0),
    ],
)
def test_a_box_is_upright(answer: str, truth: str, reward: float) -> None:
    found = value({"type": "bbox_giou"}, f"<answer>{answer}</answer>", ground_truth=truth)
    assert found == pytest.approx(reward)


def test_each_of_the_reward_functions_has_its_own_name() -> None:
    twice = [{"name": "format", "weight": 0.2}, {"name": "format", "weight": 0.8}]
    with pytest.raises(EnvironmentConfigError, match="reward_functions has a name twice: format"):
        RuleEnvConfig.read({"reward_functions": twice})


@pytest.mark.parametrize(
    ("rule", "response", "expected"),
    [
        ({"type": "regex", "pattern": r"\d+"}, "42", 1.0),
        ({"type": "regex", "pattern": r"\d+"}, "42.", 0.0),
        ({"type": "regex", "pattern": r"\d+", "match": "search"}, "it is 42.", 1.0),
        ({"type": "length", "min": 2, "max": 3}, "ab", 1.0),
        ({"type": "length", "min": 2, "max": 3}, "abc", 1.0),
        ({"type": "length", "min": 2, "max": 3}, "abcd", 0.0),
        ({"type": "length", "min": 2}, "a", 0.0),
        ({"type": "length", "unit": "words", "max": 2}, " a  b\n", 1.0),
        ({"type": "length", "unit": "lines", "min": 2}, "a\nb", 1.0),
        ({"type": "contains", "all": ["a", "b"]}, "b a", 1.0),
        ({"type": "contains", "all": ["a", "b"]}, "b", 0.0),
        ({"type": "contains", "any": ["a", "b"]}, "b", 1.0),
        ({"type": "contains", "any": ["a", "b"]}, "c", 0.0),
        ({"type": "contains", "all": ["a"], "none": ["sorry"]}, "a, sorry", 0.0),
        ({"type": "contains", "all": ["Straße"], "ignore_case": True}, "STRASSE", 1.0),
        ({"type": "contains", "all": ["A"]}, "a", 0.0),
        ({"type": "function", "path": f"{FUNCTIONS}:share_of_words"}, "a b", 2 / 3),
        ({"type": "verifier", "verifier": "dapo_math_verify"}, "Answer: 5", 1.0),
        ({"type": "verifier", "verifier": "dapo_math_verify"}, "Answer: 6", -1.0),
        ({"type": "verifier", "verifier": "english_multichoice"}, "Answer: A", {
            "failed": "it",
            "error": "ValueError: the ground truth of a multiple choice is a letter from A to J, got '5'; "
            "verifier_type: math compares numbers",
        }),
        ({"type": "function", "path": f"{FUNCTIONS}:nan"}, "", {"failed": "it", "error": "its value is nan"}),
    ],
)  # fmt: skip
def test_a_component(rule: dict[str, Any], response: str, expected: Any) -> None:
    assert value(rule, response, ground_truth=5, words=["a", "b", "c"]) == expected


def test_what_a_function_changes_in_its_columns_others_do_not_see() -> None:
    parts = {name: {"type": "function", "path": f"{FUNCTIONS}:takes_words"} for name in ("one", "two")}
    parts["share"] = {"type": "function", "path": f"{FUNCTIONS}:share_of_words"}
    sample = Sample("a b", {"words": ["a", "b", "c"]})
    for _ in range(2):
        assert make_rules(parts)(sample)["values"] == {"one": 3.0, "two": 3.0, "share": 2 / 3}


THINKS = "<think>maybe 6, damn</think>so <answer>5</answer>"


@pytest.mark.parametrize(
    ("rule", "response", "expected"),
    [
        ({"type": "regex", "pattern": r"5"}, THINKS, 1.0),
        ({"type": "regex", "pattern": r"6", "match": "search"}, THINKS, 0.0),
        ({"type": "regex", "pattern": r"6", "match": "search", "of": "response"}, THINKS, 1.0),
        ({"type": "regex", "pattern": r"(?s)<think>.*</think>.*"}, THINKS, 1.0),  # it names a mark: all of the text
        ({"type": "regex", "pattern": r"(?s)<(?:think|thinking)>.*"}, THINKS, 1.0),
        ({"type": "regex", "pattern": r"(?s)<think>.*</think>.*", "of": "answer"}, THINKS, 0.0),
        ({"type": "regex", "pattern": "damn|reasonable", "match": "search"}, THINKS, 0.0),  # a word, no mark
        ({"type": "regex", "pattern": r".*"}, "<think>5", 0.0),
        ({"type": "length", "max": 1}, THINKS, 1.0),
        ({"type": "length", "max": 1, "of": "response"}, THINKS, 0.0),
        ({"type": "length", "max": 100}, "<think>5", 0.0),
        ({"type": "contains", "none": ["damn"]}, THINKS, 1.0),
        ({"type": "contains", "none": ["damn"], "of": "response"}, THINKS, 0.0),
        ({"type": "contains", "none": ["damn"]}, "<think>5", 0.0),
        ({"type": "verifier", "verifier": "hf_math_verify"}, THINKS, 1.0),
        ({"type": "verifier", "verifier": "hf_math_verify"}, "<think>5</think><answer>6</answer>", 0.0),
        ({"type": "verifier", "verifier": "hf_math_verify"}, "<think>5", 0.0),
        ({"type": "function", "path": f"{FUNCTIONS}:thought_and_reply"}, THINKS, 1.0),
        ({"type": "function", "path": "grpo_mcore.environments.rules.instructions:followed"}, THINKS, 1.0),
    ],
)
def test_a_component_sees_the_answer_without_the_thought(rule: dict[str, Any], response: str, expected: float) -> None:
    short = [{"name": "length_constraints:number_words", "num_words": 2, "relation": "less than"}]
    assert value(rule, response, ground_truth=["4", 5], instructions=short) == expected


def test_the_prompt_may_open_the_thought_and_marks_may_be_ones_own() -> None:
    rule = {"it": {"type": "contains", "any": ["5"]}}
    prompt = {"role": "user", "content": "5?<bot><think>", "generated": False}
    answer = {"role": "assistant", "content": "5 ## 6", "generated": True}
    values = [
        make_rules(rule)(Sample.of([prompt, answer], {}, "5 ## 6", thoughts))["values"]["it"]
        for thoughts in ("auto", "none", ("<think>", "##"))
    ]
    assert values == [0.0, 1.0, 0.0]


def test_a_verifier_needs_a_truth() -> None:
    found = value({"type": "verifier", "verifier": "dapo_math_verify"}, "Answer: 5", level=1)
    assert found == {"failed": "it", "error": "ValueError: the prompt has no 'ground_truth', only ['level']"}


SECTION = {
    "num_workers": 2,
    "timeout_s": 1.0,
    "memory_gb": 1.0,
    "components": {
        "format": {"type": "regex", "pattern": r"<.*>|sleep|allocate|raise|inf|(a+)+b"},
        "short": {"type": "length", "max": 5, "weight": -0.5},
        "own": {"type": "function", "path": f"{FUNCTIONS}:as_told", "weight": 2.0},
    },
}


@pytest.fixture(scope="module")
def env() -> Iterator[EnvironmentInterface]:
    env = create_env("rules", SECTION)
    yield env
    env.shutdown()


def said(*texts: str) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]


def test_a_reward_and_its_parts(env: EnvironmentInterface) -> None:
    result = env.step(said("<a>", "a", "<abcdef>"), [{}] * 3)
    assert result.rewards == [1 - 0.5 + 1.0, 0 - 0.5 + 1.0, 1 - 0.0 + 1.0]
    assert result.rewards_by_name == [
        {"format": 1.0, "short": 1.0, "own": 0.5},
        {"format": 0.0, "short": 1.0, "own": 0.5},
        {"format": 1.0, "short": 0.0, "own": 0.5},
    ]
    assert result.reasons[0] == "format 1, short 1, own 0.5"
    assert result.terminateds == [True] * 3


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("allocate", "out of memory: more than 1 GiB"),
        ("raise", "component 'own' crashed: RuntimeError: not today"),
        ("inf", "component 'own' crashed: its value is inf"),
    ],
)
def test_a_sample_that_cannot_be_scored_has_no_reward(env: EnvironmentInterface, response: str, reason: str) -> None:
    result = env.step(said("<a>", response, "<b>"), [{}] * 3)
    assert result.rewards == [1.5, None, 1.5]
    assert re.sub(r" \(.*\)|, \d+ answers lost", "", result.reasons[1]) == reason
    assert result.rewards_by_name is not None and result.rewards_by_name[1] == {}


@pytest.mark.parametrize("response", ["sleep", "a" * 60])  # the pattern backtracks without end
def test_an_answer_that_hangs_a_rule_gets_0(env: EnvironmentInterface, response: str) -> None:
    result = env.step(said("<a>", response, "<b>"), [{}] * 3)
    assert result.rewards == [1.5, 0.0, 1.5]
    assert result.reasons[1] == "timed out after 1 s"
    assert result.rewards_by_name is not None
    assert result.rewards_by_name[1] == {"format": 0.0, "short": 0.0, "own": 0.0}
    left_out = copy.copy(env)
    left_out.config = RuleEnvConfig.read(SECTION | {"timeout_reward": None})
    assert left_out.step(said(response), [{}]).rewards == [None]


def test_a_component_that_does_not_apply_is_left_out() -> None:
    """TRL's example of several tasks: each function returns None for the rows of the others."""
    parts = {name: {"type": "function", "path": f"{FUNCTIONS}:{name}"} for name in ("math_reward", "coding_reward")}
    env = create_env("rules", {"num_workers": 1, "components": parts | {"coding_reward": {
        "type": "function", "path": f"{FUNCTIONS}:coding_reward", "weight": 2.0}}})  # fmt: skip
    assert isinstance(env, EnvironmentInterface)
    try:
        rows = [{"task": "math"}, {"task": "code"}, {"task": "poetry"}]
        result = env.step(said("42", "42", "42"), rows)
    finally:
        env.shutdown()
    assert result.rewards == [1.0, 1.0, None]
    assert result.rewards_by_name == [{"math_reward": 1.0}, {"coding_reward": 0.5}, {}]
    assert result.reasons == [
        "math_reward 1, length: 2, accuracy 1.0",
        "coding_reward 0.5",
        "no component applies to this sample, all returned None: math_reward, coding_reward",
    ]


def test_what_a_function_raised_says_where_and_how_many_answers_it_cost() -> None:
    own = {"type": "function", "path": f"{FUNCTIONS}:as_told"}
    env = create_env("rules", {"num_workers": 1, "components": {"own": own}})
    assert isinstance(env, EnvironmentInterface)
    try:
        first, second = env.step(said("raise"), [{}]), env.step(said("raise", "fine"), [{}] * 2)
    finally:
        env.shutdown()
    file = rule_functions.__file__
    line = next(n for n, text in enumerate(Path(file).read_text().splitlines(), 1) if "raise Runtime" in text)
    where = f"RuntimeError: not today ({file}:{line})"
    assert first.reasons == [f"component 'own' crashed: {where}"]
    assert second.reasons == [f"component 'own' crashed: {where}, 2 answers lost", "own 0.5"]
    assert first.tracebacks is not None and second.tracebacks == [None, None]
    shown = str(first.tracebacks[0])
    assert "Traceback (most recent call last)" in shown and f'rule_functions.py", line {line}' in shown


def test_a_function_sees_the_finish_reason_and_the_columns() -> None:
    own = {"type": "function", "path": f"{FUNCTIONS}:by_name"}
    env = create_env("rules", {"num_workers": 1, "components": {"it": own}})
    assert isinstance(env, EnvironmentInterface)
    trajectory = Trajectory(
        "a", 0, (Turn("user", torch.arange(3)), Turn("assistant", torch.arange(2), None, True, "x")), (), "length", True
    )
    try:
        [outcome] = env.advance([{"level": 3}], trajectory)
    finally:
        env.shutdown()
    assert outcome.reward == 3 + 2 / 10 + 3 / 100


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({}, "env.rules.components: Dictionary should have at least 1 item"),
        ({"a": {"kind": "regex"}}, "env.rules.components.a: the key 'type' is missing, got"),
        ({"a": {"type": "regexp", "pattern": ""}}, "env.rules.components.a: Input tag 'regexp' found"),
        ({"a": {"type": "regex"}}, "env.rules.components.a.regex.pattern: Field required"),
        (
            {"a": {"type": "regex", "pattern": "("}},
            "env.rules.components.a.regex.pattern: Value error, is not a regular",
        ),
        ({"a": {"type": "regex", "pattern": "", "max": 1}}, "env.rules.components.a.regex.max: Extra inputs are not"),
        ({"a": {"type": "length", "min": 2, "max": 1}}, "env.rules.components.a.length: Value error, max 1 is below"),
        ({"a": {"type": "contains"}}, "env.rules.components.a.contains: Value error, give strings in all, any or none"),
        (
            {"a": {"type": "length", "weight": float("nan")}},
            "env.rules.components.a.length.weight: Input should be a f",
        ),
    ],
)
def test_a_wrong_component_names_its_key(components: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError) as error:
        RuleEnvConfig.read({"components": components})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("path", "message"),
    [  # Such a class is a reward manager of verl's, or a rubric: each sample would get an instance for its reward.
        ("collections:OrderedDict", "is a class, no function; name an instance with __call__"),
        (f"{FUNCTIONS}:missing", "cannot import the reward function .*missing"),
    ],
)
def test_what_is_no_function_is_an_error_at_the_start(path: str, message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        RuleEnvironment({"components": {"own": {"type": "function", "path": path}}})
