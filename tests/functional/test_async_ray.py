"""An asynchronous run as a user starts it: the command, Ray, two tensor-parallel policy ranks, a pool of its own for
the engine of two pipeline stages, refits in flight; interrupted, then resumed in one process to the end of the data,
with dynamic sampling. With `--chaos` also a synchronous one, which is told to stop while its engine restarts."""

import json
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mcore.base.orphan_reaper import marked
from grpo_mcore.cli.main import main
from grpo_mcore.cluster.inspection import workers_here
from grpo_mcore.observe import audit, read_ledger
from tests.functional.runs import (
    GONE_S,
    MARK,
    Run,
    Task,
    assert_one_message,
    end_of,
    finished,
    grpo_recipe,
    living,
    read_until_step,
    shared_files,
    start_command,
)
from tests.unit.tools.report_pages import data_of

PROMPTS = 24


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path) -> dict[str, Any]:
    """Return a recipe of 6 steps of 4 prompts, all the data once, in one process."""
    data = task.folder / "short-24.jsonl"
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:PROMPTS]))
    recipe = grpo_recipe(task, model)
    ahead = {"enabled": True, "in_flight_weight_updates": True}
    recipe["grpo"] |= {"max_num_steps": 99, "max_num_epochs": 1, "async_grpo": ahead}
    recipe["loss_fn"] |= {"use_importance_sampling_correction": True}
    recipe["data"] = {"train": {"data_path": str(data)}}
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None}
    recipe["logger"] |= {"tensorboard_enabled": True}
    return recipe


SPREAD = [
    "cluster={backend: ray, gpus_per_node: 4}", "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}",
    "policy.generation.vllm_cfg.pipeline_parallel_size=2",
]  # fmt: skip
"""Two policy ranks, and an engine of two ranks in a pool of its own."""


def page_of(folder: Path) -> dict[str, Any]:
    """Make the report of the run in `folder`, and return what its page holds."""
    assert main(["report", str(folder), "--output", str(folder / "page.html")]) == 0
    return data_of((folder / "page.html").read_text())


def check_files(run: Run, newest: str) -> None:
    assert list((run.logs / "tensorboard").glob("events.*"))
    workers = {path.name for path in (run.logs / "workers").glob("*.log")}
    assert workers >= {"policy-0.log", "policy-1.log", "engine-0.log", "environment-math.log"}
    profiles = {path.name: path.read_text() for path in (run.logs / "profile" / "step_000002").iterdir()}
    assert all("Backward" in profiles[f"policy-{rank}.json"] for rank in (0, 1))
    assert "vllm" in profiles["engine-0-0.json"]
    assert len(list((run.checkpoints / newest / "policy").glob("rng-*.pt"))) == 2


@pytest.mark.timeout(400)  # a minute on two free cores
def test_interrupted_and_resumed_it_trains_on_every_prompt_once(
    tmp_path: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT goes to the whole process group, as from a terminal. Until then, the log-probs of engine and policy are
    compared after each refit."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    process = start_command(
        "train", tmp_path, recipe, *SPREAD, "logger.profile_steps=[2]", "policy.refit_parity=1.0001"
    )
    try:
        seen = read_until_step(process, 3)
        running = living(f"{MARK}={mark}")
        files = shared_files(running)
        live = page_of(tmp_path)
        assert len(running) > 5 and files
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        stopped = end_of(process, tmp_path, seen)
    finally:
        process.kill()
    assert time.monotonic() - began < GONE_S
    newest = f"step_{max(int(path.name[5:]) for path in stopped.checkpoints.glob('step_*'))}"
    assert_one_message(stopped, 130, "interrupted; every process that it started has ended", f"{newest}; `--resume`")
    assert stopped.err.count("\n") <= 3
    assert marked(f"{MARK}={mark}") == [] and not {path for path in files if path.exists()}
    check_files(stopped, newest)
    assert "tensors reach the engines whole" not in stopped.out and "no memory for a second copy" not in stopped.out
    assert "1 x vLLM TP 1 x PP 2 float32, with devices of their own" in stopped.out
    ledger = tmp_path / "checkpoints" / "ledger.jsonl"
    killed = audit(read_ledger(ledger))
    assert not killed.flaws and killed.steps >= 3
    last = page_of(tmp_path)
    assert live["state"]["end"].startswith("not over") and last["state"]["end"].startswith("interrupted")
    for page in (live, last):
        assert page["state"]["steps"] >= 3
        assert page["runs"][0]["curves"]["train/reward"][0][:3] == [1, 2, 3]
        devices = page["ledger"]["devices"]
        assert sorted(devices) == ["engine-0", "policy-0", "policy-1"]
        assert all(sum(seconds.values()) == pytest.approx(page["ledger"]["wall"]) for seconds in devices.values())
        assert {"1", "2"} <= page["samples"]["train"].keys()  # the third one may still be in the writer's hands
    assert last["state"]["steps"] >= live["state"]["steps"]

    words = ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"]
    run = finished("train", tmp_path, recipe, "--resume", *words)
    found = audit(read_ledger(ledger))
    assert not found.flaws and found.starts == 2 and found.steps > killed.steps
    assert found.fates["trained on"] + found.fates["filtered"] == PROMPTS == sum(found.fates.values())
    assert max(found.by_age) == 1
    rows = [row for row in run.metrics() if "num_filtered_prompts" in row]
    assert rows[-1]["step"] == found.steps and rows[-1]["num_groups_ahead"] == 0
    assert sum(row["num_filtered_prompts"] for row in rows) == found.fates["filtered"]
    dropped = sum(row["buffer/dropped_too_old_finished"] + row["buffer/dropped_too_old_under_way"] for row in rows)
    assert dropped == sum(row["num_surplus_prompts"] for row in rows)
    assert all(row["grad_norm"] > 0 and row["refit/checked"] > 0 and row["zero_advantage_rate"] < 1 for row in rows)
    assert "local, 1 policy rank\n" in run.out and "cluster.gpus_per_node" in run.out, "the changed values are named"
    assert json.loads((run.logs / "summary.json").read_text())["end"] == "the data has ended"


