"""Start a run with planned kills under the supervisor."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.train import train
from grpo_mcore.driver.run.supervise import supervise
from grpo_mcore.recipe import MasterConfig, load_recipe
from tests.chaos.kills import Kill, Reaper
from tests.functional.runs import Task, grpo_recipe

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


def recipe_of(task: Task, model: Path, steps: int, **cluster: Any) -> dict[str, Any]:
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"max_num_steps": steps}
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None, "keep_top_k": 2, "is_async": True}
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 1, "max_restarts": 2, "retry_wait_s": 0.1, **cluster}
    return recipe
