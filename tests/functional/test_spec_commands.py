"""Every command of the documents that the project was created from runs, as it is written there.

The documents are not part of the repository, so the commands are listed here. Changed are only: paths and the model
(`recipe`), `uv run`, which must not make an environment of its own here, and for GRPO `--check` at the end, which does
all that a run does before it starts processes. `sbatch ... ray.sub` is tested on a real Slurm in test_slurm.py;
run_dpo.py and run_eval.py have tests of their own.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
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
TRANSFORM = [
    "transform_gym_to_grpo.py --input rollouts.jsonl --output grpo_data/train.jsonl --reward_threshold 0.0",
    "transform_gym_to_grpo.py --input rollouts.jsonl --output grpo_data/val.jsonl --reward_threshold 0.0",
    "transform_gym_to_grpo.py --input rollouts.jsonl --output train.jsonl",
    "transform_gym_to_sft.py --input rollouts.jsonl --output sft_train.jsonl --reward_threshold 0.95 --format openai",
    "transform_gym_to_sft.py --input rollouts.jsonl --output sft_train.jsonl --reward_threshold 0.95 --format simple",
    "transform_gym_to_dpo.py --input rollouts.jsonl --output dpo_train.jsonl --min_gap 0.2 --strategy same_prompt",
    "transform_gym_to_dpo.py --input rollouts.jsonl --output dpo_train.jsonl --min_gap 0.2 --strategy stratified",
]


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
    "run_distillation.py": "distillation_math",
}  # fmt: skip


@pytest.mark.parametrize("script", DEFAULTS)
def test_scripts_have_the_documented_default_and_one_message_for_a_mistake(script: str) -> None:
    """Without --config; a wrong key is reported with the file of the default, before anything is imported."""
    ran = subprocess.run(
        [sys.executable, f"examples/{script}", "cluster.num_node=3"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert f"1 problem in examples/configs/{DEFAULTS[script]}.yaml" in ran.stderr
    assert "command line: cluster.num_node: unknown key; nearest known key: cluster.num_nodes" in ran.stderr


@pytest.mark.parametrize("command", TRANSFORM)
def test_transforming_commands_run_from_any_folder(command: str, tmp_path: Path) -> None:
    rows = []
    for reward, answer in ((1.0, "2"), (0.0, "3")):
        prompt = [{"role": "user", "content": "1+1="}]
        params = {"input": prompt, "metadata": {"ground_truth": "2"}}
        output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]}]
        rows.append({"responses_create_params": params, "output": output, "response": {"output": output}})
        rows[-1]["reward"] = reward
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script, *words = shlex.split(command)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, str(ROOT / script), *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    written = [json.loads(line) for line in (tmp_path / words[3]).read_text().splitlines()]
    fields = {"grpo": {"input", "output", "ground_truth"}, "dpo": {"prompt", "chosen", "rejected"}}.get(script[17:-3])
    fields = fields or ({"messages"} if "openai" in command else {"input", "output"})
    assert written and fields <= set(written[0])
