"""A sweep that is interrupted goes on with the same command, and ends in a table and a page. Its runs, which have
processes of their own, find TransformerEngine: a stand-in, whose kernels raise for tensors on a CPU."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from grpo_mcore.base.orphan_reaper import marked
from grpo_mcore.cli.main import main
from grpo_mcore.cli.train import sweep
from grpo_mcore.cli.train.sweep import run_command
from tests.functional.runs import MARK, Run, Task, find_kernel_package, finished, run_here, sft_recipe, start_command
from tests.waiting import wait_until

METRICS = "logs/exp_*/metrics.jsonl"


def run_last_here(words: list[str], output: Path, stop: sweep.Stop) -> int:
    """Start a process for the first run of the sweep, and none for the second."""
    if "lr=4e-3" in str(output):
        return run_command(words, output, stop)
    output.parent.mkdir()
    with output.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        return main(words)


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
    wait_until(lambda: output.exists() and output.stat().st_size > 0, "output", 120)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75, (out, err)
    assert "stopped in lr=4e-3; the same command goes on from there" in out
    monkeypatch.setattr(sweep, "run_command", run_last_here)
    whole = finished("sweep", tmp_path, sft_recipe(task), *words)
    assert "1/2 lr=4e-3: " in whole.out and "2/2 lr=5e-3: starts" in whole.out
    for name in ("lr=4e-3", "lr=5e-3"):
        run = Run(tmp_path / "sweep" / name, 0, "", "")
        assert len([line for line in run.metrics() if "loss" in line]) == 2
    page = tmp_path / "sweep" / "report.html"
    assert f"{page}: open it in a browser" in whole.out and page.stat().st_size > 50_000
    again = run_here("sweep", tmp_path, sft_recipe(task), *words)
    assert again.code == 0 and again.out.count("finished, left as it is") == 2


@pytest.mark.every_state
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

    def has_trained() -> bool:
        return any('"prefix":"train"' in file.read_text() for file in output.parent.glob(METRICS))

    try:
        wait_until(has_trained, "a step", 120, 0.05)
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
    wait_until(lambda: not marked(f"{MARK}={tmp_path}"), "its end", 120, 0.05)
    assert not (tmp_path / "sweep" / "lr=5e-3").exists()
    saved = list((tmp_path / "sweep" / "lr=4e-3" / "checkpoints").glob("step_*"))
    assert saved, output.read_text()
