"""All sections of a recipe in one object, and the values of keys that a recipe leaves null."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from grpo_mcore.base.processor import lacks_bfloat16
from grpo_mcore.recipe.schema.cluster import ClusterConfig, LaunchConfig
from grpo_mcore.recipe.schema.data import DataConfig, dataset_by_name
from grpo_mcore.recipe.schema.distillation import OnPolicyDistillationConfig
from grpo_mcore.recipe.schema.evaluation import EvalConfig, RehearseConfig
from grpo_mcore.recipe.schema.fine_tuning import DPOConfig, RMConfig, SFTConfig
from grpo_mcore.recipe.schema.grpo import ClippedPGLossConfig, GRPOConfig
from grpo_mcore.recipe.schema.outputs import CheckpointingConfig, GRPOLoggerConfig
from grpo_mcore.recipe.schema.policy import PolicyConfig
from grpo_mcore.recipe.schema.ppo import PPOConfig, ValueLossConfig
from grpo_mcore.recipe.schema.section import OffWhenNull, Section

Precision = Literal["auto", "bfloat16", "float32"]
"""Values of policy.precision. No configuration has auto: `fill_nulls` replaces it."""

GYM, VERIFIERS = "nemo_gym", "verifiers"
"""Names of the environment classes whose agents generate whole samples: those of a NeMo Gym, and of verifiers."""


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
    ppo: Annotated[PPOConfig, OffWhenNull] = Field(default_factory=PPOConfig)
    """Training with a critic."""
    value: PolicyConfig | None = None
    """The critic, with the keys of `policy`. What it does not say is as in `policy`. null: there is none."""
    value_loss_fn: ValueLossConfig = Field(default_factory=ValueLossConfig)
    """The critic's loss."""
    on_policy_distillation: Annotated[OnPolicyDistillationConfig, OffWhenNull] = Field(
        default_factory=OnPolicyDistillationConfig
    )
    """Teachers that score the policy's samples."""
    sft: SFTConfig = Field(default_factory=SFTConfig)
    """Supervised fine-tuning."""
    dpo: DPOConfig = Field(default_factory=DPOConfig)
    """Preference training."""
    rm: RMConfig = Field(default_factory=RMConfig)
    """Training of a reward model."""
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

    @model_serializer(mode="wrap")
    def _without_unused_sections(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the sections of algorithms that the recipe does not have, so that what is written is read as a
        recipe of the same algorithm."""
        used = self.model_fields_set | {algorithm_of(self)}
        return {name: value for name, value in dump(self).items() if name not in ALGORITHMS or name in used}


NEED_BFLOAT16 = {
    "policy.megatron_cfg.optimizer.use_precision_aware_optimizer": True,
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": True,
    "policy.generation.vllm_cfg.precision": "fp8",
}
"""Values of keys that need policy.precision bfloat16: recipe/validation/rules.yaml."""

Algorithm = Literal["grpo", "sft", "dpo", "rm", "eval"]

FINE_TUNING: tuple[Algorithm, ...] = ("dpo", "rm", "sft")
"""Algorithms that learn from given examples, without engines."""
ALGORITHMS: tuple[Algorithm, ...] = ("grpo", *FINE_TUNING, "eval")
"""All algorithms, which are names of sections: a recipe is one of the first that it has."""


def algorithm_of(config: RecipeSections) -> Algorithm:
    """Return what the recipe describes: the first of ALGORITHMS that it has a section of; GRPO where it has none."""
    return next((name for name in ALGORITHMS if name in config.model_fields_set), "grpo")


def settle_algorithm(config: RecipeSections, algorithm: Algorithm) -> None:
    """Make a recipe one of the algorithm that a verb runs, whichever sections it has."""
    config.model_fields_set.difference_update(ALGORITHMS[: ALGORITHMS.index(algorithm)])
    config.model_fields_set.add(algorithm)


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


NULL_MEANS: dict[str, tuple[str | float, ...] | int] = {
    "policy.tokenizer.name": ("policy.model_name",),
    "policy.logprob_batch_size": ("policy.train_micro_batch_size",),
    "policy.logprob_chunk_size": 1024,
    "policy.sequence_packing.train_mb_tokens": ("policy.max_total_sequence_length", "policy.train_micro_batch_size"),
    "policy.sequence_packing.logprob_mb_tokens": ("policy.max_total_sequence_length", "policy.logprob_batch_size"),
    "policy.dynamic_batching.train_mb_tokens": ("policy.max_total_sequence_length", "policy.train_micro_batch_size"),
    "policy.dynamic_batching.logprob_mb_tokens": ("policy.max_total_sequence_length", "policy.logprob_batch_size"),
    "policy.megatron_cfg.pipeline_dtype": ("policy.precision",),
    "policy.megatron_cfg.optimizer.min_lr": ("policy.megatron_cfg.optimizer.lr", 0.1),
    "policy.megatron_cfg.scheduler.lr_warmup_init": ("policy.megatron_cfg.optimizer.lr", 0.1),
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
    "rm.val_global_batch_size": ("policy.train_global_batch_size",),
    "dpo.sft_average_log_probs": ("dpo.preference_average_log_probs",),
}
"""Values of keys that a recipe leaves null: a number, the key whose value they take, or the keys and numbers whose
product they are. In this order: an entry may use the entries above it."""
_DECAY, _BF16 = "policy.megatron_cfg.scheduler.lr_decay_iters", "policy.megatron_cfg.optimizer.bf16"
"""Further keys that follow from others where they are null."""


def null_means(key: str) -> str | int | None:
    """Return the value of a key that is null, as a recipe would write it: 1024, "${a}" or "${mul:${a},${b}}". None if
    null means null."""
    meaning = NULL_MEANS.get(key)
    if not isinstance(meaning, tuple):
        return meaning
    sources = [f"${{{source}}}" if isinstance(source, str) else str(source) for source in meaning]
    return f"${{mul:{','.join(sources)}}}" if len(sources) > 1 else sources[0]


def derived_value(key: str, value_of: Callable[[str], Any], algorithm: str) -> Any:
    """Return the value that a key of `policy` or another section has in a recipe of `algorithm` which leaves it null;
    None if null means null. `value_of`: value of a full key, None if it is not known."""
    if key == _BF16:
        return value_of("policy.precision") == "bfloat16"
    if key == _DECAY:
        steps = value_of(f"{algorithm}.max_num_steps")
        return steps and max(steps, value_of("policy.megatron_cfg.scheduler.lr_warmup_iters") + 1)
    meaning = NULL_MEANS.get(key)
    if not isinstance(meaning, tuple):
        return meaning
    factors = [value_of(source) if isinstance(source, str) else source for source in meaning]
    if len(factors) == 1:
        return factors[0]
    product = None if None in factors else math.prod(factors)
    return float(f"{product:.12g}") if isinstance(product, float) else product  # 5e-07, not 5.000000000000001e-07


def fill_nulls(config: RecipeSections) -> None:
    """Give keys that are null the values that follow from other keys, and each dataset the only environment."""
    if config.policy.precision == "auto":
        config.policy.precision = fast_precision(config, on_cpu=config.cluster.platform == "cpu")
        config.policy.model_fields_set.discard("precision")  # nobody chose it: `settle_precision`
    algorithm = "sft" if only_evaluates(config) else algorithm_of(config)
    for key in (*NULL_MEANS, _DECAY, _BF16):
        parent, _, name = key.rpartition(".")
        section = value_at(config, parent)
        if section[name] is None:
            section[name] = derived_value(key, partial(value_at, config), algorithm)
    if config.value is not None:
        fill_nulls(config.model_copy(update={"policy": config.value, "value": None}))
    for entry in [*config.data.train, *config.data.validation]:
        if entry.env_name is None and len(config.env) == 1:
            entry.env_name = next(iter(config.env))
        elif entry.env_name is None and entry.dataset_name in config.env:  # as recipes of NeMo RL for images have it
            entry.env_name = entry.dataset_name
    for entry in [*config.data.train, *config.data.validation]:
        settings = config.env.get(entry.env_name or "", {}).get(VERIFIERS)
        if dataset_by_name(entry.dataset_name) == "Verifiers" and isinstance(settings, dict):
            kwargs = {"environment": settings.get("environment"), **entry.dataset_kwargs}
            taskset = {**(settings.get("taskset") or {}), **(kwargs.get("taskset") or {})}
            entry.dataset_kwargs = kwargs | {"taskset": taskset}


def fast_precision(config: RecipeSections | dict[str, Any], *, on_cpu: bool) -> Precision:
    """Return what policy.precision auto stands for: float32 on a CPU like this process's if that has no instructions
    for bfloat16, and nothing in the recipe (or its plain values, completed by defaults) needs bfloat16."""
    needed = any(value_at(config, key) == value for key, value in NEED_BFLOAT16.items())
    return "float32" if on_cpu and not needed and lacks_bfloat16() else "bfloat16"


def settle_precision(config: RecipeSections, saved: Precision | None, *, on_cpu: bool) -> bool:
    """Where the recipe leaves policy.precision to the processor, take that of the checkpoint that is resumed (`saved`),
    or for a new run the one for the platform that was found. Return whether this changes it, and what follows it."""
    policy = config.policy
    before, precision = policy.precision, saved or fast_precision(config, on_cpu=on_cpu)
    if "precision" in policy.model_fields_set or precision == before:
        return False
    for key in (key for key, meaning in NULL_MEANS.items() if meaning == ("policy.precision",)):
        if value_at(config, key) == before:
            set_value_at(config, key.split("."), precision)
    policy.precision, policy.megatron_cfg.optimizer.bf16 = precision, precision == "bfloat16"
    return True
