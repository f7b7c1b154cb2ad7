"""Whole runs on a tiny model and a task of its own: is the number even (1) or odd (0)?"""

import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.base.orphan_reaper import marked
from grpo_mcore.cli.main import main
from grpo_mcore.tools.demo.arithmetic import make_base_config, make_tokenizer

# Prefixes of metrics in which two equal runs may differ.
TIME_DEPENDENT = (
    *("unix_time", "timing/", "tail/", "tokens_per_sec", "policy_training_tokens_per_sec", "train_tflops"),
    *("seconds", "refit/"),
)

MARK = "NCCL_MARK_OF_THIS_TEST"
"""Variable of a kind that Ray and its workers inherit, by whose value a test finds the processes of its run."""
GONE_S = 20.0
"""Seconds within which a run that is interrupted has ended all its processes."""


@dataclass(frozen=True)
class Task:
    """Files of the task, and a model with random weights that is not trained on it."""

    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def val(self) -> Path:
        return self.folder / "val.jsonl"

    @property
    def untrained(self) -> Path:
        return self.folder / "untrained"


def make_task(folder: Path) -> Task:
    task = Task(folder)
    draw = random.Random(0)
    numbers = draw.sample(range(1000), 160)
    for path, part in ((task.train, numbers[:128]), (task.val, numbers[128:])):
        rows = [{"input": f"{number}%2=", "output": str(1 - number % 2)} for number in part]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_tokenizer(folder / "tokenizer")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    make_base_config(task.untrained, folder / "tokenizer", **sizes, head_dim=32, max_positions=64)
    return task


def sft_recipe(task: Task) -> dict[str, Any]:
    """Return a recipe of 20 steps over all 128 demonstrations: the model learns to say 0 or 1, but not when."""
    return {
        "sft": {"max_num_steps": 20, "max_num_epochs": 20, "val_period": 0, "val_at_start": True, "val_at_end": True},
        "policy": _policy(task.untrained, 64, 3.0e-3),
        "data": {"train": {"data_path": str(task.train)}, "validation": {"data_path": str(task.val)}},
        "cluster": {"backend": "local", "platform": "cpu"},
    }


def grpo_recipe(task: Task, model: Path) -> dict[str, Any]:
    """Return a recipe with 4 prompts x 4 generations, in process, with one optimizer step per RL step."""
    return {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 4, "max_num_epochs": 9}
        | {"val_period": 0, "max_val_samples": 8, "val_batch_size": 4, "seed": 1},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": _policy(model, 16, 1.0e-3)
        | {"generation": {"max_new_tokens": 4, "vllm_cfg": {"kv_cache_memory_gb": 0.1}}, "refit_buffer_size_gb": 1e-4},
        "data": {"train": {"data_path": str(task.train)}, "validation": {"data_path": str(task.val)}},
        "env": {"math": {"num_workers": 1}},
        "checkpointing": {"save_period": 100},
        "logger": {"num_val_samples_to_print": 1},
        "cluster": {"backend": "local", "platform": "cpu"},
    }


def agents_recipe(model: Path, prompts: int, data: Any, env: dict[str, Any], **server: Any) -> dict[str, Any]:
    """Return a recipe of one step of 2 samples a prompt, which agents play at the policy's own endpoint. `server`: more
    keys of vllm_cfg."""
    vllm = {"kv_cache_memory_gb": 0.1, "expose_http_server": True} | server
    return {
        "grpo": {"num_prompts_per_step": prompts, "num_generations_per_prompt": 2, "max_num_steps": 1, "val_period": 0},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": _policy(model, 2 * prompts, 1.0e-3)
        | {"generation": {"max_new_tokens": 20, "vllm_cfg": vllm}, "max_total_sequence_length": 160}
        | {"refit_buffer_size_gb": 1e-3},
        "data": {"train": data},
        "env": env,
        "checkpointing": {"enabled": False},
        "cluster": {"backend": "local", "platform": "cpu"},
    }


def _policy(model: Path, batch: int, lr: float) -> dict[str, Any]:
    optimizer = {"lr": lr, "min_lr": lr, "weight_decay": 0.0}
    scheduler = {"lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_warmup_init": lr}
    return {
        "model_name": str(model),
        "train_global_batch_size": batch,
        "train_micro_batch_size": 4,
        "max_total_sequence_length": 16,
        "precision": "float32",
        "megatron_cfg": {"optimizer": optimizer, "scheduler": scheduler},
    }


