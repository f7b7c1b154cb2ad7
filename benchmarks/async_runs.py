"""Real runs for `async.py`: a small model with random weights, one policy rank, one vLLM engine, Ray, on CPU.

A model that was never taught anything ends an answer after each token with about the same probability: lengths are
geometric, the longest of a step several times the mean. The learning rate is next to nothing, so they stay so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from grpo_mcore.cli.train import train
from grpo_mcore.data.arithmetic import ArithmeticTask, make_arithmetic_task, make_base_config
from grpo_mcore.observe import read_metrics
from grpo_mcore.recipe import load_recipe

PROMPTS, GENERATIONS, LONGEST, PROMPT = 16, 4, 128, 16
WARM_UP = 2
SHAPE = {
    "hidden_size": 256, "intermediate_size": 1024, "num_layers": 6, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64,
}  # fmt: skip
POOL = (
    "cluster.gpus_per_node=2",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
)
SHARED = ("cluster.gpus_per_node=1",)
AHEAD = "loss_fn.use_importance_sampling_correction=true"


def ahead(age: int, **more: Any) -> tuple[str, ...]:
    """Overrides of a run at this age."""
    keys = {"enabled": True, "max_trajectory_age_steps": age, "in_flight_weight_updates": True} | more
    at = "grpo.async_grpo."
    return (AHEAD, *(f"{at}{name}={str(value).lower()}" for name, value in keys.items())) if age else ()


@dataclass(frozen=True)
class Mode:
    """How a row's run is laid out. `age` 0 of each `layout` comes first: it gives the bound."""

    layout: str
    name: str
    age: int
    overrides: tuple[str, ...]


def modes(ages: Sequence[int]) -> list[Mode]:
    """Engines with a pool of their own at each age; sharing the policy's cores without and with partial rollouts."""
    own = [Mode("disaggregated", "disaggregated", age, (*POOL, *ahead(age))) for age in ages]
    partial = ahead(3, partial_rollouts=True, group_order="oldest_first", max_groups_in_flight=2 * PROMPTS)
    return [
        *own,
        Mode("colocated", "colocated", 0, SHARED),
        Mode("colocated", "colocated", 1, (*SHARED, *ahead(1))),
        Mode("colocated", "colocated, partial rollouts", 3, (*SHARED, *partial)),
    ]


@dataclass(frozen=True)
class Measured:
    """Seconds a step on the driver's clock: all of it, waiting for generation and rewards, refits. By step: the longest
    sample and all generated tokens, beside `waits`. `stop`: probability that a token ends its sample."""

    total: float
    waited: float
    refit: float
    waits: tuple[float, ...]
    longest: tuple[float, ...]
    tokens: tuple[float, ...]
    stop: float

    @property
    def busy(self) -> float:
        """All but generation."""
        return self.total - self.waited


def prepare(folder: Path) -> ArithmeticTask:
    task = make_arithmetic_task(folder / "task")
    make_base_config(folder / "model", task.tokenizer, **SHAPE)
    return task


def run(folder: Path, task: ArithmeticTask, mode: Mode, steps: int) -> Measured:
    """Averages over all steps but the first ones, which load kernels."""
    logs = folder / mode.name.replace(", ", "-").replace(" ", "-") / f"age-{mode.age}"
    config = load_recipe(
        "grpo-arithmetic-cpu",
        [
            f"policy.model_name={folder / 'model'}", f"data.train.data_path={task.train}",
            f"data.validation.data_path={task.val}", f"logger.log_dir={logs}", "logger.tensorboard_enabled=false",
            "checkpointing.enabled=false", "grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0",
            f"grpo.max_num_steps={steps + WARM_UP}", f"grpo.num_prompts_per_step={PROMPTS}",
            f"grpo.num_generations_per_prompt={GENERATIONS}",
            f"policy.train_global_batch_size={PROMPTS * GENERATIONS}", "policy.precision=float32",
            f"policy.max_total_sequence_length={PROMPT + LONGEST}", f"policy.generation.max_new_tokens={LONGEST}",
            "policy.megatron_cfg.tensor_model_parallel_size=1", "policy.megatron_cfg.sequence_parallel=false",
            "policy.megatron_cfg.optimizer.lr=1.0e-9", "policy.megatron_cfg.optimizer.min_lr=1.0e-9",
            "policy.megatron_cfg.scheduler.lr_warmup_init=1.0e-9", *mode.overrides,
        ],
    ).config  # fmt: skip
    train(config)
    return measured(read_metrics(logs / "exp_001" / "metrics.jsonl", "train")[WARM_UP:])


def measured(rows: Sequence[Mapping[str, Any]]) -> Measured:
    """Of the lines of a run's metrics.jsonl."""
    waits = [row["timing/generate"] + row.get("timing/reward", 0.0) for row in rows]
    tokens = [row["generated_length"] * row["num_samples"] for row in rows]
    ended = sum(row["num_samples"] * (1 - row["truncation_rate"]) for row in rows)
    return Measured(
        total=mean(row["timing/total"] for row in rows),
        waited=mean(waits),
        refit=mean(row["timing/refit"] for row in rows),
        waits=tuple(waits),
        longest=tuple(row["generated_length_max"] for row in rows),
        tokens=tuple(tokens),
        stop=ended / sum(tokens),
    )
