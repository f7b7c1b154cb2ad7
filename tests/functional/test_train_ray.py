"""Whole synchronous GRPO runs as a user starts them: the command, Ray, two tensor-parallel policy ranks, one engine
beside them. `make test` runs the asynchronous one of test_async_ray.py."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.cluster.inspection import workers_here
from tests.functional.runs import (
    GONE_S,
    MARK,
    Run,
    Task,
    assert_one_message,
    grpo_recipe,
    living,
    run_command,
    shared_files,
    start_command,
)

pytestmark = pytest.mark.every_state


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path) -> dict[str, Any]:
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"max_num_steps": 3, "val_at_start": True, "val_at_end": True}
    recipe["policy"]["megatron_cfg"] |= {"tensor_model_parallel_size": 2}
    recipe["logger"] |= {"tensorboard_enabled": True}
    # Every process of the run gets this variable, by which the test finds it.
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 2}
    return recipe


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return f"{MARK}={value}"


def test_a_run_from_the_command_line(tmp_path: Path, recipe: dict[str, Any], mark: str) -> None:
    run = run_command("train", tmp_path, recipe, "logger.profile_steps=[2]")
    print(run.out, run.err)
    assert run.code == 0, run.err
    assert living(mark) == []
    _check_files(run)
    _check_output(run)


def _check_files(run: Run) -> None:
    summary = json.loads((run.logs / "summary.json").read_text())
    assert summary["steps"] == 3
    assert 0 <= summary["val_accuracy_before"] <= 1 and 0 <= summary["val_accuracy_after"] <= 1
    assert summary["seconds"] > 0 and summary["tokens_per_second"] > 0
    errors = [line["token_mult_prob_error"] for line in run.metrics()]
    assert len(errors) == 3 and max(errors) <= 1.02
    assert summary["max_token_mult_prob_error"] == max(errors)
    assert [line["accuracy"] for line in run.metrics("validation")] == [
        summary["val_accuracy_before"],
        summary["val_accuracy_after"],
    ]
    assert list((run.logs / "tensorboard").glob("events.*"))
    assert (run.logs / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    workers = {path.name for path in (run.logs / "workers").glob("*.log")}
    assert workers >= {"policy-0.log", "policy-1.log", "engine-0.log", "environment-math.log"}
    profiles = {path.name: path.read_text() for path in (run.logs / "profile" / "step_000002").iterdir()}
    assert sorted(profiles) == ["engine-0-0.json", "policy-0.json", "policy-1.json"]
    assert all("aten::" in profile for profile in profiles.values())
    assert "vllm" in profiles["engine-0-0.json"] and "Backward" in profiles["policy-0.json"]
    (checkpoint,) = run.checkpoints.glob("step_*")
    assert checkpoint.name == "step_3"
    assert len(list((checkpoint / "policy").glob("rng-*.pt"))) == 2
    assert yaml.safe_load((checkpoint / "config.yaml").read_text())["cluster"]["gpus_per_node"] == 2


def _check_output(run: Run) -> None:
    for text in ("TP 2 x PP 1 x DP 1", "ray, 2 policy ranks", " 3/3 ", "where everything lies"):
        assert text in run.out
    assert run.err == ""


def test_ctrl_c(tmp_path: Path, recipe: dict[str, Any], mark: str) -> None:
    """Send SIGINT in the middle of a run to the whole process group, as a terminal does."""
    process = start_command("train", tmp_path, recipe, "grpo.max_num_steps=100000", "checkpointing.save_period=2")
    assert process.stdout is not None
    seen: list[str] = []
    try:
        for line in process.stdout:
            seen.append(line)
            if line.lstrip().startswith("3/"):
                break
        assert process.poll() is None, "".join(seen) + process.communicate()[1]
        running = living(mark)
        assert len(running) > 5
        files = shared_files(running)
        assert files
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    print("".join(seen), out, "---", err)
    assert time.monotonic() - began < GONE_S
    run = Run(tmp_path, process.returncode, "".join(seen) + out, err)
    newest = f"step_{max(int(path.name[5:]) for path in run.checkpoints.glob('step_*'))}"
    assert_one_message(run, 130, "interrupted; every process that it started has ended", f"{newest}; `--resume`")
    assert err.count("\n") <= 3
    assert living(mark) == []
    assert not {path for path in files if path.exists()}
    assert not list(run.checkpoints.glob("tmp_*"))


@pytest.mark.parametrize("retry_wait_s", [0.0, 60.0], ids=["while it starts", "before it starts"])
def test_sigterm_while_a_killed_engine_restarts_saves_every_step(
    tmp_path: Path, recipe: dict[str, Any], mark: str, retry_wait_s: float
) -> None:
    """It was heard when the engine was up: batch systems kill after 30 s, and the steps were lost."""
    words = ["grpo.max_num_steps=100000", "checkpointing.save_period=1000", f"cluster.retry_wait_s={retry_wait_s}"]
    process = start_command("train", tmp_path, recipe, *words)
    assert process.stdout is not None
    seen: list[str] = []
    try:
        for line in process.stdout:
            seen.append(line)
            if line.lstrip().startswith("2/"):
                break
        assert process.poll() is None, "".join(seen) + process.communicate()[1]
        (logs,) = (tmp_path / "logs").glob("exp_*/workers")
        os.kill(workers_here(logs)["engine-0"].pid, signal.SIGKILL)
        time.sleep(3.0)  # the death is noticed, and its successor takes longer
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
    print("".join(seen), out, "---", err)
    assert process.returncode == 143 and time.monotonic() - began < GONE_S
    run = Run(tmp_path, process.returncode, "".join(seen) + out, err)
    (checkpoint,) = run.checkpoints.glob("step_*")
    assert int(checkpoint.name[5:]) == run.metrics()[-1]["step"] >= 2
    assert living(mark) == []
