"""Every command of the documents that the project was created from runs, as it is written there.

The documents are not part of the repository, so the commands are listed here. Changed are only: paths and the model
(`recipe`), `uv run`, which must not make an environment of its own here, and for GRPO `--check` at the end, which does
all that a run does before it starts processes. `sbatch ... ray.sub` is tested on a real Slurm in test_slurm.py,
the transforming commands in unit/cli/check/test_data.py; run_dpo.py and run_eval.py have tests of their own.
"""

import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.functional.preload import preload
from tests.functional.runs import Task, grpo_recipe, sft_recipe

ROOT = Path(__file__).resolve().parents[2]
MULTIPLE = (
    "uv run examples/run_grpo.py --config examples/configs/grpo_multiple_datasets.yaml grpo.num_prompts_per_step=32 "
    "data.use_multiple_dataloader=true data.num_prompts_per_dataloader=16 "
    "data.custom_dataloader=examples.custom_dataloader.custom_dataloader.example_custom_dataloader"
)
TRAIN = [  # (command, recipe at the place of its path)
    ("uv run python examples/run_grpo_math.py --config /path/to/grpo_gym_data.yaml", "grpo"),
    ("uv run python examples/run_grpo_math.py --config /path/to/grpo_gym_data.yaml cluster.gpus_per_node=8", "grpo"),
    ("uv run python examples/run_grpo_math.py --config /path/to/grpo_gym_data.yaml cluster.num_nodes=2", "grpo"),
    ("uv run examples/run_grpo_math.py --config <PATH TO YAML CONFIG> {overrides}", "grpo"),
    ("uv run examples/run_grpo.py --config <PATH TO YAML CONFIG> {overrides}", "grpo"),
    (MULTIPLE, "grpo_multiple_datasets"),
    ("uv run python examples/run_sft.py --config config.yaml", "sft"),
]
PLACES = (
    "/path/to/grpo_gym_data.yaml",
    "'<PATH TO YAML CONFIG>'",
    "config.yaml",
    "examples/configs/grpo_multiple_datasets.yaml",
)


def recipe(name: str, task: Task, folder: Path) -> Path:
    """Write a recipe like the documents', for the tiny model on CPU. `grpo` inherits grpo_math_1B as theirs do."""
    data = {"data_path": str(task.train)}
    if name == "sft":
        values: dict[str, Any] = {"defaults": ["sft"], **sft_recipe(task)}
        values["sft"]["max_num_steps"] = 1
    else:
        values = {"defaults": ["grpo_math_1B"], **grpo_recipe(task, task.untrained)}
        values["policy"] |= {"train_global_batch_size": 16}
        values["cluster"] = {"platform": "cpu"}
    if name == "grpo_multiple_datasets":
        values["defaults"] = [str(ROOT / "examples/configs/grpo_multiple_datasets.yaml")]
        values["data"] = {"train": [data | {"task_name": "a"}, data | {"task_name": "b"}], "validation": [data]}
        values["policy"] |= {"train_global_batch_size": 128}
    if name != "sft":
        values["data"]["default"] = {"prompt_file": None}  # the tiny tokenizer knows digits only
    values["logger"] = {"log_dir": str(folder / "logs"), "tensorboard_enabled": False}
    values["checkpointing"] = {"checkpoint_dir": str(folder / "checkpoints")}
    (file := folder / "written.yaml").write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize(("command", "name"), TRAIN)
def test_training_commands(
    command: str, name: str, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    preload()
    command = command.replace("<PATH TO YAML CONFIG>", "'<PATH TO YAML CONFIG>'")
    overrides = "grpo.max_num_steps=2 +grpo.val_at_end=true"
    for place in PLACES:
        command = command.replace(place, str(recipe(name, task, tmp_path)))
    command = command.replace("{overrides}", overrides)
    words = shlex.split(command.removeprefix("uv run ").removeprefix("python "))
    if "gpus_per_node" in command or "num_nodes" in command:
        words.append("policy.train_global_batch_size=16")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*words, *(["--check"] if name != "sft" else [])])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(words[0], run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert ("SFT is over" if name == "sft" else "all checks passed") in out


DEFAULTS = {
    "run_grpo.py": "grpo_math_1B", "run_grpo_math.py": "grpo", "run_sft.py": "sft",
    "run_distillation.py": "distillation_math", "run_dpo.py": "dpo",
}  # fmt: skip


@pytest.mark.parametrize("script", DEFAULTS)
def test_scripts_have_the_documented_default_and_one_message_for_a_mistake(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --config; a wrong key is reported with the file of the default."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, "cluster.num_node=3"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(f"examples/{script}", run_name="__main__")
    error = capsys.readouterr().err
    assert f"1 problem in examples/configs/{DEFAULTS[script]}.yaml" in error
    assert "command line: cluster.num_node: unknown key; nearest known key: cluster.num_nodes" in error
