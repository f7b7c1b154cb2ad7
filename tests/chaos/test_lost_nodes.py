"""A worker node of a Ray cluster is lost: the run waits for another one and reaches its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from grpo_mcore.base.processes import free_port
from grpo_mcore.cluster.ray_node import ENDED_BY_ITSELF
from grpo_mcore.observe import audit, read_ledger
from tests.chaos.runs import recipe_of
from tests.functional.runs import Task, write_recipe
from tests.processes_below import named
from tests.waiting import wait_until

STEPS = 6
LONG_S = 600.0
"""Seconds that a phase of the test may take on a busy machine."""


@contextmanager
def ray_node(role: str, address: str, index: int, cpus: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a node of a Ray cluster as the launchers do, and end it."""
    words = [role, f"--address={address}", f"--cpus={cpus}", f"--index={index}", f"--within={LONG_S}"]
    command = [sys.executable, "-m", "grpo_mcore.cluster.ray_node", *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=with_token(log.parent))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def with_token(folder: Path) -> dict[str, str]:
    """Return the environment with a token for Ray in `folder`, as the job script makes one."""
    path = folder / "token"
    if not path.exists():
        path.write_text("a" * 64)
    return {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


@pytest.mark.timeout(4 * LONG_S)
@pytest.mark.every_state
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_lost_worker_node_is_replaced_and_the_run_reaches_its_end(
    tmp_path: Path, task: Task, model: Path, sign: signal.Signals
) -> None:
    """The head has no cores, so all workers are on the other node."""
    recipe = recipe_of(task, model, STEPS, max_restarts=1, start_timeout_s=LONG_S)
    path, address = write_recipe(tmp_path / "run", recipe), f"127.0.0.1:{free_port()}"
    steps = tmp_path / "run" / "checkpoints"
    with ExitStack() as stack:
        stack.enter_context(ray_node("head", address, 0, 0, tmp_path / "head.log"))
        worker = stack.enter_context(ray_node("worker", address, 1, 4, tmp_path / "worker.log"))
        wait = [sys.executable, "-m", "grpo_mcore.cluster.ray_node", "wait", f"--address={address}", "--nodes=2"]
        subprocess.run(wait, check=True, timeout=LONG_S, env=with_token(tmp_path))
        command = [sys.executable, "-m", "grpo_mcore.cli.main", "train", str(path)]
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**with_token(tmp_path), "RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        stack.callback(run.kill)
        wait_until(lambda: (steps / "step_2").exists() or run.poll() is not None, "two steps", LONG_S, 0.2)
        assert run.poll() is None, run.communicate()[0]
        (raylet,) = named("raylet", worker.pid)
        raylet.send_signal(sign)
        stack.enter_context(ray_node("worker", address, 2, 4, tmp_path / "successor.log"))
        out, _ = run.communicate(timeout=2 * LONG_S)
    print(out)
    assert run.returncode == 0, out
    assert out.count("; it goes on from") == 1
    assert ENDED_BY_ITSELF in (tmp_path / "worker.log").read_text(), "job scripts find the bad node by it"
    told = audit(read_ledger(steps / "ledger.jsonl"))
    assert not told.flaws and told.steps == STEPS