@dataclass(frozen=True)
class Run:
    """A finished run. `folder` holds its recipe, `logs` and `checkpoints`."""

    folder: Path
    code: int
    out: str
    err: str

    @property
    def logs(self) -> Path:
        return max(path.parent for path in (self.folder / "logs").glob("exp_*/metrics.jsonl"))

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def metrics(self, prefix: str = "train") -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl with this prefix, in the order in which they were written."""
        lines = map(json.loads, (self.logs / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["prefix"] == prefix]

    def outcome(self, prefix: str = "train") -> list[dict[str, Any]]:
        """Return `metrics` without the values that depend on the clock."""
        return [
            {name: value for name, value in line.items() if not name.startswith(TIME_DEPENDENT)}
            for line in self.metrics(prefix)
        ]


def write_recipe(folder: Path, recipe: dict[str, Any], name: str = "recipe.yaml") -> Path:
    """Write the recipe to a file; logs and checkpoints go beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = recipe | {
        "logger": recipe.get("logger", {}) | {"log_dir": str(folder / "logs")},
        "checkpointing": recipe.get("checkpointing", {}) | {"checkpoint_dir": str(folder / "checkpoints")},
    }
    path = folder / name
    path.write_text(yaml.safe_dump(recipe))
    return path


def run_here(verb: str, folder: Path, recipe: dict[str, Any], *words: str) -> Run:
    """Run `grpo-mcore VERB recipe.yaml words` in this process, so that torch and vLLM are imported only once."""
    return called(folder, verb, str(write_recipe(folder, recipe)), *words)


def called(folder: Path, *words: str) -> Run:
    """Run `grpo-mcore words` in this process."""
    from tests.functional.preload import preload

    preload()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*words])
    return Run(folder, code, out.getvalue(), err.getvalue())


def finished(verb: str, folder: Path, recipe: dict[str, Any], *words: str) -> Run:
    """Run as `run_here`, and assert that the run succeeds."""
    run = run_here(verb, folder, recipe, *words)
    assert run.code == 0, run.out + run.err
    return run


def start_command(verb: str, folder: Path, recipe: dict[str, Any], *words: str) -> subprocess.Popen[str]:
    """Start the same command as a process of its own. Its output arrives line by line."""
    path = write_recipe(folder, recipe)
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_mcore.cli.main", verb, str(path), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C in the terminal of the tests does not reach the run
    )


def run_command(verb: str, folder: Path, recipe: dict[str, Any], *words: str, timeout_s: float = 240) -> Run:
    return end_of(start_command(verb, folder, recipe, *words), folder, timeout_s=timeout_s)


def read_until_step(process: subprocess.Popen[str], step: int) -> str:
    """Read what a run prints, up to its line of this step; it must still be running then."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.lstrip().startswith(f"{step}/"):
            break
    assert process.poll() is None, f"it ended by itself: {seen}{process.communicate()[1]}"
    return seen


def end_of(process: subprocess.Popen[str], folder: Path, seen: str = "", timeout_s: float = 120) -> Run:
    """Wait for the end of a process that `start_command` started. `seen`: what was read of its output."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
    print(seen, out, "---", err)
    return Run(folder, process.returncode, seen + out, err)


def find_kernel_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that this test starts find the stand-in for TransformerEngine, and assert that they do."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "stand_ins"), prepend=":")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('transformer_engine') is None)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def assert_one_message(run: Run, code: int, *texts: str) -> None:
    """Assert that the run ended with this exit code, and printed these texts on standard error without a traceback."""
    assert run.code == code, run.err
    assert "Traceback" not in run.err + run.out
    message = run.err[run.err.index("grpo-mcore ") :]
    for text in texts:
        assert text in message, message


def living(mark: str) -> list[int]:
    """Return the processes of the run that are still alive."""
    found = []
    for pid in marked(mark):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            found.append(pid)
    return found


def shared_files(pids: list[int]) -> set[Path]:
    """Return the files of /dev/shm that these processes have mapped and that still exist."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, flags=re.M)}
    return {path for path in found if path.exists()}


def columns(lines: Sequence[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in names) for line in lines]
