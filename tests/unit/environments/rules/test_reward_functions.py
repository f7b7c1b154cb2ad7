"""A user's reward function gets what its parameters name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mcore.environments.interfaces import conversation, response_text
from grpo_mcore.environments.rules.reward_functions import Sample, reward_call
from grpo_mcore.rollout.trajectory import Trajectory, Turn

TURNS = (
    Turn("user", torch.arange(3), text="<user>6*7=<bot>"),
    Turn("assistant", torch.arange(2), torch.zeros(2), True, "6*7?"),
    Turn("tool", torch.arange(4), text="42"),
    Turn("assistant", torch.arange(5), torch.zeros(5), True, "42"),
)
TRAJECTORY = Trajectory("a", 0, TURNS, ((0, 0, 14),), "length", True)
INFO = {"ground_truth": "42", "level": 3, "messages": [{"role": "user", "content": "6*7="}]}
MESSAGES = conversation(TRAJECTORY)
SAMPLE = Sample.of(MESSAGES, INFO, response_text(MESSAGES))


def test_a_sample_has_all_of_the_conversation() -> None:
    assert (SAMPLE.prompt, SAMPLE.response) == ("<user>6*7=<bot>", "6*7?42")
    assert [turn["role"] for turn in SAMPLE.turns] == ["assistant", "tool", "assistant"]
    assert (SAMPLE.prompt_tokens, SAMPLE.response_tokens, SAMPLE.finish_reason) == (3, 7, "length")
    assert SAMPLE.messages == INFO["messages"]


def old(response: str, info: Any) -> float:
    return float(response.endswith(info["ground_truth"]))


def old_with_other_names(text: str, row: Any) -> float:
    return row["level"]


def by_name(
    response: str, ground_truth: str, finish_reason: str, *, truncated: bool, response_tokens: int = 0
) -> float:
    return response_tokens + 10 * (finish_reason == "length") + 100 * truncated + 1000 * (ground_truth in response)


def with_columns(prompt: str, turns: list[Any], messages: list[Any], **columns: Any) -> float:
    assert messages[-1]["content"] in prompt
    return len(turns) + columns["level"]


async def asynchronous(response: str, level: int) -> float:
    await asyncio.sleep(0)
    return level / 2


def trl(prompts: list[str], completions: list[str], level: list[int], **kwargs: Any) -> list[float]:
    assert kwargs["ground_truth"] == ["42"] and prompts == ["<user>6*7=<bot>"]
    return [len(text) + one for text, one in zip(completions, level, strict=True)]


def trl_of_completions(completions: list[str]) -> list[float]:
    return [float("42" in text) for text in completions]


async def trl_asynchronous(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.25 for _ in completions]


def with_a_column(solution: str, ground_truth: str) -> float:
    return float(ground_truth == "42")


def verl(level: int, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any) -> dict[str, Any]:
    assert extra_info == INFO and kwargs["prompt"]
    return {"score": float(solution_str.endswith(ground_truth)), "acc": level}


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (verl, 1.0),
        (old, 1.0),
        (with_a_column, 1.0),
        (old_with_other_names, 3.0),
        (by_name, 1117.0),
        (with_columns, 6.0),
        (asynchronous, 1.5),
        (trl, 9.0),
        (trl_of_completions, 1.0),
        (trl_asynchronous, 0.25),
    ],
)
def test_signatures(function: Any, reward: float) -> None:
    assert reward_call(function)(SAMPLE) == reward


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, answer: [float(answer == ["42"])],
        lambda prompts, completions, solution, **columns: [float(solution == ["42"] and "solution" not in SAMPLE.info)],
        lambda completion, answer: float(answer == "42" and completion == SAMPLE.response),
        lambda response, label: float(label == "42" and response == SAMPLE.response),
        lambda pred, gold: float(gold == "42" and pred == SAMPLE.response),
    ],
)
def test_the_column_that_the_dataset_has_as_truth_has_its_own_name_too(function: Any) -> None:
    """Rows of a dataset with `output_key: answer` have ground_truth and no `answer`."""
    assert reward_call(function)(SAMPLE) == 1.0


def test_verls_extra_info_is_the_column_of_that_name() -> None:
    sample = Sample("42", {"extra_info": {"index": 7}, "data_source": "gsm8k"})
    assert reward_call(lambda data_source, extra_info: extra_info["index"] + len(data_source))(sample) == 12


def test_trl_with_messages() -> None:
    def function(prompts: Any, completions: Any) -> list[float]:
        assert prompts == [INFO["messages"]]
        return [len(completions[0]) + float(completions[0][-1]["content"])]

    assert reward_call(function, as_messages=True)(SAMPLE) == 3 + 42
    one = Sample("42", {}, "2*21=", [{"role": "assistant", "content": "42"}])
    assert reward_call(lambda completions: [float(completions[0][0]["content"])], as_messages=True)(one) == 42


def stateful(completions: list[str], trainer_state: Any) -> list[Any]:
    return [trainer_state.global_step]


@pytest.mark.parametrize(
    "value",
    [[0.5], (0.5,), [np.float32(0.5)], np.array([0.5]), [np.array(0.5)], torch.tensor([0.5]), [torch.tensor(0.5)]],
)
def test_a_reward_may_be_a_number_of_any_library(value: Any) -> None:
    assert reward_call(lambda completions: value)(SAMPLE) == 0.5
    assert reward_call(lambda response: value[0])(SAMPLE) == 0.5


def test_a_function_that_does_not_apply_gives_none() -> None:
    assert reward_call(lambda completions: [None])(SAMPLE) is None
    assert reward_call(lambda response: None)(SAMPLE) is None


def test_trl_gives_token_ids_and_records_what_it_is_told() -> None:
    def function(completions: Any, completion_ids: Any, trainer_state: Any = None, **kwargs: Any) -> list[float]:
        assert completion_ids == [[0, 1, 0, 1, 2, 3, 4]] and trainer_state is None
        kwargs["log_extra"]("words", [3])
        kwargs["log_metric"]("hits", 0.5)
        return [2.0]

    sample = Sample.of(MESSAGES, INFO, response_text(MESSAGES))
    assert reward_call(function)(sample) == 2.0
    assert sample.notes == ["words: 3", "hits 0.5"]


def no_list(completions: list[str]) -> Any:
    return 1.0


def of_messages(completions: Any, **kwargs: Any) -> list[float]:
    return [float("42" in completion[0]["content"]) for completion in completions]


def unknown(response: str, answer: str, other: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (stateful, TypeError, "it asks for trainer_state, which an environment does not have"),
        (no_list, TypeError, "must return a list with one number"),
        (lambda response: (1.0, "why"), TypeError, r"it returned \(1.0, 'why'\), which is no number"),
        (lambda response: {"reward": 1.0}, TypeError, "it returned {'reward': 1.0}, .* nor a mapping with `score`"),
        (lambda label, response: float(label == response), TypeError, "it asks for label, but a sample has"),
        (lambda answer, gold: float(answer == gold), TypeError, "it asks for answer, gold, but a sample has"),
        (lambda completions, answer, solution: [1.0], TypeError, "it asks for answer, solution, but the columns are"),
        (lambda prompt, completion: len(prompt), TypeError, "it asks for completion, but a sample has"),
        (lambda ground_truth, prediction: 1.0, TypeError, "it asks for prediction, but a sample has"),
        (lambda args, sample: sample.response, TypeError, "it asks for args, sample, but a sample has"),  # slime's
        (of_messages, TypeError, "must be integers, .*; trl_messages: true gives it messages instead of strings"),
        (unknown, TypeError, "it asks for answer, other, but a sample has extra_info, finish_reason, ground_truth"),
    ],
)
def test_what_it_returns_or_asks_for_is_wrong(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        reward_call(function)(SAMPLE)
