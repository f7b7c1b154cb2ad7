"""A Gym's result becomes a trajectory with exact tokens, or a failure with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mcore.environments.agents.samples import AgentFailure
from grpo_mcore.environments.gym.gym_result import read_result
from grpo_mcore.rollout.trajectory import fingerprint
from tests.unit.environments.gym.gym_results import TWO, item, result


def test_turns_their_masks_and_their_weights() -> None:
    rollout = read_result(result(*TWO, reward_components={"right": 1, "short": 0.5, "why": "x"}), 2.0)
    assert rollout.fingerprints() == [fingerprint([1, 2, 3, 4]), fingerprint([1, 2, 3, 4, 5, 6])]
    trajectory = rollout.trajectory("p", 3, [[[7, 0, 4]], [[8, 0, 5], [9, 5, 6]]])
    assert trajectory.token_ids().tolist() == [1, 2, 3, 4, 5, 6]
    assert trajectory.loss_mask().tolist() == [False, False, True, True, False, True]
    assert trajectory.logprobs().tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert trajectory.weight_versions == ((7, 0, 4), (8, 4, 5), (9, 5, 6)) and trajectory.weight_version == 7
    assert [turn.role for turn in trajectory.turns] == ["user", "assistant", "environment", "assistant"]
    assert [turn.text for turn in trajectory.turns] == ["why?", "one", "", "two"]
    assert rollout.score.rewards_by_name == {"right": 1.0, "short": 0.5}
    assert (rollout.score.reward, rollout.score.answer) == (1.0, "two")


def test_rewards_and_states_of_turns_are_in_the_order_of_the_calls() -> None:
    outcome = result(TWO[0], item([8], [6]), TWO[2], turn_rewards=[0.5, None, 1])
    rollout = read_result(outcome, 1.0)
    assert rollout.score.turn_rewards == (0.5, None, 1.0)
    assert rollout.score.turn_states == ("", fingerprint([8]), fingerprint([1, 2, 3, 4, 5]))
    trajectory = rollout.trajectory("p", 0, [[[7, 0, 4]], [[7, 0, 6]], [[7, 0, 2]]])
    assert trajectory.branches == (6, 2) and trajectory.turn_numbers == (0, 2, 1)
    assert trajectory.turn_of_tokens().tolist() == [0, 0, 0, 0, 0, 2, 0, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [([0.5], "turn_rewards with 1 entries for the 2 turns"), ([0.5, "x"], "turn_rewards.1. with 'x'")],
)
def test_wrong_rewards_of_turns_cost_the_sample(wrong: list[Any], message: str) -> None:
    with pytest.raises(AgentFailure, match=message):
        read_result(result(TWO[0], TWO[2], turn_rewards=wrong), 1.0)


def test_an_empty_word_between_two_turns_is_no_turn() -> None:
    trajectory = read_result(result(item([1], [2]), item([1, 2], [3])), 1.0).trajectory(
        "p", 0, [[[1, 0, 2]], [[1, 0, 3]]]
    )
    assert [turn.role for turn in trajectory.turns] == ["user", "assistant", "assistant"]


def test_texts_in_parts_are_joined_as_everywhere_and_malformed_ones_are_refused() -> None:
    parts = [{"type": "output_text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
    rollout = read_result(result(item([1], [2], content=parts)), 1.0)
    assert rollout.score.answer == "one\ntwo"
    with pytest.raises(AgentFailure, match="malformed: .* the text of a part must be text, got a number"):
        read_result(result(item([1], [2], content=[{"type": "output_text", "text": 5}])), 1.0)


@pytest.mark.parametrize(
    ("later", "branches"),
    [
        ([item([1, 2, 3, 9, 5], [6])], [[4], [6]]),  # another token
        ([item([1, 2, 3], [6])], [[4], [4]]),  # shorter
        ([item([8], [6]), item([1, 2, 3, 4, 5], [6]), item([8, 6, 7], [9])], [[4, 6], [2, 4]]),  # each goes on
        ([TWO[2], item([1], [2])], [[4, 6], [2]]),
    ],
)
def test_what_does_not_continue_is_another_branch(later: list[Any], branches: list[list[int]]) -> None:
    rollout = read_result(result(TWO[0], *later), 1.0)
    assert [[len(call.tokens) for call in branch] for branch in rollout.branches] == branches
    assert rollout.score.reason == f"{1 + len(later)} turns in 2 branches"


def test_branches_are_a_trajectory_side_by_side() -> None:
    """The agent drops a token of the first answer, goes on with that, and comes back to the first history."""
    rewritten = item([1, 2, 4, 8], [9, 10], "three")
    rollout = read_result(result(*TWO, rewritten, item([1, 2, 3, 4, 5, 6, 7], [11], "four")), 1.0)
    versions = [[[7, 0, 4]], [[7, 0, 6]], [[8, 0, 8]], [[8, 0, 6]]]
    trajectory = rollout.trajectory("p", 0, versions)
    assert trajectory.branches == trajectory.sequences == (8, 6)
    assert trajectory.token_ids().tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 1, 2, 4, 8, 9, 10]
    assert trajectory.loss_mask().int().tolist() == [0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1]
    assert trajectory.weight_versions == ((7, 0, 6), (8, 6, 14))
    assert [turn.role for turn in trajectory.turns][-2:] == ["user", "assistant"]
    assert rollout.score.answer == "four"


def test_calls_and_nested_items() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    tokens = {k: v for k, v in item([1], [2]).items() if k.endswith(("ids", "probs"))}
    rollout = read_result(result([item([], [], "thinks ") | {"prompt_token_ids": []}, call | tokens]), 1.0)
    assert rollout.branches[0][0].text == "thinks f({})"


def test_a_failure_that_is_null_is_none() -> None:
    found = result(*TWO, _ng_failure_class=None, _ng_no_persist=None, failure_reason=None)
    assert read_result(found, 1.0).branches == read_result(result(*TWO), 1.0).branches


def test_a_limit_of_the_last_turn() -> None:
    response = {"output": list(TWO), "incomplete_details": {"reason": "max_output_tokens"}}
    rollout = read_result(result(response=response), 1.0)
    trajectory = rollout.trajectory("p", 0, [[], []])
    assert trajectory.truncated and trajectory.finish_reason == "length"
    assert read_result(result(response={"output": list(TWO), "status": "incomplete"}), 1.0).truncated


@pytest.mark.parametrize(
    ("found", "why", "again"),
    [
        ([], "not an object, but list", False),
        ({"_ng_failure_class": "judge_failed", "reward": 0.0}, "'judge_failed'", True),
        ({"_ng_failure_class": "timeout", "_ng_failure_terminal": True}, "'timeout'", False),
        ({"_ng_no_persist": True}, "was killed", True),
        (result(*TWO, mask_sample=True), "mask_sample", False),
        (result(*TWO, failure_reason="no browser"), "'no browser'", False),
        ({"reward": 1.0}, "no response.output", False),
        ({"reward": 1.0, "response": {"output": None}}, "no response.output", False),
        (result(*TWO, reward=None), "reward is None", False),
        (result(*TWO, reward=True), "reward is True", False),
        (result(*TWO, reward=float("inf")), "reward is inf", False),
        (result(*TWO, reward=10**400), "reward is 1000", False),
        (result(item([1], [2**70])), "generation_token_ids is not a list", False),
        (result(*TWO, reward="1"), "reward is '1'", False),
        (result(), "no item of the output has generation_token_ids", False),
        (result({"type": "reasoning"}, None, 3), "no item of the output", False),
        (result(item([], [1])), "prompt_token_ids is not a list of token ids", False),
        (result(item([1], [1.5])), "generation_token_ids is not a list", False),
        (result(item([1], [-1])), "generation_token_ids is not a list", False),
        (
            result(item([1], [1], generation_log_probs=[])),
            "generation_log_probs must have one entry for each of the 1 tokens",
            False,
        ),
        (result(item([1], [1], generation_log_probs=[float("nan")])), "a log-prob is nan", False),
        (result(item([1], [1], generation_log_probs=["-1"])), "a log-prob is '-1'", False),
    ],
)
def test_results_of_which_nothing_can_be_learned(found: Any, why: str, again: bool) -> None:
    with pytest.raises(AgentFailure, match=why.replace(".", r"\.")) as error:
        read_result(found, 1.0)
    assert error.value.again is again


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["reward", "response", "mask_sample", "responses_create_params", "reward_components"]), _JSON
    ),
    st.lists(
        st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "prompt_token_ids", "generation_token_ids", "generation_log_probs"]
            ),
            _JSON | st.lists(st.integers(0, 3), min_size=1, max_size=3),
        )
        | _JSON,
        max_size=4,
    ),
)
def test_whatever_comes_is_a_rollout_or_a_failure(fields: dict[str, Any], output: list[Any]) -> None:
    try:
        rollout = read_result({"response": {"output": output}, "reward": 1.0} | fields, 1.0)
    except AgentFailure:
        return
    trajectory = rollout.trajectory("p", 0, [[] for _ in rollout.fingerprints()])
    calls = [call for branch in rollout.branches for call in branch]
    assert trajectory.generated_length == sum(len(call.generated) for call in calls) > 0
    assert trajectory.token_ids().tolist() == [token for branch in rollout.branches for token in branch[-1].tokens]
    assert torch.isfinite(trajectory.logprobs()).all()
