"""An asynchronous run as a user starts it: the command, Ray, two tensor-parallel policy ranks, a pool of its own for
the engine of two pipeline stages; interrupted, then resumed with an engine of one process to the end of the data, with
dynamic sampling."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.cluster.orphan_reaper import marked
from grpo_mcore.observe import audit, read_ledger
from tests.functional.runs import (
    GONE_S,
    MARK,
    Run,
    Task,
    assert_one_message,
    grpo_recipe,
    living,
    run_here,
    shared_files,
    start_command,
)
from tests.unit.tools.report_pages import data_of

PROMPTS = 24


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path) -> dict[str, Any]:
    """Return a recipe of 6 steps of 4 prompts, all the data once; the one engine has a pool of its own."""
    data = task.folder / "short-24.jsonl"
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:PROMPTS]))
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"max_num_steps": 99, "max_num_epochs": 1, "async_grpo": {"enabled": True}}
    recipe["loss_fn"] |= {"use_importance_sampling_correction": True}
    recipe["data"] = {"train": {"data_path": str(data)}}
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None}
    recipe["policy"]["generation"]["colocated"] = {"enabled": False, "resources": {"gpus_per_node": 2}}
    recipe["policy"]["generation"]["vllm_cfg"] |= {"pipeline_parallel_size": 2}
    recipe["policy"]["megatron_cfg"] |= {"tensor_model_parallel_size": 2}
    recipe["logger"] |= {"tensorboard_enabled": True}
    # Every process of the run gets MARK, by which the test finds it.
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 4}
    return recipe


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
    assert len(list((run.checkpoints / newest / "policy").glob("rng-*.pt"))) == 2


@pytest.mark.timeout(400)  # 95 s on two free cores
def test_interrupted_and_resumed_it_trains_on_every_prompt_once(
    tmp_path: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT goes to the whole process group, as from a terminal. Until then, the log-probs of engine and policy are
    compared after each refit."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    process = start_command("train", tmp_path, recipe, "logger.profile_steps=[2]", "policy.refit_parity=1.0001")
    assert process.stdout is not None
    try:
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line)
            if line.lstrip().startswith("3/"):
                break
        else:
            pytest.fail("it ended by itself: " + "".join(seen) + process.communicate()[1])
        running = living(f"{MARK}={mark}")
        files = shared_files(running)
        live = page_of(tmp_path)
        assert len(running) > 5 and files
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    print("".join(seen), out, "---", err)
    assert time.monotonic() - began < GONE_S
    stopped = Run(tmp_path, process.returncode, "".join(seen) + out, err)
    newest = f"step_{max(int(path.name[5:]) for path in stopped.checkpoints.glob('step_*'))}"
    assert_one_message(stopped, 130, "interrupted; every process that it started has ended", f"{newest}; `--resume`")
    assert err.count("\n") <= 3
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

    words = ["grpo.async_grpo.in_flight_weight_updates=true", "grpo.use_dynamic_sampling=true"]
    words += ["grpo.batch_multiplier=2", "policy.generation.vllm_cfg.pipeline_parallel_size=1"]
    words += ["policy.generation.colocated.resources.gpus_per_node=1", "cluster.gpus_per_node=3"]
    run = run_here("train", tmp_path, recipe, "--resume", *words)
    print(run.out, run.err)
    assert run.code == 0, run.err
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
    assert "1 x vLLM TP 1 float32, with devices of their own" in run.out and "2 policy ranks" in run.out
    assert json.loads((run.logs / "summary.json").read_text())["end"] == "the data has ended"
