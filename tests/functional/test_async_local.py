"""Whole asynchronous runs in one process: to the end of the data, with refits in flight, and through a crash."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.algorithms import grpo
from grpo_mcore.cli.main import main
from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.observe import Audit, audit, read_ledger
from grpo_mcore.observe.ledger.ledger_audit import valid_entries
from grpo_mcore.rollout.trajectory import Trajectory
from tests.functional.runs import Run, Task, finished, grpo_recipe, run_here

PROMPTS = 16
CORRECTED = {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True}


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path) -> dict[str, Any]:
    """Return a recipe of 4 steps of 4 prompts, which is all the data once."""
    data = task.folder / "short.jsonl"
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:PROMPTS]))
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"max_num_steps": 99, "max_num_epochs": 1, "async_grpo": {"enabled": True}}
    recipe["data"] = {"train": {"data_path": str(data)}, "validation": {"data_path": str(task.val)}}
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None}
    return recipe | {"loss_fn": CORRECTED}


@pytest.fixture(scope="module")
def whole(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished("train", tmp_path_factory.mktemp("ahead"), recipe, "grpo.val_at_end=true")


def audited(run: Run) -> Audit:
    found = audit(read_ledger(run.checkpoints / "ledger.jsonl"))
    assert not found.flaws, found.flaws
    assert main(["ledger", str(run.checkpoints)]) == 0
    return found


def trained_uids(run: Run) -> list[list[str]]:
    """Return the uids trained on in each step, without ledger entries that a resume made void."""
    entries = valid_entries(read_ledger(run.checkpoints / "ledger.jsonl"))
    return [entry["uids"] for entry in entries if entry["event"] == "trained"]


def test_every_prompt_trains_once_and_none_is_older_than_the_limit(whole: Run) -> None:
    found = audited(whole)
    assert found.fates["trained on"] == PROMPTS and sum(found.fates.values()) == PROMPTS
    assert found.by_age == {0: 4, 1: PROMPTS - 4}  # the first step, and all later ones
    assert [line["trajectory_age_max"] for line in whole.metrics()] == [0, 1, 1, 1]
    assert [line["num_groups_ahead"] for line in whole.metrics()] == [4, 4, 4, 0]
    for line in whole.metrics():
        assert line["num_trained_samples"] == 16 and line["grad_norm"] > 0
    first, second = whole.metrics()[:2]
    assert first["token_share/age_0"] == pytest.approx(1) and first["token_mult_prob_error"] <= 1.02
    assert second["token_share/age_1"] == pytest.approx(1) and second["sampling_importance_ratio"] != 1
    assert json.loads((whole.logs / "summary.json").read_text())["end"] == "the data has ended"
    assert "trajectories at most 1 weight version old, groups in order, refit once they are idle" in whole.out


def test_a_crash_loses_and_doubles_nothing(
    recipe: dict[str, Any], whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run crashes in the third step, with the groups of two steps in flight: they are generated again in order."""
    train, calls = grpo.train_on_groups, []

    def broken(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*args)

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "train_on_groups", broken)
        assert run_here("train", tmp_path, recipe).code == 130
    before = audit(read_ledger(tmp_path / "checkpoints" / "ledger.jsonl"))
    assert not before.flaws and before.steps == 2 and before.fates["finished"] + before.fates["under way"] >= 4
    run = finished("train", tmp_path, recipe, "--resume")
    found = audited(run)
    assert found.starts == 2 and found.fates["trained on"] == PROMPTS == sum(found.fates.values())
    assert trained_uids(run) == trained_uids(whole)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]


def test_samples_go_on_under_new_weights(
    recipe: dict[str, Any], task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of an untrained model have all lengths, and the engine runs six at a time. They pause while the policy
    trains."""
    seen: list[Trajectory] = []
    generate = EngineWorker.generate_together

    @functools.wraps(generate)  # a call goes by the name of the method
    def recorded(self: EngineWorker, *args: Any) -> Iterator[list[Trajectory]]:
        for trajectories in generate(self, *args):
            seen.extend(trajectories)
            yield trajectories

    monkeypatch.setattr(EngineWorker, "generate_together", recorded)
    words = ["grpo.async_grpo.in_flight_weight_updates=true", "grpo.async_grpo.max_trajectory_age_steps=2"]
    words += ["grpo.async_grpo.group_order=oldest_first", "grpo.async_grpo.max_groups_in_flight=10"]
    words += ["grpo.async_grpo.partial_rollouts=true"]
    words += ["grpo.async_grpo.recompute_kv_cache_after_weight_updates=true", "grpo.val_period=2"]
    words += [f"policy.model_name={task.untrained}", "policy.max_total_sequence_length=40"]
    words += ["policy.generation.max_new_tokens=30", "policy.generation.vllm_cfg.max_num_seqs=6"]
    run = finished("train", tmp_path, recipe, *words)
    found = audited(run)
    assert found.fates["trained on"] == PROMPTS == sum(found.fates.values()) and max(found.by_age) <= 2
    assert [line["step"] for line in run.metrics("validation")] == [2, 4]
    spans = [[version for version, _, _ in trajectory.weight_versions] for trajectory in seen]
    assert any(len(versions) > 1 for versions in spans)
    assert all(versions == sorted(set(versions)) for versions in spans)


def test_age_0_is_the_synchronous_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe | {"loss_fn": {"reference_policy_kl_penalty": 0.0}}
    words = ("grpo.max_num_steps=2", "checkpointing.enabled=false")
    zero = run_here("train", tmp_path / "zero", recipe, *words, "grpo.async_grpo.max_trajectory_age_steps=0")
    off = run_here("train", tmp_path / "off", recipe, *words, "grpo.async_grpo.enabled=false")
    assert zero.code == off.code == 0, zero.err + off.err
    assert zero.outcome() == off.outcome() and len(off.metrics()) == 2
    assert not audit(read_ledger(off.logs / "ledger.jsonl")).flaws  # without checkpoints it is with the logs


@pytest.mark.parametrize("turns", [pytest.param("together", marks=pytest.mark.every_state), "free"])
def test_interrupted_in_the_middle_of_a_dialogue_nothing_is_lost_or_done_twice(
    recipe: dict[str, Any], task: Task, tmp_path: Path, turns: str
) -> None:
    """A prompt of the third step is at its second of three turns, and those of the fourth are in flight too."""
    interrupt = tmp_path / "interrupt"
    questions = [json.loads(line)["input"] for line in (task.folder / "short.jsonl").read_text().splitlines()]
    talk = recipe | {"env": {"math": {"environment": "tests.functional.worlds:Dialogue", "interrupt": str(interrupt)}}}
    talk["grpo"] = talk["grpo"] | {"max_rollout_turns": 3, "turns": turns, "val_at_start": False}
    talk["data"] = talk["data"] | {"shuffle": False}
    talk["policy"] = talk["policy"] | {"max_total_sequence_length": 48}
    interrupt.write_text(questions[9])
    assert run_here("train", tmp_path, talk).code == 130
    assert not interrupt.exists()
    before = audit(read_ledger(tmp_path / "checkpoints" / "ledger.jsonl"))
    assert not before.flaws and before.steps <= 2 and before.fates["under way"] >= 4
    run = finished("train", tmp_path, talk, "--resume")
    found = audited(run)
    assert found.starts == 2 and found.fates["trained on"] == PROMPTS == sum(found.fates.values())
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    assert all(line["turns_max"] == 3 and line["num_failed_samples"] == 0 for line in run.metrics())
