import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.base.processes import free_port
from grpo_mcore.environments.math import math_environment
from grpo_mcore.environments.verifier_pool import Result, VerifierPool, WorkerSpec
from tests.functional.runs import Run, Task, make_task, run_here, sft_recipe
from tests.functional.slurm import Slurm, loopback, why_not

_pools: dict[WorkerSpec, VerifierPool] = {}
_tasks: list[Task] = []
_runs: dict[str, Run] = {}
"""Runs by name. These three outlive their fixtures, of which tests/chaos and tests/functional have each its own."""


@pytest.fixture(scope="session", autouse=True)
def shared_verifiers() -> Iterator[None]:
    """Let the runs of this process use the same pools of math verifiers. Starting one takes longer than a tiny run;
    tests/unit/environments and the runs under Ray start and end their own."""

    class Shared:
        def __init__(self, spec: WorkerSpec) -> None:
            self._pool = _pools[spec] = _pools.get(spec) or VerifierPool(spec)

        def run(self, jobs: Sequence[Sequence[Any]]) -> list[Result]:
            return self._pool.run(jobs)

        def close(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_environment, "VerifierPool", Shared)
        yield
    while _pools:
        _pools.popitem()[1].close()


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Make the task, in a folder with a fixed name: uids, and so the seeds of all samples, derive from it."""
    if not _tasks:
        folder = tmp_path_factory.mktemp("shared") / "task0"
        folder.mkdir()
        _tasks.append(make_task(folder))
    return _tasks[0]


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """Return the address of an empty bucket on a server that speaks S3's protocol, to which the environment leads.

    The server has a process of its own: torch looks at all objects of this one, and must not look at those of flask."""
    port = free_port()
    place = f"http://127.0.0.1:{port}"
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", place)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(urllib.request.Request(f"{place}/runs", method="PUT")):
                    break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        yield "s3://runs"
    server.terminate()
    server.wait()


@pytest.fixture(scope="session")
def sft_run(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The keys of the sampler must change nothing: what is trained is the whole distribution."""
    if "sft" not in _runs:
        sampler = "policy.generation={temperature: 0.5, top_p: 0.5, top_k: 2}"
        _runs["sft"] = run_here("sft", tmp_path_factory.mktemp("sft"), sft_recipe(task), sampler)
    return _runs["sft"]


@pytest.fixture(scope="session")
def model(sft_run: Run) -> Path:
    """Return a model that answers 0 or 1 and is right about half of the time."""
    assert sft_run.code == 0, sft_run.err
    return sft_run.checkpoints / "hf"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if reason := why_not():
        pytest.skip(reason)
    with loopback() as running:
        yield running
