from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.runs import Run, Task, make_task, run_here, sft_recipe


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Make the task, in a folder with a fixed name: uids, and so the seeds of all samples, derive from it."""
    folder = tmp_path_factory.mktemp("shared") / "task0"
    folder.mkdir()
    return make_task(folder)


@pytest.fixture(scope="session")
def sft_run(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The keys of the sampler must change nothing: what is trained is the whole distribution."""
    sampler = "policy.generation={temperature: 0.5, top_p: 0.5, top_k: 2}"
    return run_here("sft", tmp_path_factory.mktemp("sft"), sft_recipe(task), sampler)


@pytest.fixture(scope="session")
def model(sft_run: Run) -> Path:
    """Return a model that answers 0 or 1 and is right about half of the time."""
    assert sft_run.code == 0, sft_run.err
    return sft_run.checkpoints / "hf"
