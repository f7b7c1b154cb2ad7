"""Real runs for `async.py`: a small model with random weights, one policy rank, one vLLM engine, Ray, on CPU.

A model that was never taught anything ends an answer after each token with about the same probability: lengths are
geometric, the longest of a step several times the mean. The learning rate is next to nothing, so they stay so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from grpo_mcore.algorithms.grpo import grpo_train, setup
from grpo_mcore.data import build_task_data, build_train_dataloader, load_tokenizer
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.run.setup import make_loss, start_cluster, start_environments, wait_until_ready
from grpo_mcore.observe import Logger, read_metrics
from grpo_mcore.recipe import MasterConfig, load_recipe
from grpo_mcore.tools.demo.arithmetic import ArithmeticTask, make_arithmetic_task, make_base_config

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


def ahead(age: int, **more: Any) -> tuple[str, ...]:
    """Overrides of a run at this age."""
    keys = {"enabled": True, "max_trajectory_age_steps": age, "in_flight_weight_updates": True} | more
    at = "grpo.async_grpo."
    return tuple(f"{at}{name}={str(value).lower()}" for name, value in keys.items()) if age else ()


@dataclass(frozen=True)
class Mode:
    """How a row's run is laid out. Age 0 of each layout comes first: it gives the bound."""

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


def measure(folder: Path, task: ArithmeticTask, chosen: Sequence[Mode], steps: int) -> Iterator[Measured]:
    """A run of each mode, one after another on the same policy and engine."""
    tokenizer = load_tokenizer(str(folder / "model"))
    config = recipe(folder, task, chosen[0], steps)
    logger = Logger(config.logger)
    with closing(logger), start_cluster(config, logger.log_dir) as cluster:
        data = build_task_data(config.data.train, [], tokenizer, PROMPT + LONGEST)
        environments = start_environments(config, cluster, data.env_names)
        policy, engines, *_, state, _ = setup(config, tokenizer, data.train, None, cluster=cluster, logger=logger)
        wait_until_ready(config, cluster, list(environments.values()), "start of the environment")
        for mode in chosen:
            config = recipe(folder, task, mode, steps)
            policy.updates, engines.pauses = 0, config.grpo.async_grpo.pauses
            loader = build_train_dataloader(data.train, config.data, PROMPTS, config.grpo.seed)
            with closing(Logger(config.logger)) as logger:
                grpo_train(
                    policy, engines, loader, None, tokenizer, make_loss(config), environments, None, logger,
                    CheckpointManager(config.checkpointing), dict(state), config,  # type: ignore[arg-type]
                )  # fmt: skip
            yield measured(read_metrics(logger.log_dir / "metrics.jsonl", "train")[WARM_UP:])


def recipe(folder: Path, task: ArithmeticTask, mode: Mode, steps: int) -> MasterConfig:
    """The importance-sampling correction is part of all runs, so that all of them train in the same way."""
    return load_recipe(
        "grpo-arithmetic-cpu",
        [
            f"policy.model_name={folder / 'model'}", f"data.train.data_path={task.train}", "data.validation=null",
            f"logger.log_dir={folder / 'logs'}", "logger.tensorboard_enabled=false",
            "checkpointing.enabled=false", f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
            "grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0",
            f"grpo.max_num_steps={steps + WARM_UP}", f"grpo.num_prompts_per_step={PROMPTS}",
            f"grpo.num_generations_per_prompt={GENERATIONS}",
            f"policy.train_global_batch_size={PROMPTS * GENERATIONS}",
            f"policy.max_total_sequence_length={PROMPT + LONGEST}", f"policy.generation.max_new_tokens={LONGEST}",
            "policy.megatron_cfg.tensor_model_parallel_size=1", "policy.megatron_cfg.optimizer.lr=1.0e-9",
            "policy.megatron_cfg.optimizer.min_lr=1.0e-9", "policy.megatron_cfg.scheduler.lr_warmup_init=1.0e-9",
            "loss_fn.use_importance_sampling_correction=true", *mode.overrides,
        ],
    ).config  # fmt: skip


def measured(rows: Sequence[Mapping[str, Any]]) -> Measured:
    """Return the measurements in the lines of a run's metrics.jsonl."""
    # A step ahead of which everything was there has waited for nothing.
    waits = [row.get("timing/generate", 0.0) + row.get("timing/reward", 0.0) for row in rows]
    tokens = [row["generated_length"] * row["num_samples"] for row in rows]
    ended = sum(row["num_samples"] * (1 - row["truncation_rate"]) for row in rows)
    return Measured(
        total=mean(row["timing/total"] for row in rows),
        waited=mean(waits),
        refit=mean(row.get("timing/refit", 0.0) for row in rows),  # the last step of a run ahead has none
        waits=tuple(waits),
        longest=tuple(row["generated_length_max"] for row in rows),
        tokens=tuple(tokens),
        stop=ended / sum(tokens),
    )
