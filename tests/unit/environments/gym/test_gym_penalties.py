"""Which rollouts of a Gym are penalised, which messages are flagged, and what becomes of their tokens' advantages."""

from __future__ import annotations

import pickle
from itertools import product
from typing import Any

import pytest
import torch

from grpo_mcore.environments.gym.gym_penalties import THOUGHT_MARKS, TOOL_CALL_MARKS, RewardPenalties, flag_of
from grpo_mcore.environments.gym.gym_result import FormRules, read_result
from grpo_mcore.environments.gym.nemo_gym import NemoGymConfig, NemoGymEnvironment
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.rollout.trajectory import INVALID_TOOL_CALL, MALFORMED_THINKING

OPEN, CLOSE = 12, 13


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def message(text: str, **tokens: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content} | tokens


def tool_call(**tokens: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": "look", "arguments": "{}"} | tokens


def tokens(prompt: list[int], generated: list[int]) -> dict[str, Any]:
    logprobs = [-0.5] * len(generated)
    return {"prompt_token_ids": prompt, "generation_token_ids": generated, "generation_log_probs": logprobs}


def broken(output: list[Any], calls: Any = (), **keys: Any) -> list[str]:
    return RewardPenalties.model_validate(keys).broken(output, calls, THOUGHT_MARKS)


@pytest.mark.parametrize(
    ("output", "repeats", "is_empty"),
    [
        ([thought("so 5"), message("5")], False, False),
        ([thought(" so 5"), message("so 5\n")], True, False),
        ([thought("so 5"), tool_call(), message("so 5")], False, False),  # not right before it
        ([thought(" "), message(" ")], False, True),
        ([thought("so 5")], False, True),
        ([message("5"), tool_call()], False, False),
        ([message(""), tool_call()], False, False),
        ([message("5"), message("")], False, True),
        ([], False, True),
        ([{"role": "assistant", "content": "5"}], False, False),
        ([{"type": "reasoning", "summary": []}, message("5")], False, False),
    ],
)
def test_thoughts_that_are_repeated_and_answers_that_are_empty(
    output: list[Any], repeats: bool, is_empty: bool
) -> None:
    for looks_at_thoughts, looks_at_end in product([True, False], repeat=2):
        keys = {"penalize_duplicated_reasoning": looks_at_thoughts, "penalize_empty_final_answer": looks_at_end}
        expected = ["duplicated reasoning"] * (repeats and looks_at_thoughts)
        assert broken(output, **keys) == expected + ["empty final answer"] * (is_empty and looks_at_end)


@pytest.mark.parametrize(
    ("prompt", "generated", "malformed"),
    [
        ([1, OPEN], [2, CLOSE, 3], False),  # the prompt opens the thought
        ([1], [2, 3], False),  # without thoughts
        ([1, OPEN, CLOSE], [2, 3], False),
        ([1, OPEN], [2, 3], True),
        ([1, OPEN], [2, CLOSE, CLOSE], True),
        ([1, OPEN], [OPEN, 2, CLOSE], True),
        ([1], [OPEN, 2, CLOSE], True),
        ([1], [CLOSE], True),
        ([1, OPEN, OPEN], [CLOSE], True),
        ([1, CLOSE], [2], True),
    ],
)
def test_thoughts_are_closed_once(prompt: list[int], generated: list[int], malformed: bool) -> None:
    ids = {"think_open": OPEN, "think_close": CLOSE}
    calls = [([1], [2]), (prompt, generated)]
    assert broken([], calls, penalize_malformed_think_tag=True, token_ids=ids) == ["malformed thought"] * malformed
    assert broken([], calls, penalize_malformed_think_tag=True) == broken([], calls, token_ids=ids) == []
    assert broken([message("a </think> b")], penalize_malformed_think_tag=True) == ["malformed thought"]


class _Tokenizer:
    """Knows two marks as one token each, and splits other texts into characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [{"<think>": OPEN, "</think>": CLOSE}[text]] if text in THOUGHT_MARKS else [ord(one) for one in text]


def test_the_tokens_of_thoughts_are_the_tokenizers() -> None:
    section = {"head_server_url": "http://gym", "reward_penalties": {"penalize_malformed_think_tag": True}}

    def completed(**keys: Any) -> dict[str, Any]:
        section_now = NemoGymEnvironment.completed(section | keys, _Tokenizer())
        return dict(NemoGymConfig.read(section_now).reward_penalties.token_ids)

    assert completed() == {"unwanted": None, "think_open": OPEN, "think_close": CLOSE}
    assert completed(thinking_tags=["[THINK]", "[/THINK]"])["think_open"] is None  # several tokens
    assert completed(reward_penalties={})["think_open"] is None
    own = {"penalize_malformed_think_tag": True, "token_ids": {"think_open": 1, "think_close": 2}}
    assert completed(reward_penalties=own) == {"unwanted": None, "think_open": 1, "think_close": 2}
    assert completed(reward_penalties={"token_ids": None}) == {name: None for name in completed()}


def test_unwanted_tokens_are_generated_ones() -> None:
    keys = {"penalize_unwanted_tokens": True, "token_ids": {"unwanted": [7, 8]}}
    assert broken([], [([7, 8], [1, 2])], **keys) == []
    assert broken([], [([1], [2]), ([1], [3, 8])], **keys) == ["unwanted tokens"]
    with pytest.raises(EnvironmentConfigError, match=r"penalize_unwanted_tokens needs token_ids\.unwanted"):
        NemoGymConfig.read({"agents": {"a": "http://x"}, "reward_penalties": {"penalize_unwanted_tokens": True}})


def test_flags() -> None:
    marks = TOOL_CALL_MARKS, THOUGHT_MARKS
    assert flag_of(["fine", "look <tool_call>{}"], *marks) == INVALID_TOOL_CALL
    assert flag_of(["so</think>5"], *marks) == MALFORMED_THINKING
    assert flag_of(["fine"], *marks) == flag_of([], *marks) == ""
    assert flag_of(["look <tool_call>"], ["<bad>"], ["<t>"]) == ""


def test_a_result_is_penalised_and_its_turns_are_flagged() -> None:
    output = [
        message("<tool_call>{}</tool_call>", **tokens([1], [2, 3])),
        {"type": "function_call_output", "output": "<tool_call>"},  # not the policy's
        tool_call(**tokens([1, 2, 3, 4], [5])),
        message("", **tokens([1, 2, 3, 4, 5, 6], [7, 8])),
    ]
    result = {"reward": 1.0, "response": {"output": output}}
    plain = read_result(result, 0.0)
    assert plain.score.reward == 1.0
    form = FormRules(penalties=RewardPenalties(penalize_empty_final_answer=True))
    rollout = read_result(result, 0.0, form=form)
    assert rollout.score.reward == 0.0
    assert rollout.score.reason == "3 turns; penalised: empty final answer; its reward was 1"
    trajectory = rollout.trajectory("a", 0, [[(1, 0, 3)], [(1, 3, 5)], [(1, 5, 8)]])
    assert [turn.flag for turn in trajectory.turns if turn.loss_mask] == [INVALID_TOOL_CALL, "", ""]
    assert trajectory.flags().tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert torch.equal(pickle.loads(pickle.dumps(trajectory)).flags(), trajectory.flags())
