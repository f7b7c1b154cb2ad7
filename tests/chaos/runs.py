"""Start a run with planned kills under the supervisor."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_mcore.algorithms.run_control.supervise import supervise
from grpo_mcore.cli import train
from grpo_mcore.recipe import MasterConfig, load_recipe
from tests.chaos.kills import Kill, Reaper

PLAN, LOG = "kills.json", "killed.txt"


def attempt(config: MasterConfig, resume: str | bool | None, began: float) -> tuple[int, str | None]:
    """Run `grpo-mcore train` with the remaining kills of the plan next to its checkpoints."""
    folder = Path(config.checkpointing.checkpoint_dir).parent
    kills = [Kill(**fields) for fields in json.loads((folder / PLAN).read_text())]
    with pytest.MonkeyPatch.context() as patch:
        Reaper(kills, folder / LOG).install(patch)
        return train.attempt(config, resume, began)


def write_plan(folder: Path, kills: Sequence[Kill]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAN).write_text(json.dumps([vars(kill) for kill in kills]))


def main() -> int:
    """python -m tests.chaos.runs RECIPE"""
    return supervise(attempt, load_recipe(sys.argv[1], []).config, None, time.time())


if __name__ == "__main__":
    sys.exit(main())
