"""A sweep that is interrupted goes on with the same command, and ends in a table and a page. Its runs, which have
processes of their own, find TransformerEngine: a stand-in, whose kernels raise for tensors on a CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mcore.cluster.orphan_reaper import marked
from tests.functional.runs import MARK, Run, Task, find_kernel_package, run_here, sft_recipe, start_command

METRICS = "logs/exp_*/metrics.jsonl"


def wait_until(true: Callable[[], bool], deadline_s: float = 120.0) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_a_sweep_is_interrupted_and_goes_on(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are clipped and Adam steps by torch's own kernels, not by those of the stand-in."""
    find_kernel_package(monkeypatch)
    words = ["policy.megatron_cfg.optimizer.lr=4e-3,never", "sft.max_num_steps=2", "--algorithm", "sft"]
    words += ["--folder", str(tmp_path / "sweep")]
    wrong = run_here("sweep", tmp_path, sft_recipe(task), *words)
    assert wrong.code == 2 and "optimizer.lr" in wrong.err and not (tmp_path / "sweep").exists()
    words[0] = "policy.megatron_cfg.optimizer.lr=4e-3,5e-3"
    process = start_command("sweep", tmp_path, sft_recipe(task), *words)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("1/2 lr=4e-3: starts; its output is in ")
    output = tmp_path / "sweep" / "lr=4e-3" / "output.txt"
    wait_until(lambda: output.exists() and output.stat().st_size > 0)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75, (out, err)
    assert "stopped in lr=4e-3; the same command goes on from there" in out
    whole = run_here("sweep", tmp_path, sft_recipe(task), *words)
    assert whole.code == 0, whole.err
    assert "1/2 lr=4e-3: " in whole.out and "2/2 lr=5e-3: starts" in whole.out
    for name in ("lr=4e-3", "lr=5e-3"):
        run = Run(tmp_path / "sweep" / name, 0, "", "")
        assert len([line for line in run.metrics() if "loss" in line]) == 2
    page = tmp_path / "sweep" / "report.html"
    assert f"{page}: open it in a browser" in whole.out and page.stat().st_size > 50_000
    again = run_here("sweep", tmp_path, sft_recipe(task), *words)
    assert again.code == 0 and again.out.count("finished, left as it is") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_sweep_alone_ends_its_run(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As a batch system or systemd sends it, to one process. A sweep that is killed leaves no run behind either."""
    monkeypatch.setenv(MARK, str(tmp_path))
    words = ["policy.megatron_cfg.optimizer.lr=4e-3,5e-3", "sft.max_num_steps=2000", "sft.max_num_epochs=2000"]
    words += ["--algorithm", "sft", "--folder", str(tmp_path / "sweep")]
    process = start_command("sweep", tmp_path, sft_recipe(task), *words)
    output = tmp_path / "sweep" / "lr=4e-3" / "output.txt"
    try:
        wait_until(lambda: any('"prefix":"train"' in file.read_text() for file in output.parent.glob(METRICS)))
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert (process.returncode, err) == (75, ""), (out, err)
        assert f"{number.name} is passed on to the run" in out and "stopped in lr=4e-3; the same command" in out
        assert not marked(f"{MARK}={tmp_path}")
    wait_until(lambda: not marked(f"{MARK}={tmp_path}"))
    assert not (tmp_path / "sweep" / "lr=5e-3").exists()
    saved = list((tmp_path / "sweep" / "lr=4e-3" / "checkpoints").glob("step_*"))
    assert saved, output.read_text()
