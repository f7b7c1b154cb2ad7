"""Weights or moments that break in the middle of a run end it by their name, and never displace a good checkpoint."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.observe import audit, read_ledger
from grpo_mcore.parallel.policy import Policy
from tests.functional.runs import Task, assert_one_message, finished, grpo_recipe, run_here

GOOD = 4
"""Steps before the state breaks."""


def break_weight(policy: Policy) -> str:
    name, weight = list(policy.chunks[0].module.named_parameters())[-1]
    with torch.no_grad():
        weight.view(-1)[0] = torch.nan
    return f"weight {name}"


def break_moment(policy: Policy) -> str:
    part = policy.optimizer.chained_optimizers[0].optimizer
    moments = part.state[part.param_groups[0]["params"][0]]
    moments["exp_avg_sq"].view(-1)[0] = torch.inf
    return "moment exp_avg_sq of "


def breaks(original: Callable[..., Any], act: Callable[[Policy], str], said: list[str]) -> Callable[..., Any]:
    """Return a method that breaks the policy before its call number GOOD + 1."""
    calls: list[None] = []

    @functools.wraps(original)  # the driver calls it by its name
    def method(policy: Policy, *args: Any, **options: Any) -> Any:
        if options.pop("counts", True):
            calls.append(None)
        if len(calls) == GOOD + 1 and not said:
            said.append(act(policy))
        return original(policy, *args, **options)

    return method


@pytest.mark.timeout(900)
@pytest.mark.every_state  # functional/test_bad_input.py breaks a run, distributed/test_policy_state.py every state
@pytest.mark.parametrize(
    ("where", "act", "text"),
    [
        ("check_state", break_weight, "after an update with learning rate 0.001"),
        ("check_state", break_moment, "after an update with learning rate 0.001"),
        ("train_step", break_weight, "before this optimizer step"),
        ("start_save", break_weight, "when it was to be saved; nothing was written"),
        ("start_save", break_moment, "when it was to be saved; nothing was written"),
    ],
    ids=["update weight", "update moment", "refit", "save weight", "save moment"],
)
def test_a_state_that_breaks_ends_the_run_by_name_and_the_last_good_checkpoint_goes_on(
    tmp_path: Path,
    task: Task,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    act: Callable[[Policy], str],
    text: str,
) -> None:
    recipe = grpo_recipe(task, model)
    recipe["grpo"]["max_num_steps"] = GOOD + 2
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None, "keep_top_k": 1}
    said: list[str] = []
    with monkeypatch.context() as patch:
        method = breaks(getattr(Policy, where), act, said)
        if where == "check_state":  # only the looks after an update count
            patch.setattr(Policy, where, lambda self, when, **how: method(self, when, counts="after" in when, **how))
        else:
            patch.setattr(Policy, where, method)
        run = run_here("train", tmp_path, recipe)
    print(run.out, run.err)
    newest = run.checkpoints / f"step_{GOOD}"
    assert_one_message(run, 1, f"not finite: {said[0]}", text, f"the last checkpoint is {newest}")
    assert [path.name for path in run.checkpoints.glob("step_*")] == [newest.name]
    finished("train", tmp_path, recipe, "--resume")
    assert [path.name for path in run.checkpoints.glob("step_*")] == [f"step_{GOOD + 2}"]
    told = audit(read_ledger(run.checkpoints / "ledger.jsonl"))
    assert not told.flaws and told.steps == GOOD + 2
