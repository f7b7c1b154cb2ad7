"""All sections of a recipe in one object, and the values of keys that a recipe leaves null."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from grpo_mcore.recipe.schema.cluster import ClusterConfig, LaunchConfig
from grpo_mcore.recipe.schema.data import DataConfig
from grpo_mcore.recipe.schema.distillation import OnPolicyDistillationConfig
from grpo_mcore.recipe.schema.evaluation import EvalConfig, RehearseConfig
from grpo_mcore.recipe.schema.fine_tuning import DPOConfig, SFTConfig
from grpo_mcore.recipe.schema.grpo import ClippedPGLossConfig, GRPOConfig
from grpo_mcore.recipe.schema.outputs import CheckpointingConfig, GRPOLoggerConfig
from grpo_mcore.recipe.schema.policy import PolicyConfig
from grpo_mcore.recipe.schema.section import OffWhenNull, Section

GYM = "nemo_gym"
"""Name of the environment class, and usually of the section of `env`, through which agents of a NeMo Gym train."""


class RecipeSections(Section):
    """A whole recipe whose keys and types are checked. `MasterConfig` is one whose values go together, too."""

    policy: PolicyConfig
    """The model that is trained, and how it generates."""
    data: DataConfig
    """Datasets and their loading."""
    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The policy loss."""
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """The RL loop."""
    on_policy_distillation: Annotated[OnPolicyDistillationConfig, OffWhenNull] = Field(
        default_factory=OnPolicyDistillationConfig
    )
    """Teachers that score the policy's samples."""
    sft: SFTConfig = Field(default_factory=SFTConfig)
    """Supervised fine-tuning."""
    dpo: DPOConfig = Field(default_factory=DPOConfig)
    """Preference training."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation."""
    env: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Environments by name, each with the keys of its class."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Nodes and deadlines."""
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """The cluster job that runs this recipe."""
    rehearse: RehearseConfig = Field(default_factory=RehearseConfig)
    """Assumptions of `grpo-mcore rehearse`, which runs the recipe in virtual time."""
    logger: GRPOLoggerConfig = Field(default_factory=GRPOLoggerConfig)
    """Logs."""
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    """Checkpoints."""

    @model_validator(mode="after")
    def _fill_nulls(self) -> Self:
        fill_nulls(self)
        return self


Algorithm = Literal["grpo", "sft", "dpo", "eval"]


def algorithm_of(config: RecipeSections) -> Algorithm:
    """Return what the recipe describes: the first algorithm that it has a section of, training before evaluation; GRPO
    where it has none."""
    algorithms: tuple[Algorithm, ...] = ("grpo", "dpo", "sft", "eval")
    return next((name for name in algorithms if name in config.model_fields_set), "grpo")


def runs_grpo(config: RecipeSections) -> bool:
    """Return whether the recipe describes a GRPO run, see `algorithm_of`."""
    return algorithm_of(config) == "grpo"


def only_evaluates(config: RecipeSections) -> bool:
    """Return whether the recipe describes an evaluation and no training."""
    return algorithm_of(config) == "eval"


def value_at(config: Any, key: str) -> Any:
    """Return the value of a full key of a configuration."""
    for part in key.split("."):
        if isinstance(config, Section):
            config = getattr(config, part)
        else:
            config = config[int(part)] if isinstance(config, list) else config[part]
    return config


def set_value_at(config: Any, path: Sequence[str], value: Any) -> None:
    """Set the value at a path of a configuration. Its parts may have dots, such as names of evaluation sets."""
    section, name = config, path[-1]
    for part in path[:-1]:
        section = (
            getattr(section, part)
            if isinstance(section, Section)
            else (section[int(part) if isinstance(section, list) else part])
        )
    if isinstance(section, Section):
        setattr(section, name, value)
    else:
        section[int(name) if isinstance(section, list) else name] = value


NULL_MEANS: dict[str, tuple[str, ...] | int] = {
    "policy.tokenizer.name": ("policy.model_name",),
    "policy.logprob_batch_size": ("policy.train_micro_batch_size",),
    "policy.logprob_chunk_size": 1024,
    "policy.sequence_packing.train_mb_tokens": (
        "policy.max_total_sequence_length",
        "policy.train_micro_batch_size",
    ),
    "policy.sequence_packing.logprob_mb_tokens": ("policy.max_total_sequence_length", "policy.logprob_batch_size"),
    "policy.dynamic_batching.train_mb_tokens": ("policy.max_total_sequence_length", "policy.train_micro_batch_size"),
    "policy.dynamic_batching.logprob_mb_tokens": ("policy.max_total_sequence_length", "policy.logprob_batch_size"),
    "policy.megatron_cfg.pipeline_dtype": ("policy.precision",),
    "policy.megatron_cfg.optimizer.clip_grad": ("policy.max_grad_norm",),
    "policy.megatron_cfg.scheduler.start_weight_decay": ("policy.megatron_cfg.optimizer.weight_decay",),
    "policy.megatron_cfg.scheduler.end_weight_decay": ("policy.megatron_cfg.optimizer.weight_decay",),
    "policy.generation.max_new_tokens": ("policy.max_total_sequence_length",),
    "policy.generation.val_temperature": ("policy.generation.temperature",),
    "policy.generation.val_top_p": ("policy.generation.top_p",),
    "policy.generation.val_top_k": ("policy.generation.top_k",),
    "policy.generation.vllm_cfg.max_model_len": ("policy.max_total_sequence_length",),
    "policy.generation.vllm_cfg.precision": ("policy.precision",),
    "data.max_input_seq_length": ("policy.max_total_sequence_length",),
    "grpo.reward_shaping.max_response_length": ("policy.max_total_sequence_length",),
    "sft.val_global_batch_size": ("policy.train_global_batch_size",),
    "dpo.val_global_batch_size": ("policy.train_global_batch_size",),
    "dpo.sft_average_log_probs": ("dpo.preference_average_log_probs",),
}
"""Values of keys that a recipe leaves null: a number, the key whose value they take, or the keys whose product they
are. In this order: an entry may use the entries above it."""


def null_means(key: str) -> str | int | None:
    """Return the value of a key that is null, as a recipe would write it: 1024, "${a}" or "${mul:${a},${b}}". None if
    null means null."""
    meaning = NULL_MEANS.get(key)
    if not isinstance(meaning, tuple):
        return meaning
    sources = [f"${{{source}}}" for source in meaning]
    return f"${{mul:{','.join(sources)}}}" if len(sources) > 1 else sources[0]


def fill_nulls(config: RecipeSections) -> None:
    """Give keys that are null the values that follow from other keys, and each dataset the only environment."""
    for key, meaning in NULL_MEANS.items():
        parent, _, name = key.rpartition(".")
        section = value_at(config, parent)
        if section[name] is None:
            values = [value_at(config, source) for source in meaning] if isinstance(meaning, tuple) else [meaning]
            section[name] = math.prod(values) if len(values) > 1 else values[0]
    policy = config.policy
    scheduler = policy.megatron_cfg.scheduler
    if scheduler.lr_decay_iters is None:
        training = {"grpo": config.grpo, "dpo": config.dpo}.get(algorithm_of(config), config.sft)
        steps = training.max_num_steps
        scheduler.lr_decay_iters = max(steps, scheduler.lr_warmup_iters + 1)
    if policy.megatron_cfg.optimizer.bf16 is None:
        policy.megatron_cfg.optimizer.bf16 = policy.precision == "bfloat16"
    if len(config.env) == 1:
        for entry in [*config.data.train, *config.data.validation]:
            if entry.env_name is None:
                entry.env_name = next(iter(config.env))
