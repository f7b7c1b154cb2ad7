"""`train --check` calls rewards, environments and losses once: what they return, or fail with, shows there."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mcore.driver.run.checks import SetupError
from grpo_mcore.driver.run.environment_checks import environment_of
from grpo_mcore.driver.run.trial_calls import try_environments, try_loss
from grpo_mcore.recipe import MasterConfig, load_recipe

CODE = "tests.unit.driver.run.trial_code"
ROW: Any = {
    "task_name": "sums",
    "uid": "sums:0",
    "message_log": [{"role": "user", "content": "1+1=", "token_ids": [1, 2, 1, 3]}],
    "extra_env_info": {"ground_truth": "2"},
}


def letters(text: str, **_: Any) -> dict[str, list[int]]:
    """Tokenize a text by its letters."""
    return {"input_ids": [*map(ord, text)]}


def config(section: dict[str, Any], **others: Any) -> MasterConfig:
    base = {"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x.jsonl"}}, "env": {"own": section}}
    return MasterConfig.model_validate(base | others)


def rules(function: str) -> dict[str, Any]:
    return {"environment": "rules", "num_workers": 1, "components": {"part": {"type": "function", "path": function}}}


def tried(section: dict[str, Any]) -> list[str]:
    return try_environments(config(section), {"sums": "own"}, [ROW], letters)


@pytest.mark.slow
def test_a_reward_gets_the_ground_truth_of_the_first_row() -> None:
    assert tried(rules(f"{CODE}:right")) == [
        "env.own: the ground truth of the first row as the answer: reward 1 (part 1)"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "reason"), [("nothing", "no component applies to this sample"), ("words", "component 'part' crashed")]
)
def test_a_reward_that_is_no_number_is_refused(function: str, reason: str) -> None:
    with pytest.raises(SetupError, match=f"env.own: the ground truth .* gets no reward: {reason}"):
        tried(rules(f"{CODE}:{function}"))


def test_an_environment_has_a_deadline() -> None:
    with pytest.raises(SetupError, match=r"env.own: it did not score one answer within 0.2 s \(verdict_timeout_s\)"):
        tried({"path": f"{CODE}:Slow", "verdict_timeout_s": 0.2})


def test_what_has_scored_truths_itself_is_not_called_again() -> None:
    assert tried({"environment": "math", "num_workers": 1}) == []


def test_a_custom_loss_is_called_on_two_samples() -> None:
    (line,) = try_loss(config({}, loss_fn={"path": f"{CODE}:ClippedPGLossFn", "reference_policy_kl_penalty": 0}))
    assert line.startswith(f"loss_fn.path {CODE}:ClippedPGLossFn: on two samples it is ")
    with pytest.raises(SetupError, match="its value nan or its gradient is not finite"):
        try_loss(config({}, loss_fn={"path": f"{CODE}:Wrong"}))
    with pytest.raises(SetupError, match="called on two samples, it raised KeyError: 'no_such_column'"):
        try_loss(config({}, loss_fn={"path": f"{CODE}:Crashes"}))
    assert try_loss(config({})) == []


def test_a_recipe_for_sft_that_is_trained_with_grpo_is_told_so() -> None:
    recipe = load_recipe("sft-arithmetic-cpu").config
    with pytest.raises(SetupError, match="the recipe has a section sft: `grpo-mcore sft RECIPE` trains that"):
        environment_of("sums", None, recipe)