def stop_the_engine(samples: Any, *, marker: str) -> Any:
    """Shape no reward, but once let the processes of the engine stand still; the policy trains next, then the refit
    waits for them."""
    if not Path(marker).exists():
        (logs,) = Path(marker).parent.glob("logs/exp_*/workers")
        engine = psutil.Process(workers_here(logs)["engine-0"].pid)
        for process in (engine, *engine.children(recursive=True)):
            process.suspend()
        Path(marker).touch()
    return samples.rewards


def saved_at_sigterm(process: Any, folder: Path, seen: Any, within_s: float) -> int:
    """Stop a run, and return the step of its only checkpoint, which is its last step."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    run = end_of(process, folder, seen)
    assert run.code == 143 and time.monotonic() - began < within_s, run.err
    (checkpoint,) = run.checkpoints.glob("step_*")
    assert checkpoint.name == f"step_{run.metrics()[-1]['step']}"
    return int(checkpoint.name[5:])


@pytest.mark.every_state
def test_sigterm_while_a_refit_waits_for_a_hanging_engine_saves_every_step(
    tmp_path: Path, task: Task, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, marker = uuid.uuid4().hex, tmp_path / "stopped"
    monkeypatch.setenv(MARK, mark)
    recipe = grpo_recipe(task, model)
    recipe["policy"]["megatron_cfg"] |= {"tensor_model_parallel_size": 2}
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 2}
    shaping = {"path": f"{__name__}:stop_the_engine", "options": {"marker": str(marker)}}
    recipe["grpo"] |= {"reward_shaping": {"enabled": True, **shaping}}
    words = ["grpo.max_num_steps=100000", "checkpointing.save_period=1000"]
    process = start_command("train", tmp_path, recipe, *words)
    try:
        seen = read_until_step(process, 1)
        assert marker.exists()
        time.sleep(2.0)  # the refit has begun
        assert saved_at_sigterm(process, tmp_path, seen, 3 * GONE_S) == 1  # a refit's own deadline is far later
    finally:
        process.kill()
    assert living(f"{MARK}={mark}") == []


@pytest.mark.every_state
@pytest.mark.parametrize("retry_wait_s", [0.0, 60.0], ids=["while it starts", "before it starts"])
def test_sigterm_while_a_killed_engine_restarts_saves_every_step(
    tmp_path: Path, task: Task, model: Path, monkeypatch: pytest.MonkeyPatch, retry_wait_s: float
) -> None:
    """Heard only when the engine was up again, it would lose the steps: batch systems kill after 30 s."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    recipe = grpo_recipe(task, model)
    recipe["policy"]["megatron_cfg"] |= {"tensor_model_parallel_size": 2}
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 2, "retry_wait_s": retry_wait_s}
    words = ["grpo.max_num_steps=100000", "checkpointing.save_period=1000"]
    process = start_command("train", tmp_path, recipe, *words)
    try:
        seen = read_until_step(process, 2)
        (logs,) = (tmp_path / "logs").glob("exp_*/workers")
        os.kill(workers_here(logs)["engine-0"].pid, signal.SIGKILL)
        time.sleep(3.0)  # the death is noticed, and its successor takes longer
        assert saved_at_sigterm(process, tmp_path, seen, GONE_S) >= 2
    finally:
        process.kill()
    assert living(f"{MARK}={mark}") == []
