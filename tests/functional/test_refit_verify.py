"""`grpo-mcore refit verify` and policy.refit_parity, in process: log-probs of engine and policy after a refit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.driver.policy import refit_parity
from grpo_mcore.observe import alarms
from grpo_mcore.refit.plan.plan import Block
from grpo_mcore.refit.policy_side.sender import RefitSender
from tests.functional.runs import Task, called, finished, grpo_recipe, run_here, write_recipe


def verify(folder: Path, recipe: dict[str, Any], *words: str) -> tuple[int, str]:
    run = called(folder, "refit", "verify", str(write_recipe(folder, recipe)), *words)
    return run.code, run.out


@pytest.fixture
def wrong_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy sends other values than it computes with: checksums agree, as what is sent arrives."""
    honest = RefitSender._values

    def values(self: RefitSender, block: Block) -> torch.Tensor:
        return honest(self, block) * (1.0 if "norm" in block.param else 1.1)

    monkeypatch.setattr(RefitSender, "_values", values)


def test_engine_and_policy_agree(tmp_path: Path, task: Task) -> None:
    sampler = [f"policy.generation.{key}" for key in ("temperature=0.7", "top_p=0.9", "top_k=20")]
    code, out = verify(tmp_path, grpo_recipe(task, task.untrained), *sampler)
    assert code == 0 and "engines and policy agree" in out
    found = re.search(r"engine-0 +8 +(\d+) +(\S+) +(\S+) +ok", out)
    assert found, out
    assert 8 <= int(found[1]) <= 64
    assert 1.0 <= float(found[2]) <= float(found[3]) < 1.0001
    assert re.search(r"pause \S+ s; [1-9]\d* checksums agree", out)


def test_a_difference_is_seen(tmp_path: Path, task: Task, wrong_weights: None) -> None:
    code, out = verify(tmp_path, grpo_recipe(task, task.untrained))
    assert code == 1
    assert re.search(r"engine-0 +8 .* DIFFERS\nat weight version 1 the log-probs of engine and policy differ", out), out
    code, out = verify(tmp_path, grpo_recipe(task, task.untrained), "policy.refit_parity=1000.0")
    assert code == 0, out


@pytest.mark.parametrize("wrong", [False, True])
def test_a_run_with_the_key(tmp_path: Path, task: Task, wrong: bool, request: pytest.FixtureRequest) -> None:
    if wrong:
        request.getfixturevalue("wrong_weights")
    recipe = grpo_recipe(task, task.untrained)
    recipe["grpo"] |= {"max_num_steps": 2}
    run = run_here("train", tmp_path, recipe, "policy.refit_parity=1.001", "checkpointing.enabled=false")
    if wrong:
        assert run.code == 1
        assert "policy.refit_parity: at weight version 1 the log-probs of engine and policy differ" in run.err
    else:
        assert run.code == 0, run.err
        assert len(run.metrics()) == 2


def test_a_run_by_default_compares_sometimes_and_says_a_difference(
    tmp_path: Path, task: Task, wrong_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refit_parity, "SHARE", 1e9)  # after every refit
    kind = replace(alarms.KINDS["refit_mismatch"], above=1.01)  # an untrained model differs little
    monkeypatch.setitem(alarms.KINDS, "refit_mismatch", kind)
    recipe = grpo_recipe(task, task.untrained)
    recipe["grpo"] |= {"max_num_steps": 1}
    run = finished("train", tmp_path, recipe, "checkpointing.enabled=false")
    (step,) = run.metrics()
    assert step["refit/mult_prob_error"] > 1.01
    assert "after a refit an engine does not compute what the policy does" in run.out + run.err
