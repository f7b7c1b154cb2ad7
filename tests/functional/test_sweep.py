"""A sweep that is interrupted goes on with the same command, and ends in a table and a page. Its runs, which have
processes of their own, find TransformerEngine: a stand-in, whose kernels raise for tensors on a CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.functional.runs import Run, Task, find_kernel_package, run_here, sft_recipe, start_command


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
